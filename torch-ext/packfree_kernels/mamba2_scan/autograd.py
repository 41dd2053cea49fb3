"""Shapes of the ops for tracing, and the gradient of the scan.

The backward op recomputes the states from the inputs, which are all that is saved.
"""

import torch

from .._ops import add_op_namespace_prefix, ops


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("mamba2_scan_fwd"))
def _fwd_fake(
    x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max, want_state
):
    state = (cu_seqlens.shape[0] - 1, x.shape[1], x.shape[2], B.shape[2]) if want_state else (0,)
    return x.new_empty(x.shape), x.new_empty(state, dtype=_wide(x))


@torch.library.register_fake(add_op_namespace_prefix("mamba2_scan_bwd"))
def _bwd_fake(
    dy, dfinal_state, x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max
):
    def like(tensor, dtype=None):
        return x.new_empty((0,) if tensor is None else tensor.shape, dtype=dtype)

    wide = _wide(x)
    return (
        like(x),
        like(dt, wide),
        like(A, wide),
        like(B),
        like(C),
        like(D, wide),
        like(z),
        like(dt_bias, wide),
        like(initial_state, wide),
    )


@torch.library.register_fake(add_op_namespace_prefix("selective_state_update"))
def _update_fake(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    *tensors, dt_softplus, dt_min, dt_max, want_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = dt_softplus, dt_min, dt_max
    ctx.want_state = want_state


def _backward(ctx, dy, dfinal_state):
    x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state = ctx.saved_tensors
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_state = ops.mamba2_scan_bwd(
        dy,
        dfinal_state if ctx.want_state else None,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        cu_seqlens,
        initial_state,
        *ctx.options,
    )
    return (
        dx,
        ddt,
        dA,
        dB,
        dC,
        None if D is None else dD,
        None if z is None else dz,
        None if dt_bias is None else ddt_bias,
        None,
        None if initial_state is None else dinitial_state,
        None,
        None,
        None,
        None,
    )


torch.library.register_autograd(
    add_op_namespace_prefix("mamba2_scan_fwd"), _backward, setup_context=_setup_context
)
