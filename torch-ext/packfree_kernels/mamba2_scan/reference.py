"""Mamba-2's scan, token by token in plain torch: what the kernels must compute."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..packing import sequence_bounds


def mamba2_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
) -> Tuple[Tensor, Tensor]:
    """Each sequence by its recurrence, from its own state.

    With step ``d_t = clamp(softplus(dt_t + dt_bias))`` and a state ``h`` ``[P, S]`` a head::

        h_t = exp(d_t A) h_{t-1} + d_t x_t B_t^T
        y_t = (h_t C_t + D x_t) silu(z_t)

    Args:
        x, z: ``[T, H, P]``.
        dt: ``[T, H]``.
        A, dt_bias: ``[H]``.
        B, C: ``[T, G, S]``. Head ``h`` reads group ``h // (H / G)``.
        cu_seqlens: offsets ``[N + 1]``.
        D: ``[H]`` or ``[H, P]``.
        initial_states: ``[N, H, P, S]``; zeros if None.
        dt_softplus: whether the step is ``softplus(dt + dt_bias)`` or the sum itself.
        dt_limit: what the step is clamped to.

    Returns:
        ``y`` ``[T, H, P]`` in x's dtype, 0 after the last offset, and the final states ``[N, H, P, S]``. The state is
        kept in fp32, or in fp64 for fp64 inputs, as the function promises.
    """
    heads, head_dim = x.shape[1:]
    dtype = accumulation_dtype(x)
    out_dtype = x.dtype
    x, dt, A, B, C = (value.to(dtype) for value in (x, dt, A, B, C))
    step = dt if dt_bias is None else dt + dt_bias.to(dtype)
    if dt_softplus:
        step = F.softplus(step)
    step = torch.clamp(step, min=dt_limit[0], max=dt_limit[1])
    group = heads // B.shape[1]
    B, C = (value.repeat_interleave(group, dim=1) for value in (B, C))
    skip = None if D is None else D.to(dtype) if D.dim() == 2 else D.to(dtype)[:, None]
    bounds = sequence_bounds(cu_seqlens)
    outputs, states = [], []
    for n, (bos, eos) in enumerate(bounds):
        if initial_states is None:
            state = x.new_zeros(heads, head_dim, B.shape[-1])
        else:
            state = initial_states[n].to(dtype)
        for t in range(bos, eos):
            decay = torch.exp(step[t] * A)[:, None, None]
            state = decay * state + (step[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
            y = torch.einsum("hps,hs->hp", state, C[t])
            if skip is not None:
                y = y + skip * x[t]
            if z is not None:
                y = y * F.silu(z[t].to(dtype))
            outputs.append(y)
        states.append(state)
    # Padding is 0 for any x, NaN included, and its gradient 0, not absent.
    padding = x[bounds[-1][1] if bounds else 0 :].masked_fill(torch.ones((), dtype=torch.bool), 0)
    y = torch.cat([torch.stack(outputs), padding]) if outputs else padding
    final = torch.stack(states) if states else x.new_zeros(0, heads, head_dim, B.shape[-1])
    return y.to(out_dtype), final


def selective_state_update_reference(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    dt_softplus: bool = False,
) -> Tuple[Tensor, Tensor]:
    """One token of the recurrence with steps ``[B, H, P]`` and decay rates ``[H, P, S]``: ``y`` and the new state.

    Shapes as in ``selective_state_update``, with heads. Nothing is changed in place.
    """
    dtype = accumulation_dtype(x)
    group = x.shape[1] // B.shape[1]
    step = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    if dt_softplus:
        step = F.softplus(step)
    wide = x.to(dtype)
    B, C = (value.to(dtype).repeat_interleave(group, dim=1) for value in (B, C))
    decay = torch.exp(step[..., None] * A.to(dtype))
    new = decay * state.to(dtype) + (step * wide)[..., None] * B[:, :, None, :]
    y = torch.einsum("bhps,bhs->bhp", new, C)
    if D is not None:
        y = y + D.to(dtype) * wide
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), new.to(state.dtype)
