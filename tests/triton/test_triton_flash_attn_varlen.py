"""flash_attn_varlen in Triton: the kernels run in the interpreter, through the public functions, on CPU tensors."""

import random

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.flash_attn_varlen import CASES, Case, op_under_test
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits
from tests.harness.tolerance import check_close
from tests.harness.triton import DTYPES, served_by_triton

# Tiles have 32, 64 or 128 rows, which are half as many tokens of two heads, and 32 or 64 keys.
EDGES = Pack("edges", (33, 0, 65, 1), padding=3)
LONG = Pack("one long among short", (2, 135, 1))
SMALL = Pack("small", (3, 0, 17, 1), padding=2)


@pytest.fixture(autouse=True)
def _served_by_triton(kernel):
    with served_by_triton(kernel):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case):
    properties.check_against_reference(op_under_test(case), EDGES, torch.float32)


@pytest.mark.parametrize(
    "case, dtype",
    [(CASES[0], torch.float16), (CASES[3], torch.float16), (CASES[8], torch.float16), (CASES[8], torch.bfloat16)],
    ids=str,
)
def test_matches_reference_in_16_bits(case, dtype):
    properties.check_against_reference(op_under_test(case), EDGES, dtype)


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_long_sequences(case):
    """Several whole blocks between the masked ones at both ends."""
    properties.check_against_reference(op_under_test(case), LONG, torch.float32)


@pytest.mark.kernels_ci
def test_packed_equals_alone():
    properties.check_packed_equals_alone(op_under_test(CASES[8]), Pack("two", (3, 9), padding=1), torch.float32)


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=str)
def test_packing_properties(case):
    op = op_under_test(case)
    properties.check_packed_equals_alone(op, EDGES, torch.float16)
    properties.check_isolation(op, EDGES, torch.float16, victims=(0,))


def test_memory_forms():
    properties.check_memory_forms(op_under_test(CASES[4]), SMALL, torch.float16)


@pytest.mark.parametrize("dims", [(40, 24), (72, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(dims):
    properties.check_against_reference(op_under_test(Case("dims", heads=(2, 1), dims=dims)), SMALL, torch.float32)


def test_more_heads_in_a_group_than_rows_in_a_tile():
    case = Case("wide group", heads=(70, 1), dims=(8, 8), window=(5, 0), sinks=True)
    op = op_under_test(case)
    pack = Pack("wide group", (1, 4), padding=1)
    properties.check_against_reference(op, pack, torch.float32)
    properties.check_packed_equals_alone(op, pack, torch.float32)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(kernel, scale):
    inputs = op_under_test(CASES[0]).make(SMALL, torch.float32)

    def reference(leaves):
        attend = kernel.flash_attn_varlen.flash_attn_varlen_reference
        out, lse = attend(**leaves, cu_seqlens_q=SMALL.cu_seqlens, cu_seqlens_k=SMALL.cu_seqlens, softmax_scale=scale)
        return {"out": out, "lse": lse}

    def ours(leaves):
        out, lse, _ = kernel.flash_attn_varlen_func(
            **leaves, cu_seqlens_q=SMALL.cu_seqlens, softmax_scale=scale, return_attn_probs=True
        )
        return {"out": out, "lse": lse}

    _agree(inputs, ours, reference, SMALL.tokens)


def _agree(inputs, ours, reference, tokens):
    """Results and gradients lie within the budget; -infinity is where the reference has it."""
    truth = properties.run_with_gradients(reference, properties.cast(inputs, torch.float64))
    working = properties.run_with_gradients(reference, inputs)
    result = properties.run_with_gradients(ours, inputs)
    assert result.keys() == truth.keys()
    for name in truth:
        summands = tokens if name == "ds_aux" else 1
        check_close("flash_attn_varlen", name, result[name], working[name], truth[name], summands)
    return result


LENGTH_PAIRS = [
    ((5, 40, 1), (9, 67, 3)),  # more keys: the last query is aligned with the last key
    ((9, 67, 3), (5, 40, 1)),  # more queries: causal, the first ones see nothing
    ((4, 0, 30, 0), (0, 5, 30, 0)),  # queries without keys, keys without queries
]


@pytest.mark.parametrize("settings", [dict(causal=True), dict(window_size=(6, 2))], ids=str)
@pytest.mark.parametrize("lengths", LENGTH_PAIRS, ids=str)
def test_different_query_and_key_lengths(kernel, lengths, settings):
    queries, keys = Pack("queries", lengths[0], padding=2), Pack("keys", lengths[1], padding=3)
    offsets = dict(cu_seqlens_q=queries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens)
    inputs = {
        "q": torch.randn(queries.tokens, 4, 16),
        "k": torch.randn(keys.tokens, 2, 16),
        "v": torch.randn(keys.tokens, 2, 24),
    }
    reference = kernel.flash_attn_varlen.flash_attn_varlen_reference
    result = _agree(
        inputs,
        lambda leaves: {"out": kernel.flash_attn_varlen_func(**leaves, **offsets, **settings)},
        lambda leaves: {"out": reference(**leaves, **offsets, **settings)[0]},
        queries.tokens,
    )
    for name, padding in (("out", 2), ("dq", 2), ("dk", 3), ("dv", 3)):
        assert bool((result[name][-padding:] == 0).all()), name
    _, lse, _ = kernel.flash_attn_varlen_func(**inputs, **offsets, **settings, return_attn_probs=True)
    # -infinity where nothing is seen and there is no sink.
    torch.testing.assert_close(lse, reference(**inputs, **offsets, **settings)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_matches_reference(kernel, dtype):
    """The pattern of the CPU's hash, in outputs and every gradient."""
    pack = Pack("dropout", (3, 0, 21, 9), padding=2)
    inputs = op_under_test(CASES[6]).make(pack, dtype)
    settings = dict(dropout_p=0.3, causal=True, softcap=3.0)
    torch.manual_seed(11)
    seed = int(torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64))
    offsets = dict(cu_seqlens_q=pack.cu_seqlens, cu_seqlens_k=pack.cu_seqlens)
    reference = kernel.flash_attn_varlen.flash_attn_varlen_reference

    def ours(leaves):
        torch.manual_seed(11)
        return {"out": kernel.flash_attn_varlen_func(**leaves, **offsets, **settings)}

    _agree(inputs, ours, lambda leaves: {"out": reference(**leaves, **offsets, **settings, seed=seed)[0]}, pack.tokens)


def test_every_window_hides_what_it_should(kernel):
    """Windows of all kinds over lengths of all kinds, against the reference."""
    draw = random.Random(3)
    for _ in range(8):
        lengths = [(draw.randrange(40), draw.randrange(80)) for _ in range(3)]
        queries, keys = (Pack("random", tuple(part)) for part in zip(*lengths))
        window = (draw.choice([-1, 0, 3, 33, 70, 2**62]), draw.choice([-1, 0, 5, 40, 2**63 - 1]))
        offsets = dict(cu_seqlens_q=queries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens, window_size=window)
        inputs = {"q": torch.randn(queries.tokens, 2, 8), "k": torch.randn(keys.tokens, 1, 8)}
        inputs["v"] = torch.randn(keys.tokens, 1, 8)
        reference = kernel.flash_attn_varlen.flash_attn_varlen_reference
        with torch.no_grad():
            out = kernel.flash_attn_varlen_func(**inputs, **offsets)
        torch.testing.assert_close(out, reference(**inputs, **offsets)[0], rtol=1e-5, atol=1e-5)


def test_window_over_all_earlier_tokens_is_plain_causal(kernel):
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    offsets = [0, 5, 12]
    plain = kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True)
    assert_same_bits("window", kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True, window_size=(6, 6)), plain)
    torch.testing.assert_close(kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True, window_size=(0, 0)), v)


def test_empty_segments_and_tail_add_nothing_to_sinks(kernel):
    inputs = op_under_test(CASES[6]).make(SMALL, torch.float32)
    live = {name: value if name == "s_aux" else value[:21] for name, value in inputs.items()}
    weights = properties.cotangents({"out": torch.empty(SMALL.tokens, 4, 32)})
    results = []
    for values, offsets, weight in (
        (inputs, [0, 3, 3, 20, 21], weights["out"]),
        (live, [0, 3, 20, 21], weights["out"][:21]),
    ):

        def call(leaves, offsets=offsets):
            return {"out": kernel.flash_attn_varlen_func(**leaves, cu_seqlens_q=offsets, causal=True)}

        results.append(properties.run_with_gradients(call, values, {"out": weight})["ds_aux"])
    assert float(results[0].abs().min()) > 0
    assert_same_bits("ds_aux", *results)


def test_inputs_without_tokens(kernel):
    q, k, v = (torch.randn(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    for offsets in ([0], [0, 0, 0]):
        out = kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True, s_aux=sinks)
        gradients = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        assert out.shape == (0, 4, 8) and bool((gradients[3] == 0).all())
    # Keys without a query get a gradient of 0, and queries without a key see nothing.
    some = torch.randn(3, 2, 8, requires_grad=True)
    out = kernel.flash_attn_varlen_func(q, some, some, [0, 0], [0, 3])
    assert bool((torch.autograd.grad(out.sum(), some)[0] == 0).all())
    out = kernel.flash_attn_varlen_func(some, k[:, :2], v[:, :2], [0, 3], [0, 0])
    assert bool((out == 0).all()) and bool((torch.autograd.grad(out.sum(), some)[0] == 0).all())


def test_batched_form_and_cache(kernel):
    """The other two functions call the same op."""
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    settings = dict(causal=True, window_size=(4, 0))
    whole = kernel.flash_attn_func(q, k, v, **settings)
    for row in range(2):
        alone = kernel.flash_attn_varlen_func(q[row], k[row], v[row], [0, 9], **settings)
        assert_same_bits("batched", whole[row], alone)
    k_cache, v_cache = torch.zeros(3, 12, 2, 16), torch.zeros(3, 12, 2, 16)
    for begin, end in ((0, 8), (8, 9)):
        out = kernel.flash_attn_with_kvcache(
            q[:, begin:end], k_cache, v_cache, k[:, begin:end], v[:, begin:end], cache_seqlens=begin,
            cache_batch_idx=torch.tensor([2, 0]), **settings,
        )  # fmt: skip
        torch.testing.assert_close(out, whole[:, begin:end], rtol=1e-5, atol=1e-5)


def test_refuses_what_no_gpu_kernel_serves(kernel):
    q = torch.randn(4, 2, 8, dtype=torch.float64)
    with pytest.raises(
        TypeError, match="q must have one of the dtypes float32, bfloat16, float16 on a GPU, got float64"
    ):
        kernel.flash_attn_varlen_func(q, q, q, [0, 4])
    q, v = torch.randn(4, 2, 8), torch.randn(4, 2, 257)
    with pytest.raises(ValueError, match=r"head_dim of v must lie in 1 \.\. 256 on a GPU, got 257"):
        kernel.flash_attn_varlen_func(q, q, v, [0, 4])
