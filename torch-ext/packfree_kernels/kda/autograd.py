"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._autograd import differentiable, forward_only
from .._ops import add_op_namespace_prefix


def _fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    o = q.new_empty(v.shape)
    state_shape = (cu_seqlens.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]) if want_state else (0,)
    return o, g.new_empty(state_shape)


torch.library.register_fake(add_op_namespace_prefix("kda_fwd"))(_fwd_fake)
torch.library.register_fake(add_op_namespace_prefix("kda_recurrent_fwd"))(_fwd_fake)


@torch.library.register_fake(add_op_namespace_prefix("kda_bwd"))
def _bwd_fake(
    dout: Tensor,
    dfinal_state: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        q.new_empty(k.shape),
        q.new_empty(v.shape),
        g.new_empty(g.shape),
        g.new_empty(beta.shape),
        g.new_empty((0,) if a_log is None else a_log.shape),
        g.new_empty((0,) if dt_bias is None else dt_bias.shape),
        g.new_empty((0,) if initial_state is None else initial_state.shape),
    )


differentiable("kda", "chunk_kda", states="final_state", asked_by="want_state")
forward_only(
    "kda_recurrent_fwd",
    "fused_recurrent_kda",
    "chunk_kda, which takes the same arguments and gives the same result with gradients",
)
