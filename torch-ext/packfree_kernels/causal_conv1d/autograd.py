"""Shapes and gradient of the causal convolution's ops.

dx is the correlation run backwards inside each sequence, dweight and dbias sum over all tokens, and z is recomputed
from the saved input, so nothing but the inputs is kept.
"""

import torch

from .._autograd import differentiable, forward_only
from .._dtypes import accumulation_dtype
from .._ops import add_op_namespace_prefix


def _state_shape(x, weight, cu_seqlens, channels_last):
    return cu_seqlens.shape[0] - 1, x.shape[2 if channels_last else 1], weight.shape[1] - 1


@torch.library.register_fake(add_op_namespace_prefix("causal_conv1d_fwd"))
def _fwd_fake(x, weight, bias, cu_seqlens, initial_states, silu, channels_last, want_states):
    state = _state_shape(x, weight, cu_seqlens, channels_last) if want_states else (0,)
    return x.new_empty(x.shape), x.new_empty(state)


@torch.library.register_fake(add_op_namespace_prefix("causal_conv1d_bwd"))
def _bwd_fake(dy, dfinal_states, x, weight, bias, cu_seqlens, initial_states, silu, channels_last):
    dtype = accumulation_dtype(x)
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


differentiable("causal_conv1d", "causal_conv1d_fn", states="final_states", asked_by="want_states")
forward_only("causal_conv1d_update", "causal_conv1d_update", "causal_conv1d_fn, which takes initial_states")
