"""Shapes and gradient of the causal convolution's ops.

dx is the correlation run backwards inside each sequence, dweight and dbias sum over all tokens, and z is recomputed
from the saved input, so nothing but the inputs is kept.
"""

import torch

from .._ops import add_op_namespace_prefix, ops


def _accumulation_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _state_shape(x, weight, cu_seqlens, channels_last):
    return cu_seqlens.shape[0] - 1, x.shape[2 if channels_last else 1], weight.shape[1] - 1


@torch.library.register_fake(add_op_namespace_prefix("causal_conv1d_fwd"))
def _fwd_fake(x, weight, bias, cu_seqlens, initial_states, silu, channels_last, want_states):
    state = _state_shape(x, weight, cu_seqlens, channels_last) if want_states else (0,)
    return x.new_empty(x.shape), x.new_empty(state)


@torch.library.register_fake(add_op_namespace_prefix("causal_conv1d_bwd"))
def _bwd_fake(dy, dfinal_states, x, weight, bias, cu_seqlens, initial_states, silu, channels_last):
    dtype = _accumulation_dtype(x)
    state = _state_shape(x, weight, cu_seqlens, channels_last) if initial_states is not None else (0,)
    dbias = bias.shape if bias is not None else (0,)
    return (
        x.new_empty(x.shape),
        x.new_empty(weight.shape, dtype=dtype),
        x.new_empty(dbias, dtype=dtype),
        x.new_empty(state, dtype=dtype),
    )


@torch.library.register_fake(add_op_namespace_prefix("causal_conv1d_update"))
def _update_fake(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    x, weight, bias, cu_seqlens, initial_states, silu, channels_last, want_states = inputs
    ctx.save_for_backward(x, weight, bias, cu_seqlens, initial_states)
    ctx.flags = silu, channels_last, want_states


def _backward(ctx, dy, dfinal_states):
    x, weight, bias, cu_seqlens, initial_states = ctx.saved_tensors
    silu, channels_last, want_states = ctx.flags
    dx, dweight, dbias, dinitial_states = ops.causal_conv1d_bwd(
        dy, dfinal_states if want_states else None, x, weight, bias, cu_seqlens, initial_states, silu, channels_last
    )
    return (
        dx,
        dweight.to(weight.dtype),
        dbias.to(bias.dtype) if bias is not None else None,
        None,
        dinitial_states.to(initial_states.dtype) if initial_states is not None else None,
        None,
        None,
        None,
    )


torch.library.register_autograd(
    add_op_namespace_prefix("causal_conv1d_fwd"), _backward, setup_context=_setup_context
)
