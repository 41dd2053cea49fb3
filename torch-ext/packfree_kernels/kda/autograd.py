"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Any, Tuple

from torch import Tensor

from .._autograd import differentiable, forward_only
from .._tracing import returns, returns_gradients


@returns("kda_fwd", "kda_recurrent_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    state = (a.cu_seqlens.shape[0] - 1, a.v.shape[1], a.q.shape[2], a.v.shape[2])
    return a.q.new_empty(a.v.shape), a.g.new_empty(state if a.want_state else (0,))


returns_gradients("kda", wide=["a_log", "dt_bias", "initial_state"])
differentiable("kda", "chunk_kda", states="final_state", asked_by="want_state")
forward_only(
    "kda_recurrent_fwd",
    "fused_recurrent_kda",
    "chunk_kda, which takes the same arguments and gives the same result with gradients",
)
