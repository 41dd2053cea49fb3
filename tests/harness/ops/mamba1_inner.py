"""Mamba-1's whole mixer, mamba_inner_fn, as the harness calls it."""

import torch
import torch.nn.functional as F

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest

CASES = [False, True]  # whether there are norms


def mixer(norms: bool, dtype=torch.float32, channels=8, states=4, rank=3, hidden=6, width=4):
    """Parameters of a mixer, by the names of mamba_inner_fn."""
    parameters = {
        "conv1d_weight": torch.randn(channels, 1, width),
        "conv1d_bias": torch.randn(channels),
        "x_proj_weight": torch.randn(rank + 2 * states, channels),
        "delta_proj_weight": torch.randn(channels, rank),
        "out_proj_weight": torch.randn(hidden, channels),
        "out_proj_bias": torch.randn(hidden),
        "A": -torch.rand(channels, states).mul(2).exp(),
        "D": torch.randn(channels),
        "delta_bias": torch.randn(channels),
    }
    if norms:
        sizes = {"b_rms_weight": states, "c_rms_weight": states, "dt_rms_weight": channels}
        parameters.update({name: torch.rand(size) + 0.5 for name, size in sizes.items()})
    return {name: value.to(dtype) for name, value in parameters.items()}


def one_sequence(inputs):
    """One sequence in plain torch, written from the formula."""
    inputs = dict(inputs)
    x, z = inputs.pop("xz")[0].chunk(2)
    weight = inputs["conv1d_weight"]
    x = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0))[None], weight, inputs["conv1d_bias"], groups=x.shape[0])[0]
    x = F.silu(x)
    rank, states = inputs["delta_proj_weight"].shape[1], inputs["A"].shape[1]
    dt, B, C = (inputs["x_proj_weight"] @ x).split([rank, states, states])

    def norm(name, value):
        weight = inputs.get(name)
        scale = torch.rsqrt(value.square().mean(0, keepdim=True) + 1e-6)
        return value if weight is None else weight[:, None] * value * scale

    delta = norm("dt_rms_weight", inputs["delta_proj_weight"] @ dt)
    B, C = norm("b_rms_weight", B)[None], norm("c_rms_weight", C)[None]
    whole = torch.tensor([0, x.shape[1]])
    y, _ = load_kernel().mamba1_scan.selective_scan_reference(
        x, delta, inputs["A"], B, C, inputs["D"], z, inputs["delta_bias"], True, whole
    )
    return (y.t() @ inputs["out_proj_weight"].t() + inputs["out_proj_bias"])[None]


def op_under_test(norms: bool) -> OpUnderTest:
    def make(pack: Pack, dtype: torch.dtype):
        return {"xz": torch.randn(1, 16, pack.tokens).to(dtype), **mixer(norms, dtype)}

    def run(inputs, **boundaries):
        return {"out": load_kernel().mamba_inner_fn(**inputs, **boundaries)}

    def reference(inputs, cu_seqlens):
        bounds = zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])
        pieces = [one_sequence({**inputs, "xz": inputs["xz"][:, :, bos:eos]}) for bos, eos in bounds]
        padding = inputs["xz"].shape[2] - int(cu_seqlens[-1])
        return {"out": torch.nn.functional.pad(torch.cat(pieces, 1), (0, 0, 0, padding))}

    return OpUnderTest("mamba_inner_fn", make, run, reference, {"xz": 2, "out": 1})
