"""Argument checks that the delta rules share: the tokens, the scale, the states."""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor

from ._checks import FLOAT_DTYPES, check_dtype, check_same_device, check_shape, check_tensor, type_error, value_error
from .packing import Packing

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
    if q.device.type not in ("cpu", "meta"):
        raise value_error(op, "q", "be on a CPU", q.device)
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


def checked_scale(op: str, scale: Optional[float], key_dim: int) -> float:
    """``scale``, or ``K ** -0.5`` if None."""
    if scale is None:
        return key_dim**-0.5
    return checked_number(op, "scale", scale)


def checked_number(op: str, argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise type_error(op, argument, "be a number or None", repr(value))
    if not math.isfinite(value):
        raise value_error(op, argument, "be finite", value)
    return float(value)


def checked_states(
    op: str, initial_state: Tensor, packing: Packing, shape: Tuple[int, int, int], device: torch.device
) -> Tensor:
    """The caller's states ``[N', HV, K, V]`` as the kernels take them; ``shape`` is ``(HV, K, V)``."""
    check_tensor(op, "initial_state", initial_state, 4)
    check_dtype(op, "initial_state", initial_state, DTYPES)
    check_same_device(op, "initial_state", initial_state, device)
    check_shape(op, "initial_state", initial_state, (packing.num_states, *shape), "[N, HV, K, V]")
    return packing.spread_states(initial_state)
