"""flash_attn_varlen: against its reference, and packed against alone."""

import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.flash_attn_varlen import CASES, Case, draw_ranges, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits
from tests.harness.tolerance import check_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, tier):
    for pack in catalogue(edge=64):
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[8], CASES[11]], ids=str)
def test_packing_properties(case, tier):
    for pack in catalogue(edge=64):
        properties.check_all_properties(op_under_test(case), pack, torch.float32)


EDGES = [Pack("edges", (63, 1, 65, 130), padding=2), Pack("empty", (0, 5, 0, 9, 0))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packing_properties_in_half_precision(dtype, tier):
    for pack in EDGES:
        properties.check_all_properties(op_under_test(CASES[8]), pack, dtype)


def test_packing_properties_in_double():
    for pack in EDGES:
        properties.check_all_properties(op_under_test(CASES[8]), pack, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in (CASES[0], CASES[8]):
        properties.check_memory_forms(op_under_test(case), Pack("ragged", (5, 9, 17, 3)), dtype)


LONG = Pack("several key ranges", (530, 1060, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("long causal", heads=(2, 1), dims=(16, 16)),
        Case("long window", heads=(2, 2), dims=(16, 8), causal=False, window=(300, 40), sinks=True),
        Case("long softcap", heads=(3, 1), dims=(72, 40), softcap=5.0, window=(700, 0), sinks=True, query_scale=4.0),
        Case("long blocks", heads=(2, 1), dims=(16, 16), ranges="blocks"),
        Case("long ranges of any kind", heads=(2, 2), dims=(16, 8), ranges="any", sinks=True),
    ],
    ids=str,
)
def test_sequences_of_several_key_ranges(case, dtype, tier):
    """Where dq is summed over ranges of keys that different threads own."""
    op = op_under_test(case)
    properties.check_against_reference(op, LONG, dtype)
    properties.check_packed_equals_alone(op, LONG, dtype)
    properties.check_repeatable(op, LONG, dtype, threads=(1, 3))


def test_gradcheck_on_the_real_backward(kernel):
    for case in (CASES[0], CASES[3], CASES[8], CASES[11]):
        op = op_under_test(case)
        inputs = op.make(SMALL, torch.float64)
        names = list(inputs)

        def call(*values, op=op, names=names):
            return tuple(op.run(dict(zip(names, values)), cu_seqlens_q=SMALL.cu_seqlens).values())

        leaves = [value.requires_grad_(value.is_floating_point()) for value in inputs.values()]
        assert torch.autograd.gradcheck(call, leaves)


LENGTH_PAIRS = [
    ((5, 70, 1), (9, 140, 3)),  # more keys: the last query is aligned with the last key
    ((9, 140, 3), (5, 70, 1)),  # more queries: causal, the first ones see nothing
    # Queries without keys, keys without queries. Long enough that the reference's own largest error is a fair sample.
    ((4, 0, 30, 0), (0, 5, 30, 0)),
]


@pytest.mark.parametrize("settings", [dict(causal=True), dict(), dict(window_size=(6, 2))], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("lengths", LENGTH_PAIRS, ids=str)
def test_different_query_and_key_lengths(kernel, lengths, sinks, settings, tier):
    queries, keys = Pack("queries", lengths[0], padding=2), Pack("keys", lengths[1], padding=3)
    inputs = {
        "q": torch.randn(queries.tokens, 4, 16),
        "k": torch.randn(keys.tokens, 2, 16),
        "v": torch.randn(keys.tokens, 2, 24),
    }
    if sinks:
        inputs["s_aux"] = torch.randn(4)
    offsets = (queries.cu_seqlens, keys.cu_seqlens)

    def ours(leaves):
        out = kernel.flash_attn_varlen_func(**leaves, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **settings)
        return {"out": out}

    def reference(leaves):
        out, _ = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            leaves["q"], leaves["k"], leaves["v"], *offsets, s_aux=leaves.get("s_aux"), **settings
        )
        return {"out": out}

    truth = properties.run_with_gradients(reference, properties.cast(inputs, torch.float64))
    working = properties.run_with_gradients(reference, inputs)
    result = properties.run_with_gradients(ours, inputs)
    for name in truth:
        summands = queries.tokens if name == "ds_aux" else 1
        check_close("flash_attn_varlen", name, result[name], working[name], truth[name], summands)
    assert bool((result["out"][-2:] == 0).all()) and bool((result["dq"][-2:] == 0).all())
    assert bool((result["dk"][-3:] == 0).all()) and bool((result["dv"][-3:] == 0).all())
    _, lse, _ = kernel.flash_attn_varlen_func(
        **inputs, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **settings, return_attn_probs=True
    )
    expected = kernel.flash_attn_varlen.flash_attn_varlen_reference(
        inputs["q"], inputs["k"], inputs["v"], *offsets, s_aux=inputs.get("s_aux"), **settings
    )[1]
    torch.testing.assert_close(lse, expected)  # -infinity where nothing is seen and there is no sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_matches_reference(kernel, dtype, tier):
    """The pattern of the reference's hash, in outputs and every gradient."""
    pack = Pack("dropout", (3, 0, 21, 9), padding=2)
    inputs = op_under_test(CASES[6]).make(pack, dtype)

    def ours(leaves):
        torch.manual_seed(11)
        return {
            "out": kernel.flash_attn_varlen_func(
                **leaves, cu_seqlens_q=pack.cu_seqlens, dropout_p=0.3, causal=True, softcap=3.0
            )
        }

    torch.manual_seed(11)
    seed = int(torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64))

    def reference(leaves):
        out, _ = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            leaves["q"], leaves["k"], leaves["v"], pack.cu_seqlens, pack.cu_seqlens, s_aux=leaves["s_aux"],
            dropout_p=0.3, causal=True, softcap=3.0, seed=seed,
        )  # fmt: skip
        return {"out": out}

    truth = properties.run_with_gradients(reference, properties.cast(inputs, torch.float64))
    working = properties.run_with_gradients(reference, inputs)
    result = properties.run_with_gradients(ours, inputs)
    for name in truth:
        summands = pack.tokens if name == "ds_aux" else 1
        check_close("flash_attn_varlen dropout", name, result[name], working[name], truth[name], summands)


def test_dropout_rate_and_repeats(kernel):
    """Weights survive at the stated rate, differently in each head, query and sequence, alike under the same seed."""
    keep = kernel.flash_attn_varlen.dropout_keep
    grids = [keep(seed, sequence, head, 64, 256, 0.25) for seed in (1, 2) for sequence in (0, 1) for head in (0, 1)]
    for grid in grids:
        assert abs(float(grid.double().mean()) - 0.75) < 4 * (0.25 * 0.75 / grid.numel()) ** 0.5
        assert abs(float(grid.double().mean(0).std()) - (0.25 * 0.75 / 64) ** 0.5) < 0.02
        assert abs(float(grid.double().mean(1).std()) - (0.25 * 0.75 / 256) ** 0.5) < 0.02
    for i, left in enumerate(grids):
        for right in grids[i + 1 :]:
            assert abs(float((left == right).double().mean()) - (0.75**2 + 0.25**2)) < 0.02
    q, k, v = torch.randn(40, 2, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)

    def draw(seed):
        torch.manual_seed(seed)
        return kernel.flash_attn_varlen_func(q, k, v, [0, 40], dropout_p=0.5)

    assert_same_bits("the same seed", draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_dropout_repeats_in_checkpoint(kernel):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return kernel.flash_attn_varlen_func(q, k, v, [0, 5, 12], dropout_p=0.5, causal=True)

    results = []
    for reentrant in (None, True, False):
        torch.manual_seed(5)
        out = attend(q, k, v) if reentrant is None else checkpoint(attend, q, k, v, use_reentrant=reentrant)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v)))) if reentrant is not True else None
        if reentrant:
            out.square().sum().backward()
            results.append((out, q.grad, k.grad, v.grad))
    for other in results[1:]:
        for left, right in zip(results[0], other):
            assert_same_bits("checkpointed", left, right)


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    q, k, v = (torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    seed = torch.tensor([7])
    offsets = SMALL.cu_seqlens
    ranges = draw_ranges("any", 10)
    for s_aux, dropout, settings in (
        (None, 0.0, (-1, 0, 0.0)),
        (sinks, 0.2, (3, 3, 5.0)),
        (None, 0.0, (-1, -1, 0.0, ranges)),
    ):
        shared = (offsets, offsets, s_aux, seed if dropout else None, dropout, 0.3, *settings)
        torch.library.opcheck(ops.flash_attn_varlen_fwd.default, (q, k, v, *shared))
        with torch.no_grad():
            out, lse = ops.flash_attn_varlen_fwd(q, k, v, *shared)
        shared = (offsets, offsets, None if s_aux is None else s_aux.detach(), *shared[3:])
        detached = (q.detach(), k.detach(), v.detach())
        for dlse in (None, torch.randn_like(lse)):
            arguments = (torch.randn_like(out), dlse, *detached, out, lse, *shared)
            torch.library.opcheck(ops.flash_attn_varlen_bwd.default, arguments)


def test_batched_form_equals_packed(kernel):
    """flash_attn_func is the packed function over equal rows, to the bit, also on transposed inputs."""
    q, k, v = (torch.randn(3, heads, 7, 8).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    offsets = [0, 7, 14, 21]
    flat = [x.reshape(21, -1, 8) for x in (q, k, v)]
    out, lse, nothing = kernel.flash_attn_func(q, k, v, causal=True, window_size=(3, 3), return_attn_probs=True)
    packed, packed_lse, _ = kernel.flash_attn_varlen_func(
        *flat, offsets, causal=True, window_size=(3, 3), return_attn_probs=True
    )
    assert nothing is None and out.shape == (3, 7, 4, 8) and lse.shape == (3, 4, 7)
    assert_same_bits("out", out.reshape(21, 4, 8), packed)
    assert_same_bits("lse", lse, packed_lse.reshape(4, 3, 7).transpose(0, 1))
    weights = torch.randn_like(out)
    left = torch.autograd.grad((out * weights).sum(), (q, k, v))
    right = torch.autograd.grad((packed * weights.reshape(21, 4, 8)).sum(), (q, k, v))
    for name, a, b in zip(("dq", "dk", "dv"), left, right):
        assert_same_bits(name, a, b)


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    inputs = op_under_test(CASES[0]).make(SMALL, torch.float32)

    def call(leaves):
        return {"out": kernel.flash_attn_varlen_func(**leaves, cu_seqlens_q=SMALL.cu_seqlens, causal=True)}

    dense = properties.run_with_gradients(call, inputs, {"out": torch.ones(SMALL.tokens, 4, 32, dtype=torch.float64)})
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    for name, gradient in zip(leaves, torch.autograd.grad(call(leaves)["out"].sum(), list(leaves.values()))):
        assert_same_bits(f"d{name}", gradient, dense[f"d{name}"])


def test_empty_inputs(kernel):
    q, k, v = (torch.randn(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    for offsets in ([0], [0, 0, 0]):
        out = kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True, s_aux=sinks)
        assert out.shape == (0, 4, 8)
        gradients = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, sinks.shape]
        assert bool((gradients[3] == 0).all())


def test_sinks_keep_their_dtype(kernel):
    """transformers passes sinks in the query's dtype or in float32."""
    q, k, v = (torch.randn(6, heads, 8).bfloat16() for heads in (4, 2, 2))
    for dtype in (torch.bfloat16, torch.float32):
        sinks = torch.randn(4).to(dtype).requires_grad_()
        kernel.flash_attn_varlen_func(q, k, v, [0, 6], s_aux=sinks).float().sum().backward()
        assert sinks.grad.dtype == dtype


# Of two sequences of 3 and 5 tokens: each query sees the first three keys.
_RANGES = torch.tensor([[0, 2]] * 8)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(q=torch.randn(8, 16)), ValueError, r"q must have 3 dimensions, got shape \(8, 16\)"),
        (dict(q=torch.ones(8, 4, 16, dtype=torch.int32)), TypeError, "q must have one of the dtypes .*, got int32"),
        (dict(k=torch.randn(8, 2, 16).bfloat16()), TypeError, "k must have q's dtype torch.float32, got"),
        (dict(k=torch.randn(8, 2, 16, device="meta")), ValueError, "k must be on cpu"),
        (dict(k=torch.randn(8, 2, 12)), ValueError, r"k must have shape \[Tk, HK, K\]"),
        (dict(v=torch.randn(7, 2, 16)), ValueError, r"v must have shape \[Tk, HK, V\]"),
        (dict(q=torch.randn(8, 3, 16)), ValueError, "num_heads must be a multiple of k's 2 heads, got 3"),
        (dict(v=torch.randn(8, 2, 513)), ValueError, r"head_dim of v must lie in 1 \.\. 512, got 513"),
        (dict(cu_seqlens_q=[0, 3, 9]), ValueError, r"cu_seqlens_q must end at the number of tokens \(8\) or before"),
        (dict(cu_seqlens_q=[2, 8]), ValueError, "cu_seqlens_q must start at 0, got 2"),
        (dict(cu_seqlens_q=[0, 6, 4, 8]), ValueError, "cu_seqlens_q must never decrease, got 4 after 6 at index 2"),
        (dict(cu_seqlens_q=torch.tensor([0.0, 8.0])), TypeError, "cu_seqlens_q must be an int32 or int64 tensor"),
        (dict(cu_seqlens_k=[0, 3, 9]), ValueError, "cu_seqlens_k must end at the number of tokens"),
        (dict(cu_seqlens_k=[0, 8]), ValueError, r"cu_seqlens_k must list as many sequences as cu_seqlens_q \(2\)"),
        (dict(max_seqlen_q=4), ValueError, r"max_seqlen_q must be at least the longest sequence \(5\), got 4"),
        (dict(max_seqlen_k=torch.tensor(4)), ValueError, "max_seqlen_k must be at least the longest sequence"),
        (dict(dropout_p=1.0), ValueError, r"dropout_p must lie in \[0, 1\), got 1.0"),
        (dict(softcap=-1.0), ValueError, "softcap must be 0 .off. or positive, got -1.0"),
        (dict(window_size=3), TypeError, r"window_size must be two ints \(left, right\), got 3"),
        (dict(s_aux=torch.randn(2)), ValueError, r"s_aux must have shape \[H\] = \(4,\), got \(2,\)"),
        (dict(alibi_slopes=torch.ones(4)), NotImplementedError, "alibi_slopes is not supported"),
        (dict(block_table=torch.zeros(1, 1)), NotImplementedError, "block_table is not supported"),
        (dict(visible_keys=_RANGES.float()), TypeError, "visible_keys must have one of the dtypes int32, int64, got"),
        (dict(visible_keys=_RANGES[:7]), ValueError, r"visible_keys must have shape \[Tq, 2\] = \(8, 2\), got"),
        (dict(visible_keys=_RANGES.to("meta")), ValueError, "visible_keys must be on cpu"),
        (dict(visible_keys=_RANGES, causal=True), ValueError, "visible_keys must come without causal and window_size"),
        (dict(visible_keys=_RANGES, window_size=(3, 0)), ValueError, r"without .* got window_size=\(3, 0\)"),
        (dict(visible_keys=_RANGES + 1), ValueError, r"lie in 0 \.\. 2, the keys of .*, got \[1, 3\] for query 0"),
        (dict(visible_keys=_RANGES - 1), ValueError, r"visible_keys must lie in 0 .*, got \[-1, 1\] for query 0"),
        (dict(unknown=1), TypeError, "unexpected keyword argument 'unknown'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rejects(kernel, change, error, text):
    arguments = dict(
        q=torch.randn(8, 4, 16), k=torch.randn(8, 2, 16), v=torch.randn(8, 2, 16), cu_seqlens_q=[0, 3, 8]
    )
    arguments.update(change)
    with pytest.raises(error, match=text):
        kernel.flash_attn_varlen_func(**arguments)


def test_direct_op_calls_check_what_memory_safety_needs(kernel):
    fwd = kernel._ops.ops.flash_attn_varlen_fwd
    q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    good = torch.tensor([0, 8], dtype=torch.int32)
    rest = (None, None, 0.0, 1.0, -1, 0, 0.0)
    for offsets in ([0, 9], [1, 8], [0, 5, 3, 8], [-1, 8]):
        bad = torch.tensor(offsets, dtype=torch.int32)
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(RuntimeError, match="cu_seqlens"):
                fwd(q, k, v, *pair, *rest)
    for broken in ((q, k[:7], v), (q[:, :3], k, v), (q, k[..., :8], v), (q, k.bfloat16(), v), (q[0], k, v)):
        with pytest.raises(RuntimeError, match="flash_attn_varlen_fwd: "):
            fwd(*broken, good, good, *rest)
    with pytest.raises(RuntimeError, match="s_aux must be"):
        fwd(q, k, v, good, good, torch.randn(3), *rest[1:])
    ranges = torch.zeros(8, 2, dtype=torch.int32)
    for broken in (ranges[:7], ranges.long(), ranges.T.contiguous(), ranges[:, :1].expand(8, 2)):
        with pytest.raises(RuntimeError, match="visible_keys must be"):
            fwd(q, k, v, good, good, *rest[:4], -1, -1, 0.0, broken)
    with pytest.raises(RuntimeError, match="visible_keys and a window exclude"):
        fwd(q, k, v, good, good, *rest[:4], -1, 0, 0.0, ranges)


def test_signature_names_what_callers_look_for(kernel):
    names = inspect.signature(kernel.flash_attn_varlen_func).parameters
    wanted = {"dropout_p", "deterministic", "window_size", "softcap", "s_aux", "max_seqlen_q", "max_seqlen_k"}
    assert wanted <= set(names)
    for function in (kernel.flash_attn_varlen_func, kernel.flash_attn_func):
        parameters = inspect.signature(function).parameters.values()
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
