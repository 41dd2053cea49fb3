"""Calls the ops with malformed arguments, past the checks of the Python functions: a call returns or raises, and never
touches memory that is not its own.

    python tests/fuzz/calls.py LIBRARY NAMESPACE [--inputs N] [--first SEED] [--seconds S]

LIBRARY is the shared object that registers the ops; built with the address sanitizer (tools/sanitize.py), it ends the
process at a bad access. Input number SEED is the same everywhere. Prints a line before each input, and at the end how
many were tried and how many of them were refused.
"""

import argparse
import random
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import torch

Arguments = Dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [0, -1, 1, -(2**63), 2**63 - 1, 2**62, 1000]
FLOATS = [0.0, -1.0, 1.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
OFFSETS = [-(2**31), -1, 0, 1, 2, 5, 100, 2**31 - 1]


# ---- valid calls --------------------------------------------------------------------------------------------------


class Draw(random.Random):
    def maybe(self, value: Any) -> Any:
        return value if self.random() < 0.5 else None

    def flag(self) -> bool:
        return self.random() < 0.5

    def dtypes(self) -> Tuple[torch.dtype, torch.dtype]:
        """Of tensors, and of what is kept beside them."""
        dtype = self.choice(DTYPES)
        return dtype, torch.float64 if dtype == torch.float64 else torch.float32

    def boundaries(self, tokens: int, rows: int = 1) -> torch.Tensor:
        """Of two sequences: in one row of tokens, or each a row."""
        ends = [tokens, 2 * tokens] if rows == 2 else sorted(self.randint(0, tokens) for _ in range(2))
        return torch.tensor([0, *ends], dtype=torch.int32)


def tensor(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.rand(*sizes).to(dtype)


def convolution(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    B, T, D, W, N = draw.randint(1, 2), draw.randint(1, 9), draw.choice([1, 3, 8, 17]), draw.randint(2, 4), 2
    last = draw.flag()
    x = tensor(dtype, B, T, D) if last else tensor(dtype, B, D, T)
    arguments = dict(
        x=x, weight=tensor(dtype, D, W), bias=draw.maybe(tensor(dtype, D)),
        cu_seqlens=draw.boundaries(T, B), initial_states=draw.maybe(tensor(dtype, N, D, W - 1)),
        silu=draw.flag(), channels_last=last, want_states=draw.flag(),
    )  # fmt: skip
    if backward:
        del arguments["want_states"]
        arguments.update(dy=tensor(dtype, *x.shape), dfinal_states=draw.maybe(tensor(wide, N, D, W - 1)))
    return arguments


def convolution_update(draw: Draw, backward: bool) -> Arguments:
    dtype, _ = draw.dtypes()
    B, T, D, W, rows = draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 3, 17]), draw.randint(2, 4), 3
    return dict(
        x=tensor(dtype, B, D, T), conv_state=tensor(dtype, rows, D, W), weight=tensor(dtype, D, W),
        bias=draw.maybe(tensor(dtype, D)), cache_seqlens=draw.maybe(torch.randint(0, 9, (B,))),
        conv_state_indices=named_slots(draw, B, rows), silu=draw.flag(),
    )  # fmt: skip


def named_slots(draw: Draw, batch: int, rows: int) -> torch.Tensor:
    """A row of a cache for each entry of a batch, all different, or -1: padding."""
    return torch.where(torch.rand(batch) < 0.2, -1, torch.randperm(rows)[:batch])


def attention(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    Tq, Tk, HK, K, V = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 2), 5, draw.choice([5, 16])
    H = HK * draw.randint(1, 2)
    arguments = dict(
        q=tensor(dtype, Tq, H, K), k=tensor(dtype, Tk, HK, K), v=tensor(dtype, Tk, HK, V),
        cu_seqlens_q=draw.boundaries(Tq), cu_seqlens_k=draw.boundaries(Tk), s_aux=draw.maybe(tensor(wide, H)),
        seed=torch.tensor([7]), dropout_p=draw.choice([0.0, 0.5]), softmax_scale=0.4, window_left=draw.randint(-1, 3),
        window_right=draw.randint(-1, 3), softcap=draw.choice([0.0, 2.0]),
    )  # fmt: skip
    if draw.flag():
        ranges = torch.randint(-2, Tk + 2, (Tq, 2), dtype=torch.int32)
        arguments.update(window_left=-1, window_right=-1, visible_keys=ranges)
    if backward:
        arguments.update(
            dout=tensor(dtype, Tq, H, V), out=tensor(dtype, Tq, H, V), lse=tensor(wide, H, Tq),
            dlse=draw.maybe(tensor(wide, H, Tq)),
        )  # fmt: skip
    return arguments


def delta_rule(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    T, H, K, V, N = draw.randint(1, 9), draw.randint(1, 2), draw.choice([3, 16]), draw.choice([5, 17]), 2
    HV = H * draw.randint(1, 2)
    arguments = dict(
        q=tensor(dtype, T, H, K), k=tensor(dtype, T, H, K), v=tensor(dtype, T, HV, V), g=-tensor(wide, T, HV),
        beta=tensor(wide, T, HV), cu_seqlens=draw.boundaries(T), initial_state=draw.maybe(tensor(wide, N, HV, K, V)),
        scale=0.5, l2norm=draw.flag(), want_state=draw.flag(),
    )  # fmt: skip
    if backward:
        del arguments["want_state"]
        arguments.update({"dout": tensor(dtype, T, HV, V), "dfinal_state": draw.maybe(tensor(wide, N, HV, K, V))})
    return arguments


def kimi(draw: Draw, backward: bool) -> Arguments:
    arguments = delta_rule(draw, backward)
    (T, HV), wide, K = arguments["g"].shape, arguments["g"].dtype, arguments["q"].shape[2]
    gate = draw.maybe(tensor(wide, HV))
    arguments.update(
        g=-tensor(wide, T, HV, K), a_log=gate, dt_bias=None if gate is None else draw.maybe(tensor(wide, HV, K)),
        lower_bound=None if gate is None else draw.maybe(-5.0),
    )  # fmt: skip
    return arguments


def mamba1(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    B, G, T, S, N = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 9), draw.choice([1, 4, 5]), 2
    D = G * draw.choice([1, 8, 9])
    last = draw.flag()

    def coefficients() -> torch.Tensor:
        return draw.choice([tensor(dtype, B, G, S, T), tensor(wide, D, S)])

    arguments = dict(
        u=tensor(dtype, B, D, T), delta=tensor(dtype, B, D, T), A=-tensor(wide, D, S), B=coefficients(),
        C=coefficients(), D=draw.maybe(tensor(wide, D)), z=draw.maybe(tensor(dtype, B, D, T)),
        delta_bias=draw.maybe(tensor(wide, D)), cu_seqlens=draw.boundaries(T, B),
        initial_states=draw.maybe(tensor(wide, N, D, S)), delta_softplus=draw.flag(), channels_last=last,
        want_states=draw.flag(),
    )  # fmt: skip
    if backward:
        del arguments["want_states"]
        dy = tensor(dtype, B, T, D) if last else tensor(dtype, B, D, T)
        arguments.update(dy=dy, dfinal_states=draw.maybe(tensor(wide, N, D, S)))
    return arguments


def mamba2(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    T, G, P, S, N = draw.randint(1, 9), draw.randint(1, 2), draw.choice([1, 5, 17]), draw.choice([1, 4, 17]), 2
    H = G * draw.choice([1, 5])
    arguments = dict(
        x=tensor(dtype, T, H, P), dt=tensor(wide, T, H), A=-tensor(wide, H), B=tensor(dtype, T, G, S),
        C=tensor(dtype, T, G, S), D=draw.maybe(tensor(wide, H, P)), z=draw.maybe(tensor(dtype, T, H, P)),
        dt_bias=draw.maybe(tensor(wide, H)), cu_seqlens=draw.boundaries(T),
        initial_state=draw.maybe(tensor(wide, N, H, P, S)), dt_softplus=draw.flag(), dt_min=0.0, dt_max=1e9,
        want_state=draw.flag(),
    )  # fmt: skip
    if backward:
        del arguments["want_state"]
        arguments.update(dy=tensor(dtype, T, H, P), dfinal_state=draw.maybe(tensor(wide, N, H, P, S)))
    return arguments


def state_update(draw: Draw, backward: bool) -> Arguments:
    dtype, wide = draw.dtypes()
    B, G, P, S = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 5, 17]), draw.choice([1, 4, 17])
    H, rows, coefficients = G * draw.choice([1, 2]), B + draw.randint(0, 2), draw.choice([dtype, wide])
    slots = named_slots(draw, B, rows) if rows > B else draw.maybe(named_slots(draw, B, rows))
    return dict(
        state=tensor(draw.choice([dtype, wide]), rows, H, P, S), x=tensor(dtype, B, H, P), dt=tensor(wide, B, H, P),
        A=-tensor(wide, H, P, S), B=tensor(coefficients, B, G, S), C=tensor(coefficients, B, G, S),
        D=draw.maybe(tensor(wide, H, P)),
        z=draw.maybe(tensor(dtype, B, H, P)), dt_bias=draw.maybe(tensor(wide, H, P)), dt_softplus=draw.flag(),
        state_batch_indices=slots,
    )  # fmt: skip


def positions(draw: Draw, backward: bool) -> Arguments:
    integers = draw.choice([torch.int32, torch.int64])
    return dict(positions=torch.randint(-1, 4, (draw.randint(1, 2), draw.randint(1, 9)), dtype=integers),
                only_falls=draw.flag())  # fmt: skip


def labels(draw: Draw, backward: bool) -> Arguments:
    return dict(seq_idx=positions(draw, backward)["positions"])


def offsets(draw: Draw, backward: bool) -> Arguments:
    tokens = draw.randint(0, 9)
    return dict(cu_seqlens=draw.boundaries(tokens), tokens=tokens)


VALID: Dict[str, Callable[[Draw, bool], Arguments]] = {
    "causal_conv1d_fwd": convolution,
    "causal_conv1d_bwd": convolution,
    "causal_conv1d_update": convolution_update,
    "flash_attn_varlen_fwd": attention,
    "flash_attn_varlen_bwd": attention,
    "gated_delta_rule_fwd": delta_rule,
    "gated_delta_rule_recurrent_fwd": delta_rule,
    "gated_delta_rule_bwd": delta_rule,
    "kda_fwd": kimi,
    "kda_recurrent_fwd": kimi,
    "kda_bwd": kimi,
    "mamba1_scan_fwd": mamba1,
    "mamba1_scan_bwd": mamba1,
    "mamba2_scan_fwd": mamba2,
    "mamba2_scan_bwd": mamba2,
    "packing_from_labels": labels,
    "packing_from_offsets": offsets,
    "packing_from_positions": positions,
    "selective_state_update": state_update,
}


# ---- faults -------------------------------------------------------------------------------------------------------


def resized(draw: Draw, value: torch.Tensor) -> torch.Tensor:
    """One axis shorter, longer or empty; or one axis fewer or more."""
    if value.dim() == 0 or draw.random() < 0.2:
        return value.unsqueeze(0)
    axis = draw.randrange(value.dim())
    size = value.shape[axis]
    kind = draw.randrange(4)
    if kind == 0:
        return value.narrow(axis, 0, max(size - 1, 0))
    if kind == 1:
        return torch.cat([value, value.narrow(axis, 0, min(1, size))], axis)
    if kind == 2:
        return value.narrow(axis, 0, 0)
    return value.select(axis, 0) if size > 0 else value.unsqueeze(0)


def relaid(draw: Draw, value: torch.Tensor) -> torch.Tensor:
    """The same shape with other strides, or axes exchanged."""
    if value.dim() == 0:
        return value
    axis, other = draw.randrange(value.dim()), draw.randrange(value.dim())
    kind = draw.randrange(4)
    if kind == 0:
        return value.transpose(axis, other)
    if kind == 1:
        return value.narrow(axis, 0, min(1, value.shape[axis])).expand_as(value)
    if kind == 2:
        return torch.stack([value, value], axis).flatten(axis, axis + 1).narrow(axis, 0, value.shape[axis])
    wide = torch.stack([value, value], value.dim())
    return wide.select(value.dim(), 1)


def malformed(draw: Draw, value: torch.Tensor) -> torch.Tensor:
    kind = draw.randrange(4)
    if kind == 0:
        return value.to(draw.choice([*DTYPES, torch.int32, torch.int64, torch.bool]))
    if kind == 1:
        return value.to("meta") if draw.random() < 0.1 else resized(draw, value)
    return resized(draw, value) if kind == 2 else relaid(draw, value)


def bad_integers(draw: Draw, value: torch.Tensor) -> torch.Tensor:
    """Boundaries or indices with wrong values."""
    value = value.clone()
    for _ in range(draw.randint(1, 2)):
        if value.numel() > 0:
            choices = OFFSETS if value.dtype == torch.int32 else OFFSETS + INTEGERS
            value.view(-1)[draw.randrange(value.numel())] = draw.choice(choices)
    return value


def spoil(draw: Draw, name: str, value: Any) -> Any:
    """The argument with a fault that its type allows. None stays, as the kernels know it."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() and draw.random() < 0.7:
            return bad_integers(draw, value)
        return malformed(draw, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(INTEGERS)
    return draw.choice(FLOATS) if isinstance(value, float) else value


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{str(value.dtype)[6:]}{list(value.shape)}"
    if not value.is_contiguous():
        text += f" strides {list(value.stride())}"
    return text if value.is_floating_point() or value.is_meta else f"{text} {value.flatten().tolist()}"


def make_call(seed: int) -> Tuple[str, Arguments, int]:
    """Call number ``seed``: the op, its arguments, and how many faults (up to three) were put into them."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    op = draw.choice(sorted(VALID))
    arguments = VALID[op](draw, op.endswith("_bwd"))
    words = ("seqlens", "indices", "visible")
    integers = [name for name, value in arguments.items() if any(word in name for word in words)]
    faults = draw.choice([0, 1, 1, 1, 2, 3])
    for _ in range(faults):
        name = draw.choice(integers if integers and draw.flag() else sorted(arguments))
        arguments[name] = spoil(draw, name, arguments[name])
    return op, arguments, faults


def touch(results: Any) -> None:
    """Reads every element of what came back."""
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if not result.is_meta:
            result.double().sum().item()


def run(namespace: str, first: int, inputs: int, seconds: float, say: Callable[[str], None]) -> Tuple[int, int]:
    """How many calls were tried, and how many of them raised."""
    ops = getattr(torch.ops, namespace)
    started, refused = time.monotonic(), 0
    for tried in range(inputs):
        if seconds and time.monotonic() - started > seconds:
            return tried, refused
        op, arguments, faults = make_call(first + tried)
        described = ", ".join(f"{name} {describe(value)}" for name, value in arguments.items())
        say(f"INPUT {op} {first + tried}: {described}")
        try:
            touch(getattr(ops, op)(**arguments))
        except (RuntimeError, IndexError):
            if faults == 0:
                raise
            refused += 1
    return inputs, refused


def main(words: List[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("namespace")
    parser.add_argument("--inputs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    arguments = parser.parse_args(words)
    torch.ops.load_library(arguments.library)
    torch.set_num_threads(2)
    tried, refused = run(
        arguments.namespace, arguments.first, arguments.inputs, arguments.seconds, lambda line: print(line, flush=True)
    )
    print(f"REFUSED {refused}")
    print(f"TRIED {tried}")


if __name__ == "__main__":
    main(sys.argv[1:])
