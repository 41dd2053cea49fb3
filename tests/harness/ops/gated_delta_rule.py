"""gated_delta_rule as the harness calls it."""

from tests.harness.ops.delta_rules import CASES, Case, Rule

__all__ = ["CASES", "RULE", "Case", "op_under_test"]

RULE = Rule("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", per_channel=False)
op_under_test = RULE.op_under_test
