"""Faults that users of packed Mamba-1 met in other packages, one test each."""

import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.mamba1_scan import CASES, Case, op_under_test
from tests.harness.packings import SMALL, Pack
from tests.harness.properties import assert_same_bits, run_with_gradients


def test_c05_boundaries_reach_the_scan(kernel):
    pack = Pack("c05", (3, 5, 4))
    op = op_under_test(Case("c05", channels=8, states=4, initial=False))
    properties.check_against_reference(op, pack, torch.float32)
    properties.check_packed_equals_alone(op, pack, torch.float32)
    properties.check_isolation(op, pack, torch.float32)
    properties.check_spellings(op, pack, torch.float32)


def test_c06_empty_segments(kernel):
    op = op_under_test(Case("c06", channels=6, initial=False))
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        inputs = op.make(Pack("plain", (8,)), torch.float32)
        states = torch.randn(len(offsets) - 1, 6, 5, requires_grad=True)
        y, last = kernel.selective_scan_fn(**inputs, cu_seqlens=offsets, initial_states=states, return_last_state=True)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        empty = [n for n in range(len(offsets) - 1) if n not in full]
        assert_same_bits("tokens", y, kernel.selective_scan_fn(**inputs, cu_seqlens=plain, initial_states=states[full]))
        assert last.shape == states.shape and not last.isnan().any()
        assert_same_bits("empty segments keep their state", last[empty], states[empty])
        weights = torch.randn_like(last)
        (gradient,) = torch.autograd.grad((last * weights).sum(), states)
        assert_same_bits("and its gradient", gradient[empty], weights[empty])
        _, zeros = kernel.selective_scan_fn(**inputs, cu_seqlens=offsets, return_last_state=True)
        assert bool((zeros[empty] == 0).all())


def test_c11_boundary_dtypes(kernel):
    inputs = op_under_test(Case("c11", initial=False)).make(Pack("plain", (7,)), torch.float32)
    expected = kernel.selective_scan_fn(**inputs, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    for boundaries in (torch.tensor([0, 3, 7]), [0, 3, 7]):
        assert_same_bits("offsets", kernel.selective_scan_fn(**inputs, cu_seqlens=boundaries), expected)
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert_same_bits("labels", kernel.selective_scan_fn(**inputs, seq_idx=labels), expected)
    with pytest.raises(TypeError, match="seq_idx must be an int32 or int64 tensor, got float32"):
        kernel.selective_scan_fn(**inputs, seq_idx=labels.float())
    with pytest.raises(ValueError, match="seq_idx must hold labels that never decrease"):
        kernel.selective_scan_fn(**inputs, seq_idx=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))


def test_c26_half_precision(kernel, tier):
    """Large steps in fp16, and bf16 tokens beside fp32 steps and parameters."""
    ones = torch.ones(1, 1, 4, dtype=torch.float16)
    y = kernel.selective_scan_fn(300 * ones, 300 * ones, torch.tensor([[-1.0]]), ones, 0.01 * ones, delta_softplus=True)
    torch.testing.assert_close(y, torch.full_like(y, 900), rtol=2e-2, atol=0)

    inputs = op_under_test(Case("c26", initial=False)).make(SMALL, torch.float32)
    mixed = {name: value.bfloat16() if name in ("u", "B", "C", "z") else value for name, value in inputs.items()}
    exact = {name: value.double() for name, value in mixed.items()}

    def scan(leaves):
        return {"y": kernel.selective_scan_fn(**leaves, delta_softplus=True, cu_seqlens=SMALL.cu_seqlens)}

    ours, truth = run_with_gradients(scan, mixed), run_with_gradients(scan, exact)
    for name, value in ours.items():
        assert value.dtype == (torch.bfloat16 if name in ("y", "du", "dB", "dC", "dz") else torch.float32), name
        assert float((value.double() - truth[name]).abs().max()) <= 2e-2 * float(truth[name].abs().max()), name


def test_c55_arguments_are_named(kernel):
    for function in (kernel.selective_scan_fn, kernel.mamba_inner_fn):
        parameters = inspect.signature(function).parameters
        for name in ("seq_idx", "cu_seqlens", "position_ids"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    inputs = op_under_test(Case("c55", initial=False)).make(SMALL, torch.float32)
    assert isinstance(kernel.selective_scan_fn(**inputs, seq_idx=None, cu_seqlens=None), torch.Tensor)


def test_c58_no_tokens(kernel):
    op = op_under_test(CASES[0])
    pack = Pack("nothing", ())
    for boundaries in ({"cu_seqlens": [0]}, {}):
        inputs = op.make(pack, torch.float32)
        if not boundaries:
            inputs["initial_states"] = torch.randn(1, 19, 5)
        results = run_with_gradients(lambda leaves, b=boundaries, op=op: op.run(leaves, **b), inputs)
        assert results["y"].shape == (1, 19, 0) and results["dB"].shape == inputs["B"].shape
        assert_same_bits("state", results["last_states"], inputs["initial_states"])
        for name in ("dA", "dD", "ddelta_bias"):
            assert bool((results[name] == 0).all())
