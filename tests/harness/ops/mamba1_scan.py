"""mamba1_scan as the harness calls it."""

from dataclasses import dataclass

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest

EDGE = 32  # tokens of a block of the kernel


@dataclass(frozen=True)
class Case:
    why: str
    channels: int = 19
    states: int = 5
    groups: int = 1
    fixed_B: bool = False
    fixed_C: bool = False
    skip: bool = True
    gate: bool = True
    bias: bool = True
    softplus: bool = True
    initial: bool = True
    channels_last: bool = True

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


CASES = [
    Case("channel-last"),
    Case("token-contiguous", channels_last=False, states=4),
    Case("bare", skip=False, gate=False, bias=False, softplus=False, initial=False),
    Case("fixed B and C", channels=6, fixed_B=True, fixed_C=True),
    Case("fixed B", channels=6, fixed_B=True, channels_last=False),
    Case("fixed C", channels=6, fixed_C=True),
    Case("groups", channels=6, groups=3, states=2),
    Case("one channel one state", channels=1, states=1),
    Case("more than one channel block", channels=131, states=16),
]


def op_under_test(case: Case) -> OpUnderTest:
    kernel = load_kernel()
    token_axis = {"u": 2, "delta": 2, "z": 2, "y": 2}
    token_axis.update({name: 3 for name, fixed in (("B", case.fixed_B), ("C", case.fixed_C)) if not fixed})

    def make(pack: Pack, dtype: torch.dtype):
        def stream(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor if case.channels_last else tensor.transpose(1, 2).contiguous().transpose(1, 2)
            return tensor.to(dtype).transpose(1, 2)

        def coefficients(fixed: bool) -> torch.Tensor:
            if fixed:
                return torch.randn(case.channels, case.states).to(dtype)
            return torch.randn(1, case.groups, case.states, pack.tokens).to(dtype)

        shape = (1, pack.tokens, case.channels)
        inputs = {
            "u": stream(torch.randn(shape)),
            "delta": stream(torch.randn(shape) if case.softplus else torch.rand(shape)),
            "A": -torch.rand(case.channels, case.states).mul(2).exp().to(dtype),
            "B": coefficients(case.fixed_B),
            "C": coefficients(case.fixed_C),
        }
        if case.skip:
            inputs["D"] = torch.randn(case.channels).to(dtype)
        if case.gate:
            inputs["z"] = stream(torch.randn(shape))
        if case.bias:
            inputs["delta_bias"] = torch.randn(case.channels).to(dtype)
        if case.initial:
            inputs["initial_states"] = torch.randn(len(pack.lengths), case.channels, case.states).to(dtype)
        return inputs

    def run(inputs, **boundaries):
        y, last = kernel.selective_scan_fn(**inputs, **boundaries, delta_softplus=case.softplus, return_last_state=True)
        return {"y": y, "last_states": last}

    def reference(inputs, cu_seqlens):
        def row(name):
            return inputs[name][0] if name in token_axis and name in inputs else inputs.get(name)

        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
        y, last = kernel.mamba1_scan.selective_scan_reference(
            *map(row, names), case.softplus, cu_seqlens, inputs.get("initial_states")
        )
        return {"y": y[None], "last_states": last}

    return OpUnderTest("mamba1_scan", make, run, reference, token_axis, states=("initial_states", "last_states"))
