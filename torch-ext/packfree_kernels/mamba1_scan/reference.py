"""Ground truth of the selective scan: token by token in plain torch, any float dtype."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..packing import sequence_bounds


def selective_scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    cu_seqlens: Tensor,
    initial_states: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Each sequence by its recurrence, from its own state.

    With ``s = softplus(delta + delta_bias)`` (or the sum itself)::

        h_t = exp(s_t A) h_{t-1} + s_t u_t B_t
        y_t = (C_t . h_t + D u_t) silu(z_t)

    Args:
        u, delta: ``[D, T]``.
        A: ``[D, N]``.
        B, C: ``[D, N]``, or ``[G, N, T]``: channel ``d`` reads group ``d // (D / G)``.
        D, delta_bias: ``[D]`` or None (zeros).
        z: ``[D, T]`` or None (no gate).
        delta_softplus: whether ``s`` goes through softplus.
        cu_seqlens: ``[sequences + 1]``.
        initial_states: ``[sequences, D, N]`` or None (zeros).

    Returns:
        y ``[D, T]`` in u's dtype, 0 after the last boundary, and the last states ``[sequences, D, N]``. The arithmetic
        and the states are fp32, or fp64 for fp64 inputs, as the function promises.
    """
    dtype = accumulation_dtype(u)
    out_dtype = u.dtype
    channels, tokens = u.shape
    u, delta, A, B, C = (x.to(dtype) for x in (u, delta, A, B, C))
    step = delta if delta_bias is None else delta + delta_bias.to(dtype)[:, None]
    if delta_softplus:
        step = F.softplus(step)

    def coefficient(x: Tensor, t: int) -> Tensor:
        """B or C of one token, [D, N]."""
        return x if x.dim() == 2 else x[:, :, t].repeat_interleave(channels // x.shape[0], dim=0)

    outputs, states = [], []
    bounds = sequence_bounds(cu_seqlens)
    for n, (bos, eos) in enumerate(bounds):
        h = u.new_zeros(A.shape) if initial_states is None else initial_states[n].to(dtype)
        for t in range(bos, eos):
            # h = exp(s A) h + s u B
            h = torch.exp(step[:, t, None] * A) * h + (step[:, t] * u[:, t])[:, None] * coefficient(B, t)
            outputs.append((h * coefficient(C, t)).sum(-1))
        states.append(h)
    live = bounds[-1][1] if bounds else 0
    y = torch.stack(outputs, dim=-1) if outputs else u.new_zeros(channels, 0)
    if D is not None:
        y = y + D.to(dtype)[:, None] * u[:, :live]
    if z is not None:
        y = y * F.silu(z[:, :live].to(dtype))
    y = torch.cat([y, y.new_zeros(channels, tokens - live)], dim=-1)
    last = torch.stack(states) if states else u.new_zeros(0, *A.shape)
    return y.to(out_dtype), last
