"""Each recurrent op as :func:`~.carry.carried` takes it."""

from typing import Any, Callable, Tuple

import torch
from torch import Tensor

from .carry import Recurrence


def delta_rule(kernel: Callable, tokens: Tuple[Tensor, ...], gate: Tuple[Any, ...], scale: float, l2norm: bool):
    """Gated delta rule and KDA: ``tokens`` are q, k, v, g, beta ``[T, ...]``, ``gate`` the op's arguments behind them.

    M ``[K, K]`` is where the columns of the unit matrix go when there are no values.
    """
    q, _, v, _, beta = tokens
    heads, key_dim, value_dim = v.shape[1], q.shape[2], v.shape[2]

    def run(inputs, cu_seqlens, initial, want_state):
        return kernel(*inputs, cu_seqlens, initial, scale, l2norm, want_state)

    def transfer(inputs, cu_seqlens):
        q, k, v, *rest = inputs
        unit = torch.eye(key_dim, dtype=beta.dtype, device=v.device).expand(1, heads, key_dim, key_dim).contiguous()
        return run((q, k, v.new_zeros(v.shape[0], heads, key_dim), *rest), cu_seqlens, unit, True)[1]

    axes = (0,) * 5 + (None,) * len(gate)
    state, M = (1, heads, key_dim, value_dim), (1, heads, key_dim, key_dim)
    return Recurrence((*tokens, *gate), axes, run, transfer, state, M, beta.dtype, False)


def mamba2(kernel: Callable, inputs: Tuple[Any, ...], options: Tuple[Any, ...], dtype: torch.dtype) -> Recurrence:
    """``inputs`` are x, dt, A, B, C, D, z, dt_bias as the op takes them, tokens first. M is one decay a head."""
    x, B = inputs[0], inputs[3]
    heads = x.shape[1]

    def run(inputs, cu_seqlens, initial, want_state):
        return kernel(*inputs, cu_seqlens, initial, *options, want_state)

    def transfer(inputs, cu_seqlens):
        x, dt, A, B, C, _, _, dt_bias = inputs
        one = torch.ones(1, heads, 1, 1, dtype=dtype, device=x.device)
        nothing = x.new_zeros(x.shape[0], heads, 1)
        return run((nothing, dt, A, B[..., :1], C[..., :1], None, None, dt_bias), cu_seqlens, one, True)[1]

    axes = (0, 0, None, 0, 0, None, 0, None)
    return Recurrence(inputs, axes, run, transfer, (1, heads, x.shape[2], B.shape[2]), (1, heads, 1, 1), dtype, True)


def mamba1(kernel: Callable, inputs: Tuple[Any, ...], options: Tuple[Any, ...], dtype: torch.dtype) -> Recurrence:
    """``inputs`` are u, delta, A, B, C, D, z, delta_bias as the op takes them. M is a decay a channel and state."""
    A, B, C = inputs[2:5]
    state = (1, *A.shape)

    def run(inputs, cu_seqlens, initial, want_state):
        return kernel(*inputs, cu_seqlens, initial, *options, want_state)

    def transfer(inputs, cu_seqlens):
        u, delta, A, B, C, _, _, delta_bias = inputs
        ones = torch.ones(state, dtype=dtype, device=u.device)
        return run((torch.zeros_like(u), delta, A, B, C, None, None, delta_bias), cu_seqlens, ones, True)[1]

    axes = (2, 2, None, None if B.dim() == 2 else 3, None if C.dim() == 2 else 3, None, 2, None)
    return Recurrence(inputs, axes, run, transfer, state, state, dtype, True)
