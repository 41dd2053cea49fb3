"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._autograd import differentiable, forward_only
from .._dtypes import accumulation_dtype
from .._ops import add_op_namespace_prefix


def _fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    o = q.new_empty(v.shape)
    state_shape = (cu_seqlens.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]) if want_state else (0,)
    return o, q.new_empty(state_shape, dtype=accumulation_dtype(q))


torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_fwd"))(_fwd_fake)
torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_recurrent_fwd"))(_fwd_fake)


@torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_bwd"))
def _bwd_fake(
    dout: Tensor,
    dfinal_state: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    state_shape = (0,) if initial_state is None else initial_state.shape
    return (
        q.new_empty(q.shape),
        q.new_empty(k.shape),
        q.new_empty(v.shape),
        g.new_empty(g.shape),
        g.new_empty(beta.shape),
        g.new_empty(state_shape),
    )


differentiable("gated_delta_rule", "chunk_gated_delta_rule", states="final_state", asked_by="want_state")
forward_only(
    "gated_delta_rule_recurrent_fwd",
    "fused_recurrent_gated_delta_rule",
    "chunk_gated_delta_rule, which takes the same arguments and gives the same result with gradients",
)
