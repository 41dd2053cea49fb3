"""kda as the harness calls it."""

from tests.harness.ops import delta_rules
from tests.harness.ops.delta_rules import Case, Rule

CASES = [
    *delta_rules.CASES,
    Case("gate", gate="softplus"),
    Case("bounded gate", gate="bounded", key_dim=21),
    Case("gate without bias", gate="softplus", bias=False, initial=False),
]

RULE = Rule("kda", "chunk_kda", "fused_recurrent_kda", per_channel=True)
op_under_test = RULE.op_under_test
