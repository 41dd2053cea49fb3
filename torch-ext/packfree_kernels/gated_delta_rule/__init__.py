from .api import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .reference import gated_delta_rule_reference

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gated_delta_rule_reference"]
