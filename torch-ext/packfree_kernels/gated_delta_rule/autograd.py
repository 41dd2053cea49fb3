"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._delta_rule import no_backward
from .._ops import add_op_namespace_prefix, ops


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


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
    return o, q.new_empty(state_shape, dtype=_state_dtype(q))


torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_fwd"))(_fwd_fake)
torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_recurrent_fwd"))(_fwd_fake)


@torch.library.register_fake(add_op_namespace_prefix("gated_delta_rule_bwd"))
def _bwd_fake(
    do: Tensor,
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


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, want_state = inputs
    ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, initial_state)
    ctx.scale = scale
    ctx.l2norm = l2norm
    ctx.want_state = want_state


def _backward(ctx, do: Tensor, dfinal_state: Tensor):
    q, k, v, g, beta, cu_seqlens, initial_state = ctx.saved_tensors
    dq, dk, dv, dg, dbeta, dinitial_state = ops.gated_delta_rule_bwd(
        do,
        dfinal_state if ctx.want_state else None,
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens,
        initial_state,
        ctx.scale,
        ctx.l2norm,
    )
    if initial_state is None:
        dinitial_state = None
    return dq, dk, dv, dg, dbeta, None, dinitial_state, None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("gated_delta_rule_fwd"), _backward, setup_context=_setup_context
)

torch.library.register_autograd(
    add_op_namespace_prefix("gated_delta_rule_recurrent_fwd"),
    no_backward("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"),
)
