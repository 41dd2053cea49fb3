"""Mamba-2's fused layer: against its reference, packed against alone, compiled, and what it refuses."""

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.mamba2_fused import LAYERS, Layer
from tests.harness.packings import SMALL, Pack
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops.test_mamba2_scan import DTYPES


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_matches_reference(layer, dtype):
    for pack in (Pack("ragged", (5, 9, 17, 3)), Pack("empty", (0, 4, 0, 6)), Pack("padding", (3, 6), padding=5)):
        properties.check_against_reference(layer.op(), pack, dtype)


@pytest.mark.parametrize("layer", LAYERS[:3], ids=str)
def test_fused_keeps_sequences_apart(layer):
    layer = layer.without_projection()
    pack = Pack("ragged", (5, 67, 1, 3))
    properties.check_isolation(layer.op(), pack, torch.float32)
    properties.check_spellings(layer.op(), pack, torch.float32)
    properties.check_packed_equals_alone(layer.op(), pack, torch.float32)


def test_fused_is_zero_on_padding():
    """With the projection's bias too, whatever lies there, and between the rows of a batch."""
    layer = Layer(beside=3, initial=False)
    inputs = layer.make(Pack("row", (12,)), torch.float32)
    inputs["zxbcdt"] = torch.cat([inputs["zxbcdt"], inputs["zxbcdt"] + 1])
    seq_idx = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
    inputs["zxbcdt"][seq_idx < 0] = torch.nan
    results = run_with_gradients(lambda leaves: layer.run(leaves, seq_idx=seq_idx), inputs)
    assert not results["out"][seq_idx < 0].any() and not results["dzxbcdt"][seq_idx < 0].any()
    assert all(torch.isfinite(value).all() for value in results.values())


def test_fused_returns_what_upstream_returns(kernel):
    layer = Layer()
    inputs = layer.make(SMALL, torch.float32)
    options = dict(chunk_size=16, headdim=8, ngroups=2, cu_seqlens=SMALL.cu_seqlens)
    out = kernel.mamba_split_conv1d_scan_combined(**inputs, **options)
    assert isinstance(out, torch.Tensor) and out.shape == (1, 10, 10)
    both = kernel.mamba_split_conv1d_scan_combined(**inputs, **options, return_final_states=True)
    assert_same_bits("out", both[0], out)
    assert both[1].shape == (3, 4, 8, 6)


def test_c38_compiles_once_for_all_lengths(kernel):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layer = Layer(initial=False)
    weights = {name: value for name, value in layer.make(SMALL, torch.float32).items() if name != "zxbcdt"}
    width = layer.make(SMALL, torch.float32)["zxbcdt"].shape[-1]

    function = kernel.mamba_split_conv1d_scan_combined

    def step(zxbcdt):
        return function(zxbcdt, **weights, chunk_size=16, headdim=8, ngroups=2, norm_before_gate=False)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (18, 27, 45):
        zxbcdt = torch.randn(2, length, width, requires_grad=True)
        out = compiled(zxbcdt)
        (gradient,) = torch.autograd.grad(out.square().sum(), zxbcdt)
        expected = step(zxbcdt)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), zxbcdt)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(headdim=None), ValueError, r"headdim must be given where D has shape \[H\], got None"),
        (dict(D=torch.randn(4, 7)), ValueError, "headdim must be the 7 columns of D, got 8"),
        (dict(ngroups=3), ValueError, "ngroups must divide the 4 heads, got 3"),
        (dict(zxbcdt=torch.randn(1, 10, 91)), ValueError, r"zxbcdt must have 92 channels .* got 91"),
        (dict(zxbcdt=torch.randn(1, 10, 93)), ValueError, r"zxbcdt must have 92 channels .* got 93"),
        (dict(conv1d_weight=torch.randn(30, 4)), ValueError, r"conv1d_weight must have 32 \+ 2 \* 2 \* S channels"),
        (dict(rmsnorm_weight=torch.randn(31)), ValueError, r"rmsnorm_weight must have shape \[H P\] = \(32,\)"),
        (dict(outproj_weight=torch.randn(10, 31)), ValueError, r"outproj_weight must have shape \[E, M \+ H P\]"),
        (dict(outproj_weight=None), ValueError, "outproj_bias must come with an outproj_weight"),
        (dict(chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
    ],
)
def test_fused_rejects(kernel, change, error, text):
    inputs = Layer(initial=False).make(Pack("", (10,)), torch.float32)
    options = dict(chunk_size=16, headdim=8, ngroups=2)
    with pytest.raises(error, match="mamba_split_conv1d_scan_combined: " + text):
        kernel.mamba_split_conv1d_scan_combined(**{**inputs, **options, **change})


def test_c20_labels_change_around_the_edge_of_a_chunk(kernel):
    """In bf16: outputs within 2e-2 of float32, every gradient finite and within its budget."""
    layer = Layer(groups=1)
    for edge in (255, 256, 257):
        pack = Pack(f"edge at {edge}", (edge, 300 - edge))
        properties.check_against_reference(layer.op(), pack, torch.bfloat16)
        inputs = layer.make(pack, torch.bfloat16)
        narrow, wide = (
            layer.run(own, seq_idx=pack.seq_idx) for own in (inputs, properties.cast(inputs, torch.float32))
        )
        for name, value in narrow.items():
            assert float((value.float() - wide[name]).abs().max()) < 2e-2 * float(wide[name].abs().max()), name
