"""gated_delta_rule: against its reference and transformers, packed against alone, and its ops.

What it shares with Kimi delta attention is in test_delta_rules.py.
"""

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.gated_delta_rule import CASES, RULE, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, tier):
    for pack in catalogue(edge=64)[:-2]:
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_at_model_size(dtype):
    """Head dims of real models, a tile of every kind, more rows of q and k than a register tile."""
    case = Case("model", value_heads=2, key_dim=128, value_dim=128)
    properties.check_against_reference(op_under_test(case), Pack("", (70, 1, 9)), dtype)
    case = Case("largest", value_heads=1, key_dim=256, value_dim=256)
    properties.check_against_reference(op_under_test(case), Pack("", (66,)), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_properties(dtype, tier):
    for pack in catalogue(edge=64):
        properties.check_all_properties(op_under_test(CASES[0]), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in CASES[:2]:
        properties.check_memory_forms(op_under_test(case), Pack("ragged", (5, 9, 17, 3)), dtype)


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    for dtype in (torch.float32, torch.bfloat16):
        inputs = RULE.small_inputs(lengths=SMALL.lengths, dtype=dtype)
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
