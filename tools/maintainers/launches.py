"""Count what a training call of each function that Triton serves would start on a GPU, without one.

    python -m tools.maintainers.launches             writes benchmarks/results/launches.json
    python -m tools.maintainers.launches --check     writes nothing: does any call start more than the table says?

A launch is a Triton kernel, or an operation of PyTorch that computes something: views and new memory are none. Counted
from the public function on and through the backward pass, in bfloat16, at sizes at which models call it:

  first    with offsets that no call has seen: they are brought inside the row, and lists of work are made of them
  again    with the same offsets, as in every layer but the first, in every backward and every recompute

``before`` is what a call took when each made its own lists, and stays as it was counted then; ``peer`` is what the
kernels of flash-linear-attention and mamba-ssm start for the same call, counted in their sources.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("LOCAL_KERNELS", f"org/packfree-kernels={ROOT / 'build'}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "launches.json"
TOKENS, OFFSETS = 256, [0, 100, 101, 230]
# Function -> launches of its peer's forward and backward pass.
PEERS = {
    "flash_attn_varlen_func": {"forward": 1, "backward": 3},
    "chunk_gated_delta_rule": {"forward": 5, "backward": 9},
    "mamba_chunk_scan_combined": {"forward": 5, "backward": 12},
}


class Launches(TorchDispatchMode):
    """Counts launches by name. Triton's are recorded for a GPU instead of started, so that results are not computed.

    Attributes:
        counts: all of them.
        of_integers: those that neither read nor write a number with a fraction, as what is made of boundaries does.
    """

    def __init__(self, kernel: ModuleType):
        super().__init__()
        self.devices = importlib.import_module(f"{kernel.__name__}._devices")
        self.prefix = kernel._ops.add_op_namespace_prefix("")
        self.launcher = importlib.import_module(f"{kernel.__name__}._triton.launch")
        self.counts: Counter[str] = Counter()
        self.of_integers: Counter[str] = Counter()

    def _count(self, name: str, *values: Any) -> None:
        self.counts[name] += 1
        if not any(isinstance(value, Tensor) and value.is_floating_point() for value in tree_leaves(values)):
            self.of_integers[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix(self.prefix).partition(".")[0]
        if name not in self.devices.TRITON:
            with self:  # what is made of other operations is counted as those
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
            made = func(*args, **(kwargs or {}))
            if computes(func):
                self._count(name.removeprefix("aten::"), args, kwargs, made)
            return made
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given.update(zip(given, args), **(kwargs or {}))
        with self, self.launcher.recorded(self.launcher.SM90) as launches:
            outputs = self.devices.triton_implementation(name)(*given.values())
        for launch in launches:
            self._count(launch.kernel.fn.__name__, launch.arguments)
        return outputs


def computes(func: Any) -> bool:
    """Whether an operation starts a kernel on a GPU: not one that returns memory as it is, a view or new."""
    name = func.name().partition("::")[2]
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return not (is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "promote_types")))


@contextmanager
def as_on_a_gpu(kernel: ModuleType):
    """No value of a boundary is looked at, and offsets are converted as a GPU's are."""
    packing = importlib.import_module(f"{kernel.__name__}.packing")
    seams = {"reads_values": lambda tensor: False, "_is_gpu": lambda device: True}
    changed = [
        (module, name, getattr(module, name))
        for module in [module for key, module in sys.modules.items() if key.startswith(f"{kernel.__name__}.")]
        for name in seams
        if getattr(module, name, None) is getattr(packing, name)
    ]
    try:
        for module, name, _ in changed:
            setattr(module, name, seams[name])
        yield
    finally:
        for module, name, before in changed:
            setattr(module, name, before)


# A layer's call: offsets to output.
Call = Callable[[Tensor], Tensor]


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def _attention(kernel: ModuleType) -> Call:
    q, k, v = _new(TOKENS, 8, 128), _new(TOKENS, 2, 128), _new(TOKENS, 2, 128)
    return lambda cut: kernel.flash_attn_varlen_func(q, k, v, cut, causal=True)


def _delta_rule(kernel: ModuleType) -> Call:
    q, k, v = (_new(1, TOKENS, heads, 128) for heads in (4, 4, 8))
    g, beta = (_new(1, TOKENS, 8, dtype=torch.float32) for _ in range(2))
    return lambda cut: kernel.chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cut
    )[0]  # fmt: skip


def _kda(kernel: ModuleType, **gate: Any) -> Call:
    q, k, v = (_new(1, TOKENS, 4, 128) for _ in range(3))
    g, beta = _new(1, TOKENS, 4, 128, dtype=torch.float32), _new(1, TOKENS, 4, dtype=torch.float32)
    return lambda cut: kernel.chunk_kda(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cut, **gate
    )[0]  # fmt: skip


def _kda_with_its_gate(kernel: ModuleType) -> Call:
    rate, bias = _new(4, dtype=torch.float32), _new(512, dtype=torch.float32)
    return _kda(kernel, use_gate_in_kernel=True, A_log=rate, dt_bias=bias)


def _mamba2(kernel: ModuleType) -> Call:
    x, dt, B, C = (_new(1, TOKENS, *shape) for shape in ((16, 64), (16,), (1, 128), (1, 128)))
    A, D, bias = (_new(16, dtype=torch.float32) for _ in range(3))
    return lambda cut: kernel.mamba_chunk_scan_combined(
        x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True, cu_seqlens=cut
    )  # fmt: skip


# Each function as a model's layer calls it.
CALLS = {
    "flash_attn_varlen_func": _attention,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _kda,
    "chunk_kda with its gate": _kda_with_its_gate,
    "mamba_chunk_scan_combined": _mamba2,
}


def counted(kernel: ModuleType, call: Call, cut: Tensor) -> dict[str, Counter[str]]:
    """Launches of one forward and of its backward pass."""
    with as_on_a_gpu(kernel), Launches(kernel) as forward:
        out = call(cut)
    gradient = torch.zeros_like(out)
    with as_on_a_gpu(kernel), Launches(kernel) as backward:
        out.backward(gradient)
    return {"forward": forward.counts, "backward": backward.counts}


def table_of(kernel: ModuleType) -> dict[str, Any]:
    table = {}
    for name, make in CALLS.items():
        cut = torch.tensor(OFFSETS)
        passes = {}
        first, again = (counted(kernel, make(kernel), cut) for _ in range(2))
        for side in ("forward", "backward"):
            passes[side] = {
                "first": sum(first[side].values()), "again": sum(again[side].values()),
                "kernels": dict(sorted(again[side].items())),
            }  # fmt: skip
        table[name] = passes
    return table


def with_notes(table: dict[str, Any]) -> dict[str, Any]:
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name, passes in table.items():
        for side, row in passes.items():
            row["before"] = known.get(name, {}).get(side, row).get("before", row["first"])
            row["peer"] = PEERS.get(name, {}).get(side)
    return table


def text_of(table: dict[str, Any]) -> str:
    """One line a pass."""
    lines = [
        f'  "{name}": {{\n' + ",\n".join(f'    "{side}": {json.dumps(row)}' for side, row in passes.items()) + "\n  }"
        for name, passes in table.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def grown(table: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Where today's calls start more launches than the committed table says, or fewer, which it does not know yet."""
    found = [f"the table has no {name}" for name in table if name not in known]
    for name, passes in table.items():
        for side, row in passes.items():
            for when in ("first", "again"):
                limit = known.get(name, {}).get(side, row)[when]
                if row[when] != limit:
                    found.append(f"{name}'s {side} pass starts {row[when]} ({when}), and {limit} by the table")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; does any call start more?")
    arguments = parser.parse_args()
    from kernels import get_kernel

    table = table_of(get_kernel("org/packfree-kernels", version=1))
    if not arguments.check:
        TABLE.write_text(text_of(with_notes(table)))
    elif found := grown(table, json.loads(TABLE.read_text())):
        sys.exit("\n".join(f"launches: {text}" for text in found))
    for name, passes in table.items():
        print(f"{name}: " + "; ".join(f"{side} {row['first']}, again {row['again']}" for side, row in passes.items()))


if __name__ == "__main__":
    main()
