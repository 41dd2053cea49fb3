"""Attention in which each query sees a range of keys of its own, on the CPU and in Triton's interpreter.

The random cases of tests/harness/ops/flash_attn_varlen.py hold the numbers; here is what ranges mean.
"""

from contextlib import nullcontext

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.flash_attn_varlen import Case, draw_ranges, op_under_test
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits
from tests.harness.triton import served_by_triton

PACK = Pack("edges", (70, 0, 33, 1), padding=3)


@pytest.fixture(params=["cpu", "triton"])
def served(request, kernel):
    with served_by_triton(kernel) if request.param == "triton" else nullcontext():
        yield request.param


def tensors(pack, heads=(2, 1), dim=16):
    return {
        "q": torch.randn(pack.tokens, heads[0], dim),
        "k": torch.randn(pack.tokens, heads[1], dim),
        "v": torch.randn(pack.tokens, heads[1], dim),
    }


def windowed(pack, left, right):
    """The ranges of a window, -1 being unbounded."""
    ranges = []
    for length in pack.lengths:
        at = torch.arange(length)
        first = torch.zeros_like(at) if left < 0 else (at - left).clamp(min=0)
        last = torch.full_like(at, length - 1) if right < 0 else (at + right).clamp(max=length - 1)
        ranges.append(torch.stack([first, last], 1))
    return torch.cat([*ranges, torch.full((pack.padding, 2), 99)])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 9)], ids=str)
def test_the_ranges_of_a_window_are_that_window(kernel, served, window):
    """One mechanism: the same bits on a CPU; on a GPU tiles are visited in another order in the backward."""
    inputs = tensors(PACK)

    def call(leaves, **settings):
        out, lse, _ = kernel.flash_attn_varlen_func(
            **leaves, cu_seqlens_q=PACK.cu_seqlens, return_attn_probs=True, **settings
        )
        return {"out": out, "lse": lse}

    listed = properties.run_with_gradients(lambda x: call(x, visible_keys=windowed(PACK, *window)), inputs)
    stated = properties.run_with_gradients(lambda x: call(x, window_size=window), inputs)
    for name, value in stated.items():
        if served == "cpu" or name in ("out", "lse"):
            assert_same_bits(name, listed[name], value)
        else:
            torch.testing.assert_close(listed[name], value, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing(kernel, served):
    inputs = tensors(PACK)
    ranges = windowed(PACK, -1, 0)
    blind = torch.arange(PACK.tokens - PACK.padding) % 3 == 0
    ranges[: len(blind)][blind] = torch.tensor([5, 4])
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    out, lse, _ = kernel.flash_attn_varlen_func(
        **leaves, cu_seqlens_q=PACK.cu_seqlens, visible_keys=ranges, return_attn_probs=True
    )
    dq, dk, dv = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    assert bool((out[: len(blind)][blind] == 0).all()) and bool((dq[: len(blind)][blind] == 0).all())
    assert bool((lse[:, : len(blind)][:, blind] == float("-inf")).all())
    assert bool(torch.isfinite(dk).all()) and bool(torch.isfinite(dv).all())
    nothing = torch.tensor([0, -1]).expand_as(ranges)
    nobody = kernel.flash_attn_varlen_func(**inputs, cu_seqlens_q=PACK.cu_seqlens, visible_keys=nothing)
    assert bool((nobody == 0).all())


def test_more_keys_than_queries(kernel, served):
    """Ranges count from the sequence's first key, not from the query's aligned one."""
    queries, keys = Pack("queries", (3, 40)), Pack("keys", (67, 9), padding=2)
    inputs = {"q": torch.randn(43, 2, 8), "k": torch.randn(78, 1, 8), "v": torch.randn(78, 1, 8)}
    ranges = torch.cat([draw_ranges("any", 67)[:3], draw_ranges("any", 9).repeat(5, 1)[:40]])
    offsets = dict(cu_seqlens_q=queries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens)
    ours = properties.run_with_gradients(
        lambda x: {"out": kernel.flash_attn_varlen_func(**x, **offsets, visible_keys=ranges)}, inputs
    )
    reference = kernel.flash_attn_varlen.flash_attn_varlen_reference
    truth = properties.run_with_gradients(lambda x: {"out": reference(**x, **offsets, visible_keys=ranges)[0]}, inputs)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def test_ranges_beyond_the_sequence_are_cut_where_values_are_not_looked_at(kernel, served):
    """The op itself, which a GPU and a compiled graph call unchecked: a neighbour's key is never read."""
    inputs = tensors(PACK)
    inside = windowed(PACK, -1, -1).to(torch.int32)
    wild = inside.clone()
    wild[:, 0], wild[:, 1] = -(2**31), 2**31 - 1
    offsets = PACK.cu_seqlens
    fwd, bwd = kernel._ops.ops.flash_attn_varlen_fwd, kernel._ops.ops.flash_attn_varlen_bwd
    results = []
    for ranges in (inside, wild):
        settings = (offsets, offsets, None, None, 0.0, 0.3, -1, -1, 0.0, ranges)
        out, lse = fwd(*inputs.values(), *settings)
        results.append((out, lse, *bwd(torch.ones_like(out), None, *inputs.values(), out, lse, *settings)))
    for left, right in zip(*results):
        assert_same_bits("cut", left, right)


def test_dropout_keeps_its_pattern(kernel, served):
    inputs = tensors(PACK)
    results = []
    for settings in (dict(causal=True), dict(visible_keys=windowed(PACK, -1, 0))):
        torch.manual_seed(3)
        results.append(kernel.flash_attn_varlen_func(**inputs, cu_seqlens_q=PACK.cu_seqlens, dropout_p=0.4, **settings))
    assert_same_bits("dropout", *results)


def test_batched_form(kernel, served):
    q, k, v = (torch.randn(2, 35, heads, 8) for heads in (2, 1, 1))
    ranges = torch.stack([draw_ranges("blocks", 35), draw_ranges("any", 35)])
    out = kernel.flash_attn_func(q, k, v, visible_keys=ranges.long())
    for row in range(2):
        alone = kernel.flash_attn_varlen_func(q[row], k[row], v[row], [0, 35], visible_keys=ranges[row])
        assert_same_bits("row", out[row], alone)
    with pytest.raises(ValueError, match=r"visible_keys must have shape \[B, Tq, 2\] = \(2, 35, 2\)"):
        kernel.flash_attn_func(q, k, v, visible_keys=ranges[:, :34])


def test_one_graph_for_any_ranges_and_number_of_sequences(kernel):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, offsets, ranges):
        return kernel.flash_attn_varlen_func(q, k, v, offsets, visible_keys=ranges)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ((5, 9, 17), (8, 23), (1, 2, 3, 25)):
        pack = Pack("compiled", lengths)
        leaves = [x.requires_grad_() for x in tensors(pack).values()]
        ranges = torch.cat([draw_ranges("blocks", n) for n in lengths])
        eager, out = (f(*leaves, pack.cu_seqlens, ranges) for f in (attend, compiled))
        assert_same_bits("compiled", out, eager)
        for left, right in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(eager.sum(), leaves)):
            assert_same_bits("compiled", left, right)
    assert counter.frame_count <= 2


def test_memory_grows_with_tokens(kernel):
    """20,000 tokens in one sequence: a mask would be 400 MB."""
    from torch.profiler import ProfilerActivity, profile

    op = op_under_test(Case("long", heads=(1, 1), dims=(8, 8), ranges="windowed blocks"))
    pack = Pack("long", (20000,))
    inputs = op.make(pack, torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        properties.run_with_gradients(lambda x: op.run(x, **op.boundaries(pack)), inputs)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in record.key_averages()) < 40e6
