"""Shapes of the ops for tracing, and their gradients.

The backward op recomputes the states from the inputs, which are all that is saved. The token-by-token op has no
backward of its own: the chunked function gives the same result with one.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._delta_rule import no_backward
from .._ops import add_op_namespace_prefix, ops


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
    do: Tensor,
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


def _setup_context(ctx, inputs, output) -> None:
    (q, k, v, g, beta, a_log, dt_bias, ctx.lower_bound, cu_seqlens, initial_state, ctx.scale, ctx.l2norm,
     ctx.want_state) = inputs  # fmt: skip
    ctx.save_for_backward(q, k, v, g, beta, a_log, dt_bias, cu_seqlens, initial_state)


def _backward(ctx, do: Tensor, dfinal_state: Tensor):
    q, k, v, g, beta, a_log, dt_bias, cu_seqlens, initial_state = ctx.saved_tensors
    dq, dk, dv, dg, dbeta, da_log, ddt_bias, dinitial_state = ops.kda_bwd(
        do,
        dfinal_state if ctx.want_state else None,
        q,
        k,
        v,
        g,
        beta,
        a_log,
        dt_bias,
        ctx.lower_bound,
        cu_seqlens,
        initial_state,
        ctx.scale,
        ctx.l2norm,
    )
    return (
        dq,
        dk,
        dv,
        dg,
        dbeta,
        None if a_log is None else da_log,
        None if dt_bias is None else ddt_bias,
        None,
        None,
        None if initial_state is None else dinitial_state,
        None,
        None,
        None,
    )


torch.library.register_autograd(add_op_namespace_prefix("kda_fwd"), _backward, setup_context=_setup_context)

torch.library.register_autograd(
    add_op_namespace_prefix("kda_recurrent_fwd"), no_backward("fused_recurrent_kda", "chunk_kda")
)
