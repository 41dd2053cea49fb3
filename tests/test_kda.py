"""kda: against its reference, packed against alone, gradients, compilation."""

import pytest
import torch

from tests.harness import properties
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops.kda import CASES, FUNCTIONS, Case, make_inputs, op_under_test, small_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, tier):
    for pack in (Pack("sub-blocks", (37, 1, 0, 18), padding=2), Pack("chunks", (81,))):
        properties.check_against_reference(op_under_test(case), pack, torch.float32)
    for dtype in DTYPES[1:]:
        properties.check_against_reference(op_under_test(case), Pack("sub-blocks", (19, 2)), dtype)


@pytest.mark.parametrize("pack", catalogue(edge=16), ids=str)
def test_matches_reference_in_every_pack(pack):
    properties.check_against_reference(op_under_test(CASES[0]), pack, torch.float32)


@pytest.mark.parametrize("pack", catalogue(edge=64)[-2:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_over_chunks(dtype, pack):
    properties.check_against_reference(op_under_test(CASES[0]), pack, dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_at_model_size(dtype):
    """Head dims of real models, a tile of every kind, more rows of q and k than a register tile."""
    case = Case("model", value_heads=1, key_dim=128, value_dim=128, gate="bounded")
    properties.check_against_reference(op_under_test(case), Pack("", (70, 1, 9)), dtype)
    case = Case("largest", value_heads=1, key_dim=256, value_dim=256)
    properties.check_against_reference(op_under_test(case), Pack("", (66,)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recurrent_matches_reference(kernel, dtype, tier):
    for case in (*CASES, Case("more than one strip", value_dim=150)):
        for pack in (SMALL, Pack("empty", (0, 4, 0), padding=3), Pack("longer", (33,))):
            op = op_under_test(case, "fused_recurrent_kda")
            inputs = op.make(pack, dtype)
            truth = op.reference(properties.cast(inputs, torch.float64), pack.cu_seqlens)
            working = op.reference(inputs, pack.cu_seqlens)
            ours = op.run(inputs, cu_seqlens=pack.cu_seqlens)
            for name in truth:
                properties.check_close("recurrent", name, ours[name], working[name], truth[name])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_properties(dtype, tier):
    gated = next(case for case in CASES if case.gate)
    for case, packs in ((CASES[0], catalogue(edge=64)), (gated, catalogue(edge=16))):
        for pack in packs:
            properties.check_all_properties(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in (*CASES[:2], *(case for case in CASES if case.gate)):
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
        o, final = kernel.chunk_kda(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return {"o": o, "final_state": final}

    def halves(leaves):
        state, outputs = leaves["initial_state"], []
        for bos, eos in ((0, cut), (cut, length)):
            part = {name: x[:, bos:eos] for name, x in leaves.items() if name != "initial_state"}
            o, state = kernel.chunk_kda(
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
    truth = run_with_gradients(lambda x: op.reference(x, torch.tensor([0, 40])), properties.cast(inputs, torch.float64))
    ours = run_with_gradients(op.run, inputs)
    torch.testing.assert_close(ours["dg"].double(), truth["dg"], rtol=1e-4, atol=0)


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    for dtype in (torch.float32, torch.bfloat16):
        inputs = small_inputs(lengths=SMALL.lengths, dtype=dtype)
        tokens = [inputs[name][0].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
        state = inputs["initial_state"].requires_grad_()
        gate = (torch.rand(2, requires_grad=True), torch.rand(2, 16, requires_grad=True), -5.0)
        none = (None, None, None)
        torch.library.opcheck(ops.kda_fwd.default, (*tokens, *gate, SMALL.cu_seqlens, state, 0.5, True, True))
        torch.library.opcheck(ops.kda_fwd.default, (*tokens, *none, SMALL.cu_seqlens, None, 0.5, False, False))
        plain = [x.detach() for x in tokens]
        state = state.detach()
        gate = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in gate)
        arguments = (*plain, *gate, SMALL.cu_seqlens, state, 0.5, True, True)
        torch.library.opcheck(ops.kda_recurrent_fwd.default, arguments)
        do = torch.randn_like(plain[2])
        arguments = (do, torch.randn_like(state), *plain, *gate, SMALL.cu_seqlens, state, 0.5, True)
        torch.library.opcheck(ops.kda_bwd.default, arguments)
        torch.library.opcheck(ops.kda_bwd.default, (do, None, *plain, *none, SMALL.cu_seqlens, None, 0.5, False))


@pytest.mark.parametrize("spelling", ["cu_seqlens", "seq_idx", "position_ids"])
def test_c36_c38_compiles_to_one_graph(kernel, spelling):
    """No graph break, and no new graph for other lengths."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, g, beta, boundary):
        o, _ = kernel.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **{spelling: boundary})
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
    call = torch.compile(kernel.chunk_kda, fullgraph=True, backend="aot_eager")
    o, final = call(**inputs, output_final_state=True, cu_seqlens=torch.tensor([0, 5, 13]))
    expected = kernel.chunk_kda(**inputs, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert_same_bits("o", o, expected[0])
    assert_same_bits("final_state", final, expected[1])
    with pytest.raises(Exception, match=r"initial_state must have shape \[N, HV, K, V\]"):
        call(**inputs, seq_idx=Pack("", (5, 8)).seq_idx)


def test_recurrent_has_no_backward(kernel):
    inputs = small_inputs()
    inputs["q"].requires_grad_()
    o, _ = kernel.fused_recurrent_kda(**inputs, cu_seqlens=[0, 5, 13])
    with pytest.raises(NotImplementedError, match="call chunk_kda"):
        o.sum().backward()


def test_matches_transformers(kernel):
    """The models' own torch functions, at the call form the models use, and their gates."""
    from transformers import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate
    from transformers.models.kimi_linear.modeling_kimi_linear import (
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
    )

    inputs = make_inputs(Case("", key_heads=2, value_heads=2), Pack("", (70,)), torch.float32)
    q, k, v = (inputs.pop(name) for name in "qkv")
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    for stock in (chunk_kimi_delta_attention, recurrent_kimi_delta_attention):
        expected = stock(q, k, v, **inputs, **options)
        for function in FUNCTIONS:
            ours = getattr(kernel, function)(q, k, v, **inputs, **options)
            for left, right in zip(ours, expected):
                assert left.dtype == right.dtype
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)

    config = BailingHybridConfig(hidden_size=32, linear_num_heads=2, linear_head_dim=16)
    for safe in (True, False):
        config.kda_safe_gate = safe
        gate = BailingHybridForgetGate(config)
        torch.nn.init.normal_(gate.A_log)
        torch.nn.init.normal_(gate.dt_bias)
        hidden = torch.randn(1, 70, 32)
        inputs["g"] = gate(hidden)
        expected = chunk_kimi_delta_attention(q, k, v, **inputs, **options)
        raw = dict(inputs, g=gate.f_proj(hidden).view(1, 70, 2, 16))
        bounded = dict(safe_gate=True, lower_bound=config.kda_lower_bound) if safe else {}
        ours = kernel.chunk_kda(
            q, k, v, **raw, **options, use_gate_in_kernel=True, A_log=gate.A_log, dt_bias=gate.dt_bias, **bounded
        )
        for left, right in zip(ours, expected):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_gate_parameters_in_other_shapes(kernel):
    """Models keep A_log as [1, 1, HV, 1] or [HV], dt_bias flat or by heads, in any dtype; gradients come back alike."""
    inputs = small_inputs(Case("", gate="softplus"))
    options = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, cu_seqlens=[0, 5, 13])
    rate, bias = inputs.pop("A_log"), inputs.pop("dt_bias")
    results = []
    for A_log, dt_bias in ((rate, bias), (rate.view(1, 1, 2, 1), bias.flatten())):
        A_log, dt_bias = A_log.clone().requires_grad_(), dt_bias.clone().requires_grad_()
        o, _ = kernel.chunk_kda(**inputs, **options, A_log=A_log, dt_bias=dt_bias)
        gradients = torch.autograd.grad(o.square().sum(), [A_log, dt_bias])
        assert [x.shape for x in gradients] == [A_log.shape, dt_bias.shape]
        results.append([o.detach(), *(x.flatten() for x in gradients)])
    for left, right in zip(*results):
        assert_same_bits("shapes", left, right)
    low = kernel.chunk_kda(**inputs, **options, A_log=rate.bfloat16(), dt_bias=bias.half())[0]
    same = kernel.chunk_kda(**inputs, **options, A_log=rate.bfloat16().float(), dt_bias=bias.half().float())[0]
    assert_same_bits("dtypes", low, same)


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
    o, final = kernel.chunk_kda(**inputs, initial_state=states, output_final_state=True, seq_idx=labels)
    *gradients, dstates = torch.autograd.grad(o.sum() + final.sum(), [*leaves, states])
    for gradient in gradients:
        assert bool((gradient[0, 4:] == 0).all()) and bool(gradient[0, :4].abs().sum() > 0)
    assert bool((dstates.flatten(1).abs().sum(1) > 0).all())


def test_scale_and_other_dtypes_of_the_small_inputs(kernel):
    inputs = small_inputs(dtype=torch.bfloat16)
    o, final = kernel.chunk_kda(**inputs, scale=2.0, output_final_state=True, cu_seqlens=[0, 5, 13])
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    scaled = dict(inputs, q=inputs["q"] * 8)  # 16^-1/2 * 8
    expected, _ = kernel.chunk_kda(**scaled, cu_seqlens=[0, 5, 13])
    assert_same_bits("scale", o, expected)
    inputs = {name: x.bfloat16().requires_grad_() for name, x in small_inputs().items()}
    o, _ = kernel.chunk_kda(**inputs, cu_seqlens=[0, 5, 13])
    for gradient in torch.autograd.grad(o.float().square().sum(), list(inputs.values())):
        assert gradient.dtype == torch.bfloat16 and bool(gradient.isfinite().all())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(kernel, function):
    inputs = small_inputs(lengths=(0, 0))
    o, final = getattr(kernel, function)(**inputs, output_final_state=True, cu_seqlens=[0, 0, 0])
    assert o.shape == (1, 0, 2, 24)
    assert_same_bits("state", final, inputs["initial_state"])
    o, final = getattr(kernel, function)(**small_inputs(CASES[1], (0,)), output_final_state=True, cu_seqlens=[0])
    assert final.shape == (0, 2, 16, 24)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, final = kernel.chunk_kda(**leaves, output_final_state=True, cu_seqlens=[0, 0, 0])
    *_, dstate = torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))
    assert_same_bits("dstate", dstate, torch.ones_like(dstate))


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    inputs = small_inputs(CASES[1])
    weights = {"o": torch.ones(1, 13, 2, 24, dtype=torch.float64)}
    dense = run_with_gradients(lambda x: {"o": kernel.chunk_kda(**x)[0]}, inputs, weights)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    gradients = torch.autograd.grad(kernel.chunk_kda(**leaves)[0].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert_same_bits(name, gradient, dense[f"d{name}"])
