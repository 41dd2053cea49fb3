"""Shapes of the ops for tracing, and the gradient of the scan.

The backward op recomputes the states from the inputs, which are all that is saved.
"""

import torch

from .._autograd import differentiable, forward_only
from .._dtypes import accumulation_dtype
from .._ops import add_op_namespace_prefix


@torch.library.register_fake(add_op_namespace_prefix("mamba2_scan_fwd"))
def _fwd_fake(
    x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max, want_state
):
    state = (cu_seqlens.shape[0] - 1, x.shape[1], x.shape[2], B.shape[2]) if want_state else (0,)
    return x.new_empty(x.shape), x.new_empty(state, dtype=accumulation_dtype(x))


@torch.library.register_fake(add_op_namespace_prefix("mamba2_scan_bwd"))
def _bwd_fake(
    dy, dfinal_state, x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max
):
    def like(tensor, dtype=None):
        return x.new_empty((0,) if tensor is None else tensor.shape, dtype=dtype)

    wide = accumulation_dtype(x)
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
def _update_fake(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices=None):
    return x.new_empty(x.shape)


differentiable("mamba2_scan", "mamba_chunk_scan_combined", states="final_state", asked_by="want_state")
forward_only(
    "selective_state_update",
    "selective_state_update",
    "mamba_chunk_scan_combined or selective_scan_fn, which take initial_states",
)
