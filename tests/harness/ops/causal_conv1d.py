"""causal_conv1d as the harness calls it."""

from dataclasses import dataclass
from typing import Optional

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest


@dataclass(frozen=True)
class Case:
    why: str
    channels: int = 20
    width: int = 4
    bias: bool = True
    activation: Optional[str] = "silu"
    initial: bool = True
    channels_last: bool = True

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


CASES = [
    Case("channel-last"),
    Case("token-contiguous", channels_last=False),
    Case("width 2 no bias no activation", width=2, bias=False, activation=None),
    Case("width 3 token-contiguous", width=3, channels_last=False),
    Case("width 7", width=7),
    Case("width 8 token-contiguous", width=8, channels_last=False),
    Case("zero initial state", initial=False),
    Case("one channel", channels=1),
    Case("more than one channel block", channels=67),
]


def op_under_test(case: Case) -> OpUnderTest:
    kernel = load_kernel()

    def make(pack: Pack, dtype: torch.dtype):
        x = torch.randn(1, pack.tokens, case.channels)
        x = x.transpose(1, 2) if case.channels_last else x.transpose(1, 2).contiguous()
        inputs = {"x": x.to(dtype), "weight": torch.randn(case.channels, case.width).to(dtype)}
        if case.bias:
            inputs["bias"] = torch.randn(case.channels).to(dtype)
        if case.initial:
            inputs["initial_states"] = torch.randn(len(pack.lengths), case.channels, case.width - 1).to(dtype)
        return inputs

    def run(inputs, **boundaries):
        y, final = kernel.causal_conv1d_fn(**inputs, **boundaries, return_final_states=True, activation=case.activation)
        return {"y": y, "final_states": final}

    def reference(inputs, cu_seqlens):
        y, final = kernel.causal_conv1d.causal_conv1d_reference(
            inputs["x"][0],
            inputs["weight"],
            inputs.get("bias"),
            cu_seqlens,
            inputs.get("initial_states"),
            case.activation,
        )
        return {"y": y[None], "final_states": final}

    return OpUnderTest(
        "causal_conv1d", make, run, reference, {"x": 2, "y": 2}, states=("initial_states", "final_states")
    )
