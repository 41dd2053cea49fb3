"""mamba2_scan as the harness calls it."""

import math
from dataclasses import dataclass
from typing import Optional, Tuple

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest


@dataclass(frozen=True)
class Case:
    why: str
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    state_dim: int = 16
    skip: Optional[str] = "head"
    gate: bool = True
    bias: bool = True
    softplus: bool = True
    limit: Tuple[float, float] = (0.0, math.inf)
    initial: bool = True
    growing: bool = False

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


CASES = [
    Case("everything"),
    Case("as transformers calls it", gate=False, initial=False),
    Case("bare", skip=None, gate=False, bias=False, softplus=False, initial=False),
    Case("more heads than a unit", heads=6, groups=1, head_dim=5, state_dim=19, skip="channel"),
    Case("steps clamped", limit=(0.3, 0.9), gate=False),
    Case("rates of both signs", heads=2, groups=1, growing=True, gate=False),
    Case("wider than a register tile", heads=1, groups=1, head_dim=70, state_dim=130, skip="channel"),
    Case("one channel one state", heads=3, groups=3, head_dim=1, state_dim=1),
]


def op_under_test(case: Case) -> OpUnderTest:
    kernel = load_kernel()

    def make(pack: Pack, dtype: torch.dtype):
        H, G, P, S, T = case.heads, case.groups, case.head_dim, case.state_dim, pack.tokens
        dt = torch.randn(1, T, H)
        rates = -torch.rand(H) - 0.1
        if case.growing:
            rates = torch.linspace(-1, 0.02, H)
        inputs = {
            "x": torch.randn(1, T, H, P).to(dtype),
            "dt": (dt if case.softplus else dt.abs()).to(dtype),
            "A": rates.to(dtype),
            "B": torch.randn(1, T, G, S).to(dtype),
            "C": torch.randn(1, T, G, S).to(dtype),
        }
        if case.skip is not None:
            inputs["D"] = torch.randn((H,) if case.skip == "head" else (H, P)).to(dtype)
        if case.gate:
            inputs["z"] = torch.randn(1, T, H, P).to(dtype)
        if case.bias:
            inputs["dt_bias"] = torch.randn(H).to(dtype)
        if case.initial:
            inputs["initial_states"] = torch.randn(len(pack.lengths), H, P, S).to(dtype)
        return inputs

    options = dict(dt_softplus=case.softplus, dt_limit=case.limit)

    def run(inputs, **boundaries):
        y, states = kernel.mamba_chunk_scan_combined(
            **inputs, **boundaries, chunk_size=32, return_final_states=True, **options
        )
        return {"y": y, "final_states": states}

    def reference(inputs, cu_seqlens):
        rows = {name: inputs[name][0] for name in ("x", "dt", "B", "C", "z") if name in inputs}
        y, states = kernel.mamba2_scan.mamba2_scan_reference(
            **{**inputs, **rows}, cu_seqlens=cu_seqlens, **options
        )
        return {"y": y[None], "final_states": states}

    token_axis = {name: 1 for name in ("x", "dt", "B", "C", "z", "y")}
    return OpUnderTest(
        "mamba2_scan", make, run, reference, token_axis, states=("initial_states", "final_states")
    )
