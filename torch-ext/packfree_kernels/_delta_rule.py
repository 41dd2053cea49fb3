"""What the public functions of the delta rules share: argument checks, and the call of an op on packed tokens."""

import math
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ._checks import (
    FLOAT_DTYPES,
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    type_error,
    value_error,
)
from .packing import Boundaries, Packing, resolve_packing

MAX_HEAD_DIM = 256
DTYPES = FLOAT_DTYPES + (torch.float64,)


def check_tokens(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, decay_per_channel: bool) -> None:
    """Everything about the five token tensors; ``g`` has one decay a head, or with ``decay_per_channel`` K of them."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, tensor, 4)
        check_dtype(op, name, tensor, DTYPES)
        if tensor.dtype != q.dtype:
            raise type_error(op, name, f"have q's dtype {_name(q.dtype)}", _name(tensor.dtype))
        check_same_device(op, name, tensor, q.device)
    for name, tensor, ndim in (("g", g, 4 if decay_per_channel else 3), ("beta", beta, 3)):
        check_tensor(op, name, tensor, ndim)
        check_dtype(op, name, tensor, DTYPES)
        check_same_device(op, name, tensor, q.device)
    check_served(op, "q", q)
    batch, length, key_heads, key_dim = q.shape
    if key_heads < 1 or not 1 <= key_dim <= MAX_HEAD_DIM:
        raise value_error(op, "q", f"have at least one head and a head_dim of 1 to {MAX_HEAD_DIM}", tuple(q.shape))
    check_shape(op, "k", k, q.shape, "[B, T, H, K]")
    value_heads, value_dim = v.shape[2:]
    if v.shape[:2] != q.shape[:2]:
        raise value_error(op, "v", f"have shape [B, T, HV, V] with B, T = {(batch, length)}", tuple(v.shape))
    if value_heads < 1 or value_heads % key_heads != 0:
        raise value_error(op, "v", f"have a num_heads that is a multiple of q's {key_heads}", value_heads)
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        raise value_error(op, "v", f"have a head_dim of 1 to {MAX_HEAD_DIM}", value_dim)
    if decay_per_channel:
        check_shape(op, "g", g, (batch, length, value_heads, key_dim), "[B, T, HV, K]")
    else:
        check_shape(op, "g", g, (batch, length, value_heads), "[B, T, HV]")
    check_shape(op, "beta", beta, (batch, length, value_heads), "[B, T, HV]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def checked_number(op: str, argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise type_error(op, argument, "be a number or None", repr(value))
    if not math.isfinite(value):
        raise value_error(op, argument, "be finite", value)
    return float(value)


def _checked_states(
    op: str, initial_state: Tensor, packing: Packing, shape: Tuple[int, int, int], device: torch.device
) -> Tensor:
    """The caller's states ``[N', HV, K, V]`` as the kernels take them; ``shape`` is ``(HV, K, V)``."""
    check_tensor(op, "initial_state", initial_state, 4)
    check_dtype(op, "initial_state", initial_state, DTYPES)
    check_same_device(op, "initial_state", initial_state, device)
    check_shape(op, "initial_state", initial_state, (packing.num_states, *shape), "[N, HV, K, V]")
    return packing.spread_states(initial_state)


def run_packed(
    op: str,
    kernel: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: tuple,
    scale: Optional[float],
    initial_state: Optional[Tensor],
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: Optional[Boundaries],
    seq_idx: Optional[Tensor],
    position_ids: Optional[Tensor],
) -> Tuple[Tensor, Optional[Tensor]]:
    """What the public function ``op`` returns, by ``kernel``, from tokens that :func:`check_tokens` has passed.

    ``gate`` holds the arguments that the op takes behind beta.
    """
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    packing = resolve_packing(op, batch, length, q.device, cu_seqlens, seq_idx, position_ids)
    scale = key_dim**-0.5 if scale is None else checked_number(op, "scale", scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    if initial_state is not None:
        shape = (value_heads, key_dim, value_dim)
        initial_state = _checked_states(op, initial_state, packing, shape, q.device).to(wide)
    q, k, v, g, beta = (packing.mask_padding(tensor, time_dim=1) for tensor in (q, k, v, g, beta))
    o, final_state = kernel(
        q.reshape(packing.tokens, key_heads, key_dim),
        k.reshape(packing.tokens, key_heads, key_dim),
        v.reshape(packing.tokens, value_heads, value_dim),
        g.reshape(packing.tokens, *g.shape[2:]).to(wide),
        beta.reshape(packing.tokens, value_heads).to(wide),
        *gate,
        packing.cu_seqlens,
        initial_state,
        scale,
        bool(l2norm),
        bool(output_final_state),
    )
    o = packing.mask_padding(o.reshape(batch, length, value_heads, value_dim), time_dim=1)
    return o, packing.gather_states(final_state) if output_final_state else None
