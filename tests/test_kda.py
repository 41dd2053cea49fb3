"""kda: against its reference and transformers, packed against alone, its ops and its gate.

What it shares with the gated delta rule is in test_delta_rules.py.
"""

import pytest
import torch

from tests.harness import properties
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits
from tests.ops.kda import CASES, RULE, Case, op_under_test

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


GATED = dict(use_gate_in_kernel=True, A_log=torch.ones(2))
REJECTED = [
    (dict(A_log=torch.ones(2)), ValueError, r"A_log must be None without use_gate_in_kernel, got shape \(2,\)"),
    (dict(dt_bias=torch.ones(2)), ValueError, "dt_bias must be None without use_gate_in_kernel"),
    (dict(lower_bound=-5.0), ValueError, "lower_bound must be None without use_gate_in_kernel, got -5.0"),
    (dict(use_gate_in_kernel=True), TypeError, "A_log must be a tensor, got NoneType"),
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
