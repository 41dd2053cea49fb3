"""kda: against its reference and transformers, packed against alone, its ops and its gate.

What it shares with the gated delta rule is in test_delta_rules.py.
"""

import math
from contextlib import nullcontext

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.kda import CASES, RULE, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits
from tests.harness.triton import served_by_triton

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


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_at_model_size(dtype):
    """Head dims of real models, a tile of every kind, more rows of q and k than a register tile."""
    case = Case("model", value_heads=1, key_dim=128, value_dim=128, gate="bounded")
    properties.check_against_reference(op_under_test(case), Pack("", (70, 1, 9)), dtype)
    case = Case("largest", value_heads=1, key_dim=256, value_dim=256)
    properties.check_against_reference(op_under_test(case), Pack("", (66,)), dtype)


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


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    for dtype in (torch.float32, torch.bfloat16):
        inputs = RULE.small_inputs(lengths=SMALL.lengths, dtype=dtype)
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


def test_gates_match_transformers(kernel):
    """The gates of a model that has both kinds, with its own torch function behind them."""
    from transformers import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    inputs = RULE.small_inputs(Case("", key_heads=2, value_heads=2), (70,))
    q, k, v = (inputs.pop(name) for name in "qkv")
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
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
    inputs = RULE.small_inputs(Case("", gate="softplus"))
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


# What the gate sees beside rates of up to e^150, which float32 does not hold: where decays are 0, 1 and between.
STEEP_RATES = (60.0, 80.0, 88.0, 89.0, 100.0, 150.0)
STEEP_INPUTS = (-160.0, -150.5, -101.0, -99.0, -90.25, -87.5, -80.0, -61.0, -30.0, -1.0, -1e-3, 0.0, 1e-3, 3.0)


def direct_gate(g, A_log, dt_bias, lower_bound):
    """By the formula, in float64, which holds these rates."""
    rate, x = A_log.exp()[:, None], g + dt_bias
    return -rate * torch.nn.functional.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def check_steep_gates(kernel, function, lower_bound, served=nullcontext):
    """Outputs and gradients against the same function without a gate, in float64, behind the formula."""
    tokens, heads = 4 * len(STEEP_INPUTS), len(STEEP_RATES)
    inputs = RULE.inputs(Case("", value_heads=heads, key_dim=3, value_dim=2), Pack("", (tokens,)), torch.float32)
    parts = torch.tensor(STEEP_INPUTS).repeat(4)[torch.randperm(tokens)][None, :, None, None]
    inputs["g"] = parts.expand(1, tokens, heads, 3).clone()
    inputs["dt_bias"] = torch.tensor([0.0, 0.5, -2.0]).repeat(heads, 1)
    inputs["A_log"] = torch.tensor(STEEP_RATES)

    def run(leaves, in_kernel):
        gate = [leaves.pop(name) for name in ("g", "A_log", "dt_bias")]
        if in_kernel:
            options = dict(zip(("g", "A_log", "dt_bias"), gate), use_gate_in_kernel=True, lower_bound=lower_bound)
        else:
            options = dict(g=direct_gate(*gate, lower_bound))
        o, state = getattr(kernel, function)(**leaves, **options, use_qk_l2norm_in_kernel=True, output_final_state=True)
        return {"o": o, "state": state}

    wide = properties.cast(inputs, torch.float64)
    if function == RULE.recurrent:
        with torch.no_grad():
            ours, truth = run(dict(inputs), True), run(wide, False)
    else:
        with served():
            ours = properties.run_with_gradients(lambda leaves: run(dict(leaves), True), inputs)
        truth = properties.run_with_gradients(lambda leaves: run(dict(leaves), False), wide)
    at_zero = inputs["g"] + inputs["dt_bias"] == 0
    for name, value in ours.items():
        assert bool(value.isfinite().all()), f"{name} is not finite"
        expected = truth[name].float()
        if lower_bound is not None and name in ("dg", "ddt_bias"):
            # Of a step at 0: so large at 0 that it is only asked to be finite, 0 elsewhere.
            near = at_zero if name == "dg" else at_zero.any(1)[0]
            assert bool(value[near].any())
            value, expected = value[~near], expected[~near]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


every_gate = pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["unbounded", "bounded"])


@every_gate
@pytest.mark.parametrize("function", RULE.functions)
def test_rates_beyond_the_range_of_exp(kernel, function, lower_bound, tier):
    check_steep_gates(kernel, function, lower_bound)


@every_gate
def test_rates_beyond_the_range_of_exp_by_triton(kernel, lower_bound):
    check_steep_gates(kernel, RULE.chunk, lower_bound, lambda: served_by_triton(kernel))


@every_gate
def test_gates_at_the_ends_of_float32(kernel, lower_bound):
    """Rates of 0 and infinity, and NaN, which stays; by the reference too."""
    g = torch.tensor([-1e30, -1.0, 0.0, 1.0, 1e30]).expand(1, 2, 1, 5).clone().requires_grad_()
    tokens = [torch.ones(1, 2, 1, 5), torch.ones(1, 2, 1, 5), torch.ones(1, 2, 1, 1)]
    for A_log in (-math.inf, -1e30, 1e30, math.inf, math.nan):
        rate = torch.tensor([A_log], requires_grad=True)
        o, _ = kernel.chunk_kda(
            *tokens, g, torch.ones(1, 2, 1), use_gate_in_kernel=True, A_log=rate, lower_bound=lower_bound
        )
        decay = kernel.kda.reference.kda_gate_reference(g[0], rate, None, lower_bound).exp()
        for result in (o, decay):
            if math.isnan(A_log):
                assert bool(result.isnan().all())
                continue
            gradients = torch.autograd.grad(result.sum(), (g, rate))
            assert all(bool(x.isfinite().all()) for x in (result, *gradients)), (A_log, result, gradients)


GATED = dict(use_gate_in_kernel=True, A_log=torch.ones(2))
REJECTED = [
    (dict(A_log=torch.ones(2)), ValueError, r"A_log must be None without use_gate_in_kernel, got shape \(2,\)"),
    (dict(dt_bias=torch.ones(2)), ValueError, "dt_bias must be None without use_gate_in_kernel"),
    (dict(lower_bound=1.0), ValueError, "lower_bound must be negative, got 1.0"),
    (dict(use_gate_in_kernel=True), ValueError, "A_log must be given with use_gate_in_kernel, unless lower_bound is"),
    (dict(GATED, A_log=torch.ones(3)), ValueError, r"A_log must have HV = 2 elements, got shape \(3,\)"),
    (dict(GATED, A_log=torch.ones(2).int()), TypeError, "A_log must have one of the dtypes"),
    (dict(GATED, dt_bias=torch.ones(16)), ValueError, r"dt_bias must have shape \[HV \* K\] or \[HV, K\]"),
    (dict(GATED, lower_bound=5.0), ValueError, "lower_bound must be negative, got 5.0"),
    (dict(GATED, lower_bound="-5"), TypeError, "lower_bound must be a number or None, got '-5'"),
    (dict(GATED, safe_gate=True), ValueError, "lower_bound must be given with safe_gate"),
]


@pytest.mark.parametrize("function", RULE.functions)
@pytest.mark.parametrize("change, error, text", REJECTED, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_rejects_gates(kernel, function, change, error, text):
    with pytest.raises(error, match=text):
        getattr(kernel, function)(**RULE.small_inputs(), **change)


def test_direct_op_calls_check_the_gate(kernel):
    ops, inputs = kernel._ops.ops, RULE.small_inputs()
    tokens = [inputs[name][0] for name in ("q", "k", "v", "g", "beta")]
    behind = (torch.tensor([0, 5, 13], dtype=torch.int32), None, 0.5, True, True)
    for op in (ops.kda_fwd, ops.kda_recurrent_fwd):
        with pytest.raises(RuntimeError, match="A_log must have shape"):
            op(*tokens, torch.ones(1), None, None, *behind)
        with pytest.raises(RuntimeError, match="dt_bias must have shape"):
            op(*tokens, torch.ones(2), torch.ones(2, 15), None, *behind)
        with pytest.raises(RuntimeError, match="need A_log"):
            op(*tokens, None, None, -5.0, *behind)
