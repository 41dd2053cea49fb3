"""Shapes and gradient of the scan's ops.

The backward op runs the states forward again from the inputs, which are all that is saved. Gradients of u, delta and z
come in y's axis order, those of B and C per token as [B, T, G, N].
"""

from typing import Any, Dict

import torch
from torch import Tensor

from .._autograd import differentiable
from .._dtypes import accumulation_dtype
from .._ops import add_op_namespace_prefix


def _stream_shape(u, channels_last):
    batch, channels, tokens = u.shape
    return (batch, tokens, channels) if channels_last else (batch, channels, tokens)


def _state_shape(u, A, cu_seqlens):
    return cu_seqlens.shape[0] - 1, u.shape[1], A.shape[1]


def _coefficient_gradient(u, coefficients):
    if coefficients.dim() == 2:
        return u.new_empty(coefficients.shape, dtype=accumulation_dtype(u))
    batch, groups, states, tokens = coefficients.shape
    return coefficients.new_empty(batch, tokens, groups, states)


@torch.library.register_fake(add_op_namespace_prefix("mamba1_scan_fwd"))
def _fwd_fake(
    u, delta, A, B, C, D, z, delta_bias, cu_seqlens, initial_states, delta_softplus, channels_last, want_states
):
    state = _state_shape(u, A, cu_seqlens) if want_states else (0,)
    return u.new_empty(_stream_shape(u, channels_last)), u.new_empty(state, dtype=accumulation_dtype(u))


@torch.library.register_fake(add_op_namespace_prefix("mamba1_scan_bwd"))
def _bwd_fake(
    dy, dfinal_states, u, delta, A, B, C, D, z, delta_bias, cu_seqlens, initial_states, delta_softplus, channels_last
):
    dtype = accumulation_dtype(u)
    shape = _stream_shape(u, channels_last)
    return (
        u.new_empty(shape),
        delta.new_empty(shape),
        u.new_empty(A.shape, dtype=dtype),
        _coefficient_gradient(u, B),
        _coefficient_gradient(u, C),
        u.new_empty((0,) if D is None else D.shape, dtype=dtype),
        u.new_empty((0,)) if z is None else z.new_empty(shape),
        u.new_empty((0,) if delta_bias is None else delta_bias.shape, dtype=dtype),
        u.new_empty((0,) if initial_states is None else initial_states.shape, dtype=dtype),
    )


def _like_inputs(gradients: Dict[str, Tensor], arguments: Dict[str, Any]) -> Dict[str, Tensor]:
    """Axes in the order of the forward op's inputs."""
    permuted_back = dict(gradients)
    if arguments["channels_last"]:
        for name in ("u", "delta", "z") if arguments["z"] is not None else ("u", "delta"):
            permuted_back[name] = gradients[name].transpose(1, 2)
    for name in ("B", "C"):
        if arguments[name].dim() == 4:
            permuted_back[name] = gradients[name].permute(0, 2, 3, 1)
    return permuted_back


differentiable("mamba1_scan", "selective_scan_fn", "final_states", "want_states", _like_inputs)
