"""gated_delta_rule: against its reference, packed against alone, and the faults other packages had."""

import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops.gated_delta_rule import CASES, FUNCTIONS, Case, make_inputs, op_under_test, small_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def per_sequence(function, inputs, offsets, **options):
    """Each sequence alone, by the same function; outputs joined."""
    outputs, states = [], []
    for n, (bos, eos) in enumerate(zip(offsets[:-1], offsets[1:])):
        own = {name: x[n : n + 1] if name == "initial_state" else x[:, bos:eos] for name, x in inputs.items()}
        o, state = function(**own, output_final_state=True, **options)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, tier):
    for pack in catalogue(edge=64)[:-2]:
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("pack", catalogue(edge=64)[-2:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_over_chunks(dtype, pack):
    properties.check_against_reference(op_under_test(CASES[0]), pack, dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_at_model_size(dtype):
    """Head dims of real models, a tile of every kind, more rows of q and k than a register tile."""
    case = Case("model", value_heads=2, key_dim=128, value_dim=128)
    properties.check_against_reference(op_under_test(case), Pack("", (70, 1, 9)), dtype)
    case = Case("largest", value_heads=1, key_dim=256, value_dim=256)
    properties.check_against_reference(op_under_test(case), Pack("", (66,)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recurrent_matches_reference(kernel, dtype, tier):
    for case in (*CASES, Case("more than one strip", value_dim=150)):
        for pack in catalogue(edge=16):
            op = op_under_test(case, "fused_recurrent_gated_delta_rule")
            inputs = op.make(pack, dtype)
            truth = op.reference(properties.cast(inputs, torch.float64), pack.cu_seqlens)
            working = op.reference(inputs, pack.cu_seqlens)
            ours = op.run(inputs, cu_seqlens=pack.cu_seqlens)
            for name in truth:
                properties.check_close("recurrent", name, ours[name], working[name], truth[name])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_properties(dtype, tier):
    for pack in catalogue(edge=64):
        properties.check_all_properties(op_under_test(CASES[0]), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in CASES[:2]:
        properties.check_memory_forms(op_under_test(case), Pack("ragged", (5, 9, 17, 3)), dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_on_the_real_backward(case):
    op = op_under_test(case)
    pack = Pack("", (3, 0, 1, 18), padding=2)
    inputs = op.make(pack, torch.float64)
    names = list(inputs)

    def call(*values):
        return tuple(op.run(dict(zip(names, values)), cu_seqlens=pack.cu_seqlens).values())

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs.values()], fast_mode=True)


def test_long_sequence_in_segments(kernel):
    """So many chunks that the backward pass keeps a state per segment only; against the same recurrence cut in two,
    whose halves fit into one segment each."""
    case = Case("long", value_heads=1, key_dim=128, value_dim=128)
    length = 64 * 100 + 9
    inputs = make_inputs(case, Pack("", (length,)), torch.float32)
    cut = 64 * 47

    def whole(leaves):
        o, final = kernel.chunk_gated_delta_rule(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return {"o": o, "final_state": final}

    def halves(leaves):
        state, outputs = leaves["initial_state"], []
        for bos, eos in ((0, cut), (cut, length)):
            part = {name: x[:, bos:eos] for name, x in leaves.items() if name != "initial_state"}
            o, state = kernel.chunk_gated_delta_rule(
                **part, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            outputs.append(o)
        return {"o": torch.cat(outputs, 1), "final_state": state}

    one, two = (run_with_gradients(call, inputs) for call in (whole, halves))
    for name in one:
        assert_same_bits(name, one[name], two[name])


def test_small_gradients_of_decay(kernel):
    """dg of a token sums over the pairs of tokens on either side of it, and no pair is added and taken away again: a
    difference of running sums would lose the gradients of the early tokens here, which are 1e-11 of the last ones."""
    case = Case("", value_heads=1, key_dim=4, value_dim=4, l2norm=False, initial=False)
    inputs = small_inputs(case, (40,))
    inputs["v"] = inputs["v"] * torch.logspace(-6, 6, 40)[None, :, None, None]
    op = op_under_test(case)
    truth = run_with_gradients(
        lambda x: op.reference(x, torch.tensor([0, 40])), properties.cast(inputs, torch.float64)
    )
    ours = run_with_gradients(op.run, inputs)
    torch.testing.assert_close(ours["dg"].double(), truth["dg"], rtol=1e-4, atol=0)


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    for dtype in (torch.float32, torch.bfloat16):
        inputs = small_inputs(lengths=SMALL.lengths, dtype=dtype)
        tokens = [inputs[name][0].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
        state = inputs["initial_state"].requires_grad_()
        torch.library.opcheck(ops.gated_delta_rule_fwd.default, (*tokens, SMALL.cu_seqlens, state, 0.5, True, True))
        torch.library.opcheck(ops.gated_delta_rule_fwd.default, (*tokens, SMALL.cu_seqlens, None, 0.5, False, False))
        plain = [x.detach() for x in tokens]
        state = state.detach()
        arguments = (*plain, SMALL.cu_seqlens, state, 0.5, True, True)
        torch.library.opcheck(ops.gated_delta_rule_recurrent_fwd.default, arguments)
        do = torch.randn_like(plain[2])
        arguments = (do, torch.randn_like(state), *plain, SMALL.cu_seqlens, state, 0.5, True)
        torch.library.opcheck(ops.gated_delta_rule_bwd.default, arguments)
        torch.library.opcheck(ops.gated_delta_rule_bwd.default, (do, None, *plain, SMALL.cu_seqlens, None, 0.5, False))


@pytest.mark.parametrize("spelling", ["cu_seqlens", "seq_idx", "position_ids"])
def test_c36_c38_compiles_to_one_graph(kernel, spelling):
    """No graph break, and no new graph for other lengths."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, g, beta, boundary):
        o, _ = kernel.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **{spelling: boundary})
        return o.square().sum()

    for backend in ("aot_eager", count):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for lengths in ((3, 1, 6), (4, 9), (7, 2, 5, 1)):
            pack = Pack("", lengths)
            inputs = [x.requires_grad_() for x in small_inputs(CASES[1], lengths).values()]
            boundary = getattr(pack, spelling)
            expected = torch.autograd.grad(step(*inputs, boundary), inputs)
            for left, right in zip(torch.autograd.grad(compiled(*inputs, boundary), inputs), expected):
                torch.testing.assert_close(left, right)
    assert len(graphs) <= 2


def test_compiled_states(kernel):
    """States work under torch.compile with cu_seqlens; with labels the number of sequences is not known there."""
    inputs = small_inputs()
    call = torch.compile(kernel.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    o, final = call(**inputs, output_final_state=True, cu_seqlens=torch.tensor([0, 5, 13]))
    expected = kernel.chunk_gated_delta_rule(**inputs, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert_same_bits("o", o, expected[0])
    assert_same_bits("final_state", final, expected[1])
    with pytest.raises(Exception, match=r"initial_state must have shape \[N, HV, K, V\]"):
        call(**inputs, seq_idx=Pack("", (5, 8)).seq_idx)


def test_recurrent_has_no_backward(kernel):
    inputs = small_inputs()
    inputs["q"].requires_grad_()
    o, _ = kernel.fused_recurrent_gated_delta_rule(**inputs, cu_seqlens=[0, 5, 13])
    with pytest.raises(NotImplementedError, match="call chunk_gated_delta_rule"):
        o.sum().backward()


def test_matches_transformers(kernel):
    """The models' own torch functions, at the call form the models use."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    inputs = make_inputs(Case("", key_heads=2, value_heads=2), Pack("", (70,)), torch.float32)
    q, k, v = (inputs.pop(name) for name in "qkv")
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    for stock in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        expected = stock(q, k, v, **inputs, **options)
        for function in FUNCTIONS:
            ours = getattr(kernel, function)(q, k, v, **inputs, **options)
            for left, right in zip(ours, expected):
                assert left.dtype == right.dtype
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_batch_rows(kernel, function):
    """Without boundaries each row is a sequence; labels may leave padding between rows."""
    call = getattr(kernel, function)
    inputs = {name: x[:, :12].reshape(2, 6, *x.shape[2:]) for name, x in small_inputs(CASES[1], (12,)).items()}
    o, final = call(**inputs, output_final_state=True)
    assert o.shape == (2, 6, 2, 24) and final.shape == (2, 2, 16, 24)
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]])
    states = torch.randn(3, 2, 16, 24)
    packed, ends = call(**inputs, initial_state=states, output_final_state=True, seq_idx=labels)
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


def test_gradients_of_rows_with_padding_between(kernel):
    inputs = {name: x[:, :12].reshape(2, 6, *x.shape[2:]) for name, x in small_inputs(CASES[1], (12,)).items()}
    leaves = [x.requires_grad_() for x in inputs.values()]
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]])
    states = torch.randn(3, 2, 16, 24, requires_grad=True)
    o, final = kernel.chunk_gated_delta_rule(
        **inputs, initial_state=states, output_final_state=True, seq_idx=labels
    )
    *gradients, dstates = torch.autograd.grad(o.sum() + final.sum(), [*leaves, states])
    for gradient in gradients:
        assert bool((gradient[0, 4:] == 0).all()) and bool(gradient[0, :4].abs().sum() > 0)
    assert bool((dstates.flatten(1).abs().sum(1) > 0).all())


def test_scale_and_other_dtypes_of_the_small_inputs(kernel):
    inputs = small_inputs(dtype=torch.bfloat16)
    o, final = kernel.chunk_gated_delta_rule(**inputs, scale=2.0, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    scaled = dict(inputs, q=inputs["q"] * 8)  # 16^-1/2 * 8
    expected, _ = kernel.chunk_gated_delta_rule(**scaled, cu_seqlens=[0, 5, 13])
    assert_same_bits("scale", o, expected)
    inputs = {name: x.bfloat16().requires_grad_() for name, x in small_inputs().items()}
    o, _ = kernel.chunk_gated_delta_rule(**inputs, cu_seqlens=[0, 5, 13])
    for gradient in torch.autograd.grad(o.float().square().sum(), list(inputs.values())):
        assert gradient.dtype == torch.bfloat16 and bool(gradient.isfinite().all())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(kernel, function):
    inputs = small_inputs(lengths=(0, 0))
    o, final = getattr(kernel, function)(**inputs, output_final_state=True, cu_seqlens=[0, 0, 0])
    assert o.shape == (1, 0, 2, 24)
    assert_same_bits("state", final, inputs["initial_state"])
    o, final = getattr(kernel, function)(
        **small_inputs(CASES[1], (0,)), output_final_state=True, cu_seqlens=[0]
    )
    assert final.shape == (0, 2, 16, 24)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, final = kernel.chunk_gated_delta_rule(**leaves, output_final_state=True, cu_seqlens=[0, 0, 0])
    *_, dstate = torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))
    assert_same_bits("dstate", dstate, torch.ones_like(dstate))


def test_c01_both_functions_keep_samples_apart(kernel):
    case = Case("", key_heads=2, value_heads=2, key_dim=16, value_dim=16, l2norm=False, initial=False)
    inputs = small_inputs(case)
    offsets = [0, 5, 13]
    results = []
    for function in FUNCTIONS:
        call = getattr(kernel, function)
        o, final = call(**inputs, cu_seqlens=offsets, output_final_state=True)
        assert final.shape == (2, 2, 16, 16)
        alone, states = per_sequence(call, inputs, offsets)
        assert_same_bits("o", o, alone)
        assert_same_bits("states", final, states)
        redrawn = {name: torch.cat([torch.rand_like(x[:, :5]) - 1, x[:, 5:]], 1) for name, x in inputs.items()}
        other, _ = call(**redrawn, cu_seqlens=offsets)
        assert_same_bits("isolation", other[:, 5:], o[:, 5:])
        results.append((o, final))
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = kernel.chunk_gated_delta_rule(**leaves, cu_seqlens=offsets)
    for gradient in torch.autograd.grad(o[:, :5].sum(), list(leaves.values())):
        assert bool((gradient[:, 5:] == 0).all()) and bool(gradient[:, :5].abs().sum() > 0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_c06_empty_segments(kernel, function):
    call = getattr(kernel, function)
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        inputs = small_inputs(CASES[1], (8,))
        states = torch.randn(len(offsets) - 1, 2, 16, 24)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        o, final = call(**inputs, initial_state=states, cu_seqlens=offsets, output_final_state=True)
        expected, _ = call(**inputs, initial_state=states[full], cu_seqlens=plain)
        assert_same_bits("tokens", o, expected)
        for n in range(len(states)):
            if n not in full:
                assert_same_bits("empty segment", final[n], states[n])
        o, final = call(**inputs, cu_seqlens=offsets, output_final_state=True)
        for n in range(len(states)):
            if n not in full:
                assert bool((final[n] == 0).all())
        assert not final.isnan().any() and not o.isnan().any()


def test_c11_boundary_dtypes(kernel):
    inputs = small_inputs(CASES[1], (7,))
    expected, _ = kernel.chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    for boundary in (
        dict(cu_seqlens=torch.tensor([0, 3, 7])),
        dict(cu_seqlens=[0, 3, 7]),
        dict(seq_idx=labels),
        dict(seq_idx=labels.int()),
        dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])),
    ):
        o, _ = kernel.chunk_gated_delta_rule(**inputs, **boundary)
        assert_same_bits(str(boundary), o, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["-30 at each token", "-1e4 at one token", "0"])
def test_c23_extreme_decay(kernel, tier, function, kind):
    case = Case("", value_heads=1, key_dim=16, value_dim=16)
    op, ours_under_test = op_under_test(case), op_under_test(case, function)
    for length in (8, 70):
        inputs = small_inputs(case, (length,))
        if kind == "-1e4 at one token":
            inputs["g"][:, 3] = -1e4
        else:
            inputs["g"] = torch.full_like(inputs["g"], -30.0 if kind.startswith("-30") else 0.0)
        truth = op.reference(properties.cast(inputs, torch.float64), torch.tensor([0, length]))
        ours = ours_under_test.run(inputs)
        for name in truth:
            torch.testing.assert_close(ours[name].double(), truth[name], rtol=1e-5, atol=1e-5)
        if function == FUNCTIONS[0]:
            properties.check_against_reference(op, Pack("", (length,)), torch.float32)
            want = run_with_gradients(
                lambda x, n=length: op.reference(x, torch.tensor([0, n])), properties.cast(inputs, torch.float64)
            )
            got = run_with_gradients(op.run, inputs)
            for name in want:
                torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_c33_grouped_value_heads(kernel, function):
    call = getattr(kernel, function)
    case = Case("", key_heads=2, value_heads=4, key_dim=16, value_dim=16, initial=False)
    inputs = small_inputs(case, (4, 6))
    repeated = dict(inputs, **{name: inputs[name].repeat_interleave(2, dim=2) for name in "qk"})
    options = dict(cu_seqlens=[0, 4, 10], use_qk_l2norm_in_kernel=True)
    assert_same_bits("o", call(**inputs, **options)[0], call(**repeated, **options)[0])
    if function == FUNCTIONS[0]:
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        wide = dict(leaves, **{name: leaves[name].repeat_interleave(2, dim=2) for name in "qk"})
        direct, through = (
            torch.autograd.grad(call(**x, **options)[0].square().sum(), list(leaves.values())) for x in (leaves, wide)
        )
        for left, right in zip(direct, through):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_c44_labels_and_states_together(kernel):
    inputs = small_inputs(Case("", initial=False), (6,))
    states = torch.randn(3, 2, 16, 24, requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 2, 2, 2]])
    o, final = kernel.chunk_gated_delta_rule(
        **inputs, initial_state=states, output_final_state=True, seq_idx=labels
    )
    alone, ends = per_sequence(kernel.chunk_gated_delta_rule, dict(inputs, initial_state=states), [0, 1, 2, 6])
    assert_same_bits("o", o, alone)
    assert_same_bits("state", final, ends)
    (gradient,) = torch.autograd.grad(o.sum() + final.sum(), states)
    assert bool((gradient.flatten(1).abs().sum(1) > 0).all())


def test_c46_state_is_handed_on(kernel):
    case = Case("", value_heads=2, key_dim=16, value_dim=32, initial=False)
    inputs = small_inputs(case, (73,))
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    whole, last = kernel.chunk_gated_delta_rule(**inputs, **options)
    outputs, state = [], None
    for bos, eos in ((0, 33), (33, 70), (70, 71), (71, 72), (72, 73)):
        function = FUNCTIONS[0] if eos - bos > 1 else FUNCTIONS[1]
        part = {name: x[:, bos:eos] for name, x in inputs.items()}
        o, state = getattr(kernel, function)(**part, initial_state=state, **options)
        assert state.shape == (1, 2, 16, 32)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=r"initial_state must have shape \[N, HV, K, V\] = \(1, 2, 16, 32\)"):
            getattr(kernel, function)(**inputs, initial_state=state.transpose(2, 3))


def test_c55_arguments_are_named(kernel):
    for function in FUNCTIONS:
        names = inspect.signature(getattr(kernel, function)).parameters
        assert list(names)[:10] == [
            "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
            "cu_seqlens",
        ]  # fmt: skip
        assert {"seq_idx", "position_ids"} <= set(names)
        assert not any(p.kind is p.VAR_KEYWORD for p in names.values())
        o, state = getattr(kernel, function)(
            **small_inputs(CASES[1]), cu_seqlens=None, seq_idx=None, position_ids=None
        )
        assert isinstance(o, torch.Tensor) and state is None


REJECTED = [
    (dict(q=torch.randn(13, 1, 16)), ValueError, r"q must have 4 dimensions, got shape \(13, 1, 16\)"),
    (dict(q=1.0), TypeError, "q must be a tensor, got float"),
    (dict(q=torch.ones(1, 13, 1, 16, dtype=torch.int64)), TypeError, "q must have one of the dtypes .*, got int64"),
    (dict(k=torch.randn(1, 13, 1, 16).bfloat16()), TypeError, "k must have q's dtype float32, got bfloat16"),
    (dict(k=torch.randn(1, 13, 1, 15)), ValueError, r"k must have shape \[B, T, H, K\] = \(1, 13, 1, 16\)"),
    (dict(v=torch.randn(1, 12, 2, 24)), ValueError, r"v must have shape \[B, T, HV, V\] with B, T = \(1, 13\)"),
    (dict(v=torch.randn(1, 13, 2, 257)), ValueError, "v must have a head_dim of 1 to 256, got 257"),
    (dict(v=torch.randn(1, 13, 2, 24, device="meta")), ValueError, "v must be on cpu"),
    (
        dict(q=torch.randn(1, 13, 3, 16), k=torch.randn(1, 13, 3, 16)),
        ValueError,
        "v must have a num_heads that is a multiple of q's 3, got 2",
    ),
    (dict(g=torch.randn(1, 13, 3)), ValueError, r"g must have shape \[B, T, HV\] = \(1, 13, 2\), got \(1, 13, 3\)"),
    (dict(beta=torch.ones(1, 13, 2, dtype=torch.bool)), TypeError, "beta must have one of the dtypes .*, got bool"),
    (dict(scale="1"), TypeError, "scale must be a number or None, got '1'"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(initial_state=torch.randn(1, 2, 16, 24)), ValueError, r"initial_state must have shape \[N, HV, K, V\]"),
    (dict(initial_state=torch.ones(2, 2, 16, 24).int()), TypeError, "initial_state must have one of the dtypes"),
    (dict(cu_seqlens=[0, 3, 14]), ValueError, r"cu_seqlens must end at the number of tokens \(13\) or before, got 14"),
    (dict(cu_seqlens=[2, 13]), ValueError, "cu_seqlens must start at 0, got 2"),
    (dict(cu_seqlens=[0, 6, 4, 13]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
    (dict(cu_seqlens=None, seq_idx=torch.zeros(1, 13)), TypeError, "seq_idx must be an int32 or int64 tensor"),
    (dict(position_ids=None, chunk_size=64), TypeError, "unexpected keyword argument 'chunk_size'"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "change, error, text", REJECTED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_rejects(kernel, function, change, error, text):
    arguments = dict(small_inputs(), cu_seqlens=[0, 5, 13])
    arguments.update(change)
    with pytest.raises(error, match=text):
        getattr(kernel, function)(**arguments)


def test_direct_op_calls_check_what_memory_safety_needs(kernel):
    ops = kernel._ops.ops
    inputs = small_inputs()
    q, k, v, g, beta = (inputs[name][0] for name in ("q", "k", "v", "g", "beta"))
    state, good = inputs["initial_state"], torch.tensor([0, 5, 13], dtype=torch.int32)
    tail = (0.5, True, True)
    for op in (ops.gated_delta_rule_fwd, ops.gated_delta_rule_recurrent_fwd):
        for offsets in ([0, 14], [1, 13], [0, 9, 5, 13], [-1, 13]):
            with pytest.raises(RuntimeError, match="cu_seqlens must"):
                op(q, k, v, g, beta, torch.tensor(offsets, dtype=torch.int32), None, *tail)
        with pytest.raises(RuntimeError, match="initial_state must have shape"):
            op(q, k, v, g, beta, good, state[:1], *tail)
        with pytest.raises(RuntimeError, match="g must have shape"):
            op(q, k, v, g[:-1], beta, good, None, *tail)
        with pytest.raises(RuntimeError, match="q and k must have shape"):
            op(q, k[:-1], v, g, beta, good, None, *tail)
        with pytest.raises(RuntimeError, match="HV must be a multiple of H"):
            op(q, k, v[:, :0], g[:, :0], beta[:, :0], good, None, *tail)
    with pytest.raises(RuntimeError, match="do must have shape"):
        ops.gated_delta_rule_bwd(v[:-1], None, q, k, v, g, beta, good, None, 0.5, True)
    with pytest.raises(RuntimeError, match="dfinal_state must have shape"):
        ops.gated_delta_rule_bwd(v, state[:1], q, k, v, g, beta, good, None, 0.5, True)


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    inputs = small_inputs(CASES[1])
    weights = {"o": torch.ones(1, 13, 2, 24, dtype=torch.float64)}
    dense = run_with_gradients(lambda x: {"o": kernel.chunk_gated_delta_rule(**x)[0]}, inputs, weights)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    gradients = torch.autograd.grad(kernel.chunk_gated_delta_rule(**leaves)[0].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert_same_bits(name, gradient, dense[f"d{name}"])
