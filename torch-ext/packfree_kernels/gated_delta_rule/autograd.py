"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Any, Tuple

from torch import Tensor

from .._autograd import differentiable, forward_only
from .._tracing import returns, returns_gradients


@returns("gated_delta_rule_fwd", "gated_delta_rule_recurrent_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    state = (a.cu_seqlens.shape[0] - 1, a.v.shape[1], a.q.shape[2], a.v.shape[2])
    return a.q.new_empty(a.v.shape), a.g.new_empty(state if a.want_state else (0,))


returns_gradients("gated_delta_rule", wide=["initial_state"])
differentiable("gated_delta_rule", "chunk_gated_delta_rule", states="final_state", asked_by="want_state")
forward_only(
    "gated_delta_rule_recurrent_fwd",
    "fused_recurrent_gated_delta_rule",
    "chunk_gated_delta_rule, which takes the same arguments and gives the same result with gradients",
)
