"""What the gated delta rule and Kimi delta attention have in common, for both functions of each.

Their own tests are in test_gated_delta_rule.py and test_kda.py, the faults of other packages in
test_delta_rules_cases.py.
"""

import pytest
import torch

from tests.harness import properties
from tests.harness.ops import gated_delta_rule, kda
from tests.harness.ops.delta_rules import CASES, TOKENS, Case
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [gated_delta_rule.RULE, kda.RULE]
FUNCTIONS = [pytest.param(rule, function, id=function) for rule in RULES for function in rule.functions]

every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
every_function = pytest.mark.parametrize("rule, function", FUNCTIONS)


def cases_of(module):
    return [pytest.param(module.RULE, case, id=f"{module.RULE}-{case}") for case in module.CASES]


@pytest.mark.parametrize("pack", catalogue(edge=64)[-2:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_rule
def test_matches_reference_over_chunks(rule, dtype, pack):
    properties.check_against_reference(rule.op_under_test(CASES[0]), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule, case", cases_of(gated_delta_rule) + cases_of(kda))
def test_recurrent_matches_reference(rule, case, dtype, tier):
    op = rule.op_under_test(case, rule.recurrent)
    packs = (SMALL, Pack("empty", (0, 4, 0), padding=3), Pack("longer", (33,)))
    for pack in packs if rule.per_channel else catalogue(edge=16):
        check_forward(op, pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_rule
def test_recurrent_over_more_than_one_strip(rule, dtype, tier):
    check_forward(rule.op_under_test(Case("", value_dim=150), rule.recurrent), SMALL, dtype)


def check_forward(op, pack, dtype):
    """Outputs against the reference, for the function without a backward pass."""
    inputs = op.make(pack, dtype)
    truth = op.reference(properties.cast(inputs, torch.float64), pack.cu_seqlens)
    working = op.reference(inputs, pack.cu_seqlens)
    ours = op.run(inputs, cu_seqlens=pack.cu_seqlens)
    for name in truth:
        properties.check_close("recurrent", name, ours[name], working[name], truth[name])


@pytest.mark.parametrize("rule, case", cases_of(gated_delta_rule) + cases_of(kda))
def test_gradcheck_on_the_real_backward(rule, case):
    op = rule.op_under_test(case)
    pack = Pack("", (3, 0, 1, 18), padding=2)
    inputs = op.make(pack, torch.float64)
    names = list(inputs)

    def call(*values):
        return tuple(op.run(dict(zip(names, values)), cu_seqlens=pack.cu_seqlens).values())

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs.values()], fast_mode=True)


@every_rule
def test_long_sequence_in_segments(kernel, rule):
    """So many chunks that the backward pass keeps a state per segment only; against the same recurrence cut in two,
    whose halves fit into one segment each."""
    case = Case("long", value_heads=1, key_dim=128, value_dim=128)
    length, cut = 64 * 100 + 9, 64 * 47
    inputs = rule.small_inputs(case, (length,))
    chunk = getattr(kernel, rule.chunk)

    def whole(leaves):
        o, final = chunk(**leaves, output_final_state=True, **case.options)
        return {"o": o, "final_state": final}

    def halves(leaves):
        state, outputs = leaves["initial_state"], []
        for bos, eos in ((0, cut), (cut, length)):
            part = {name: x[:, bos:eos] for name, x in leaves.items() if name != "initial_state"}
            o, state = chunk(**part, initial_state=state, output_final_state=True, **case.options)
            outputs.append(o)
        return {"o": torch.cat(outputs, 1), "final_state": state}

    one, two = (run_with_gradients(call, inputs) for call in (whole, halves))
    for name in one:
        assert_same_bits(name, one[name], two[name])


@every_rule
def test_small_gradients_of_decay(rule):
    """dg of a token sums over the pairs of tokens on either side of it, and no pair is added and taken away again: a
    difference of running sums would lose the gradients of the early tokens here, which are 1e-11 of the last ones."""
    case = Case("", value_heads=1, key_dim=4, value_dim=4, l2norm=False, initial=False)
    inputs = rule.small_inputs(case, (40,))
    inputs["v"] = inputs["v"] * torch.logspace(-6, 6, 40)[None, :, None, None]
    op = rule.op_under_test(case)
    truth = run_with_gradients(lambda x: op.reference(x, torch.tensor([0, 40])), properties.cast(inputs, torch.float64))
    ours = run_with_gradients(op.run, inputs)
    torch.testing.assert_close(ours["dg"].double(), truth["dg"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
@every_rule
def test_states_that_are_not_asked_for(kernel, rule, case):
    """The products for them are left out: the output and all gradients stay the same bits."""
    pack = Pack("chunks", (130, 3, 64))
    inputs = rule.inputs(case, pack, torch.float32)
    weights = {"o": torch.randn(1, pack.tokens, 2, 24, dtype=torch.float64)}
    results = [
        run_with_gradients(
            lambda x, wanted=wanted: {
                "o": getattr(kernel, rule.chunk)(
                    **x, output_final_state=wanted, cu_seqlens=pack.cu_seqlens, **case.options
                )[0]
            },
            inputs,
            weights,
        )
        for wanted in (False, True)
    ]
    for name, value in results[0].items():
        assert_same_bits(name, value, results[1][name])


@every_rule
def test_an_initial_state_of_zeros_is_none(kernel, rule):
    pack = Pack("chunks", (70, 64, 3))
    inputs = rule.inputs(Case("", initial=False), pack, torch.float32)
    with_zeros = {**inputs, "initial_state": torch.zeros(3, 2, 16, 24)}

    def call(leaves):
        o, final = getattr(kernel, rule.chunk)(**leaves, output_final_state=True, cu_seqlens=pack.cu_seqlens)
        return {"o": o, "final_state": final}

    expected = run_with_gradients(call, with_zeros)
    for name, value in run_with_gradients(call, inputs).items():
        assert_same_bits(name, value, expected[name])


@every_rule
def test_compiled_states(kernel, rule):
    """States work under torch.compile with cu_seqlens; with labels the number of sequences is not known there."""
    inputs = rule.small_inputs()
    chunk = getattr(kernel, rule.chunk)
    call = torch.compile(chunk, fullgraph=True, backend="aot_eager")
    o, final = call(**inputs, output_final_state=True, cu_seqlens=torch.tensor([0, 5, 13]))
    expected = chunk(**inputs, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert_same_bits("o", o, expected[0])
    assert_same_bits("final_state", final, expected[1])
    with pytest.raises(Exception, match="cu_seqlens must be given under torch.compile where there is a state for each"):
        call(**inputs, seq_idx=Pack("", (5, 8)).seq_idx)


@every_rule
def test_recurrent_has_no_backward(kernel, rule):
    inputs = rule.small_inputs()
    inputs["q"].requires_grad_()
    o, _ = getattr(kernel, rule.recurrent)(**inputs, cu_seqlens=[0, 5, 13])
    with pytest.raises(NotImplementedError, match=f"{rule.recurrent}: has no backward pass; call {rule.chunk}"):
        o.sum().backward()


def stock_functions(rule):
    """The models' own torch functions, in chunks and token by token."""
    if rule.per_channel:
        from transformers.models.kimi_linear import modeling_kimi_linear as stock

        return stock.chunk_kimi_delta_attention, stock.recurrent_kimi_delta_attention
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    return stock.torch_chunk_gated_delta_rule, stock.torch_recurrent_gated_delta_rule


@every_function
def test_matches_transformers(kernel, rule, function):
    """At the call form the models use."""
    inputs = rule.small_inputs(Case("", key_heads=2, value_heads=2), (70,))
    q, k, v = (inputs.pop(name) for name in "qkv")
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    ours = getattr(kernel, function)(q, k, v, **inputs, **options)
    for stock in stock_functions(rule):
        for left, right in zip(ours, stock(q, k, v, **inputs, **options)):
            assert left.dtype == right.dtype
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


LABELS = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]])


def two_rows(rule):
    return {name: x.reshape(2, 6, *x.shape[2:]) for name, x in rule.small_inputs(CASES[1], (12,)).items()}


@every_function
def test_batch_rows(kernel, rule, function):
    """Without boundaries each row is a sequence; labels may leave padding between rows."""
    call = getattr(kernel, function)
    inputs = two_rows(rule)
    o, final = call(**inputs, output_final_state=True)
    assert o.shape == (2, 6, 2, 24) and final.shape == (2, 2, 16, 24)
    states = torch.randn(3, 2, 16, 24)
    packed, ends = call(**inputs, initial_state=states, output_final_state=True, seq_idx=LABELS)
    assert ends.shape == (3, 2, 16, 24)
    assert bool((packed[0, 4:] == 0).all())
    for row in range(2):
        alone, end = call(**{name: x[row : row + 1] for name, x in inputs.items()}, output_final_state=True)
        assert_same_bits("row", o[row : row + 1], alone)
        assert_same_bits("state", final[row : row + 1], end)
    for n, (row, bos, eos) in enumerate([(0, 0, 2), (0, 2, 4), (1, 0, 6)]):
        own = {name: x[row : row + 1, bos:eos] for name, x in inputs.items()}
        alone, end = call(**own, initial_state=states[n : n + 1], output_final_state=True)
        assert_same_bits("tokens", packed[row : row + 1, bos:eos], alone)
        assert_same_bits("state", ends[n : n + 1], end)


@every_rule
def test_gradients_of_rows_with_padding_between(kernel, rule):
    inputs = two_rows(rule)
    leaves = [x.requires_grad_() for x in inputs.values()]
    states = torch.randn(3, 2, 16, 24, requires_grad=True)
    o, final = getattr(kernel, rule.chunk)(**inputs, initial_state=states, output_final_state=True, seq_idx=LABELS)
    *gradients, dstates = torch.autograd.grad(o.sum() + final.sum(), [*leaves, states])
    for gradient in gradients:
        assert bool((gradient[0, 4:] == 0).all()) and bool(gradient[0, :4].abs().sum() > 0)
    assert bool((dstates.flatten(1).abs().sum(1) > 0).all())


@every_rule
def test_scale_and_other_dtypes_of_the_small_inputs(kernel, rule):
    chunk = getattr(kernel, rule.chunk)
    inputs = rule.small_inputs(dtype=torch.bfloat16)
    o, final = chunk(**inputs, scale=2.0, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    scaled = dict(inputs, q=inputs["q"] * 8)  # 16^-1/2 * 8
    expected, _ = chunk(**scaled, cu_seqlens=[0, 5, 13])
    assert_same_bits("scale", o, expected)
    inputs = {name: x.bfloat16().requires_grad_() for name, x in rule.small_inputs().items()}
    o, _ = chunk(**inputs, cu_seqlens=[0, 5, 13])
    for gradient in torch.autograd.grad(o.float().square().sum(), list(inputs.values())):
        assert gradient.dtype == torch.bfloat16 and bool(gradient.isfinite().all())


@every_function
def test_no_tokens(kernel, rule, function):
    call = getattr(kernel, function)
    inputs = rule.small_inputs(lengths=(0, 0))
    o, final = call(**inputs, output_final_state=True, cu_seqlens=[0, 0, 0])
    assert o.shape == (1, 0, 2, 24)
    assert_same_bits("state", final, inputs["initial_state"])
    o, final = call(**rule.small_inputs(CASES[1], (0,)), output_final_state=True, cu_seqlens=[0])
    assert final.shape == (0, 2, 16, 24)
    if function == rule.chunk:
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        o, final = call(**leaves, output_final_state=True, cu_seqlens=[0, 0, 0])
        *_, dstate = torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))
        assert_same_bits("dstate", dstate, torch.ones_like(dstate))


@every_rule
def test_gradients_of_expanded_cotangents(kernel, rule):
    """The gradient of a plain sum arrives with stride 0."""
    chunk = getattr(kernel, rule.chunk)
    inputs = rule.small_inputs(CASES[1])
    weights = {"o": torch.ones(1, 13, 2, 24, dtype=torch.float64)}
    dense = run_with_gradients(lambda x: {"o": chunk(**x)[0]}, inputs, weights)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    gradients = torch.autograd.grad(chunk(**leaves)[0].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert_same_bits(name, gradient, dense[f"d{name}"])



REJECTED = [
    (dict(q=torch.randn(13, 1, 16)), ValueError, r"q must have 4 dimensions, got shape \(13, 1, 16\)"),
    (dict(q=1.0), TypeError, "q must be a tensor, got 1.0"),
    (dict(q=torch.ones(1, 13, 1, 16, dtype=torch.int64)), TypeError, "q must have one of the dtypes .*, got int64"),
    (dict(k=torch.randn(1, 13, 1, 15)), ValueError, r"k must have shape \[B, T, H, K\] = \(1, 13, 1, 16\)"),
    (dict(v=torch.randn(1, 12, 2, 24)), ValueError, r"v must have shape \[B, T, HV, V\] with B, T = \(1, 13\)"),
    (dict(v=torch.randn(1, 13, 2, 257)), ValueError, "v must have a head_dim of 1 to 256, got 257"),
    (dict(v=torch.randn(1, 13, 2, 24, device="meta")), ValueError, "v must be on cpu"),
    (
        dict(q=torch.randn(1, 13, 3, 16), k=torch.randn(1, 13, 3, 16)),
        ValueError,
        "v must have a num_heads that is a multiple of q's 3, got 2",
    ),
    (dict(beta=torch.ones(1, 13, 2, dtype=torch.bool)), TypeError, "beta must have one of the dtypes .*, got bool"),
    (dict(scale="1"), TypeError, "scale must be a number or None, got '1'"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(initial_state=torch.randn(1, 2, 16, 24)), ValueError, r"initial_state must have shape \[N, HV, K, V\]"),
    (dict(initial_state=torch.ones(2, 2, 16, 24).int()), TypeError, "initial_state must have one of the dtypes"),
    (dict(head_first=True), TypeError, "unexpected keyword argument 'head_first'"),
]


@pytest.mark.parametrize(
    "change, error, text", REJECTED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@every_function
def test_rejects(kernel, rule, function, change, error, text):
    with pytest.raises(error, match=text):
        getattr(kernel, function)(**{**rule.small_inputs(), "cu_seqlens": [0, 5, 13], **change})


@every_function
def test_rejects_other_decays(kernel, rule, function):
    """A decay of the other rule's shape, or of another number of heads or channels."""
    call, inputs = getattr(kernel, function), rule.small_inputs()
    if rule.per_channel:
        ndim, letters, other = 4, r"\[B, T, HV, K\] = \(1, 13, 2, 16\)", torch.randn(1, 13, 2)
    else:
        ndim, letters, other = 3, r"\[B, T, HV\] = \(1, 13, 2\)", torch.randn(1, 13, 2, 16)
    with pytest.raises(ValueError, match=f"g must have {ndim} dimensions"):
        call(**{**inputs, "g": other})
    with pytest.raises(ValueError, match=f"g must have shape {letters}"):
        call(**{**inputs, "g": inputs["g"][:, :, :1]})


@every_rule
def test_direct_op_calls_check_what_memory_safety_needs(kernel, rule):
    inputs = rule.small_inputs()
    state, good = inputs["initial_state"], torch.tensor([0, 5, 13], dtype=torch.int32)
    gate = (None, None, None) if rule.per_channel else ()
    forward, recurrent, backward = (
        getattr(kernel._ops.ops, f"{rule.name}{suffix}") for suffix in ("_fwd", "_recurrent_fwd", "_bwd")
    )

    def call(op, *first, offsets=good, initial_state=None, tail=(0.5, True, True), **changes):
        tokens = [changes.get(name, inputs[name][0]) for name in TOKENS]
        op(*first, *tokens, *gate, offsets, initial_state, *tail)

    q, k, v, g, beta = (inputs[name][0] for name in TOKENS)
    for op in (forward, recurrent):
        for offsets in ([0, 14], [1, 13], [0, 9, 5, 13], [-1, 13]):
            with pytest.raises(RuntimeError, match="cu_seqlens must"):
                call(op, offsets=torch.tensor(offsets, dtype=torch.int32))
        for changes, text in (
            (dict(initial_state=state[:1]), "initial_state must have shape"),
            (dict(g=g[:-1]), "g must have shape"),
            (dict(g=g[..., :-1]), "g must have shape"),
            (dict(g=g[:, 0]), "g must have shape"),
            (dict(beta=beta[:-1]), "beta"),
            (dict(beta=beta[:, 0]), "beta"),
            (dict(k=k[:-1]), "q and k must have shape"),
            (dict(v=v[:, :0], g=g[:, :0], beta=beta[:, :0]), "HV must be a multiple of H"),
        ):
            with pytest.raises(RuntimeError, match=text):
                call(op, **changes)
    with pytest.raises(RuntimeError, match="dout must have shape"):
        call(backward, v[:-1], None, tail=(0.5, True))
    with pytest.raises(RuntimeError, match="dfinal_state must have shape"):
        call(backward, v, state[:1], tail=(0.5, True))
