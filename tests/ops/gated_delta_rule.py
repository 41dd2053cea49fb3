"""gated_delta_rule as the harness calls it."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest

FUNCTIONS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


@dataclass(frozen=True)
class Case:
    why: str
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    l2norm: bool = True
    initial: bool = True
    decay: float = 0.1

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


CASES = [
    Case("grouped value heads"),
    Case("no l2norm no state", l2norm=False, initial=False),
    Case("fast decay", decay=5.0),
    Case("growing state", decay=-0.01),
    # Without l2norm: it would make all keys of one element +1 or -1 and the gradients of q and k nothing but rounding.
    Case("head dims of one", key_heads=4, value_heads=8, key_dim=1, value_dim=1, l2norm=False),
    Case("odd head dims", value_heads=1, key_dim=37, value_dim=19),
    Case("two key heads of three", key_heads=2, value_heads=6, key_dim=8, value_dim=8),
]


def make_inputs(case: Case, pack: Pack, dtype: torch.dtype):
    """Leaves of ``chunk_gated_delta_rule`` by argument name."""
    wide = torch.promote_types(dtype, torch.float32)
    T, H, HV, K, V = pack.tokens, case.key_heads, case.value_heads, case.key_dim, case.value_dim
    size = 1.0 if case.l2norm else 0.25 * K**-0.5  # keys longer than 1 make the recurrence unstable
    inputs = {
        "q": (torch.randn(1, T, H, K) * size).to(dtype),
        "k": (torch.randn(1, T, H, K) * size).to(dtype),
        "v": torch.randn(1, T, HV, V).to(dtype),
        "g": (-case.decay * torch.rand(1, T, HV)).to(wide),
        "beta": torch.rand(1, T, HV).to(wide),
    }
    if case.initial:
        inputs["initial_state"] = torch.randn(len(pack.lengths), HV, K, V).to(wide)
    return inputs


def op_under_test(case: Case, function: str = "chunk_gated_delta_rule") -> OpUnderTest:
    kernel = load_kernel()
    # The function for decoding has no backward pass.
    gradients = nullcontext if function == FUNCTIONS[0] else torch.no_grad

    def run(inputs, **boundaries):
        with gradients():
            return compute(inputs, **boundaries)

    def compute(inputs, **boundaries):
        o, final = getattr(kernel, function)(
            **inputs, **boundaries, output_final_state=True, use_qk_l2norm_in_kernel=case.l2norm
        )
        return {"o": o, "final_state": final}

    def reference(inputs, cu_seqlens):
        o, final = kernel.gated_delta_rule.gated_delta_rule_reference(
            *(inputs[name][0] for name in ("q", "k", "v", "g", "beta")),
            cu_seqlens,
            inputs.get("initial_state"),
            l2norm=case.l2norm,
        )
        return {"o": o[None], "final_state": final}

    return OpUnderTest(
        "gated_delta_rule",
        lambda pack, dtype: make_inputs(case, pack, dtype),
        run,
        reference,
        dict.fromkeys(("q", "k", "v", "g", "beta", "o"), 1),
        states=("initial_state", "final_state"),
    )


def small_inputs(case: Case = CASES[0], lengths=(5, 8), dtype=torch.float32):
    return make_inputs(case, Pack("", tuple(lengths)), dtype)
