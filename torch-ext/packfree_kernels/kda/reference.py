"""Kimi delta attention, token by token in plain torch: what the kernels must compute."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..packing import sequence_bounds


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def kda_gate_reference(
    g: Tensor, A_log: Tensor, dt_bias: Optional[Tensor] = None, lower_bound: Optional[float] = None
) -> Tensor:
    """Log-decay ``[T, HV, K]`` from what a model projects.

    With ``x = g + dt_bias``: ``-exp(A_log) softplus(x)``, or ``lower_bound sigmoid(exp(A_log) x)`` if ``lower_bound``
    is given. ``exp(A_log)`` is cut at e^70, beyond which it would overflow; what is cut goes into the exponent of
    softplus where that still tells decays apart (``x`` below -40, where softplus is e^x).

    Args:
        g: ``[T, HV, K]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV, K]``; zeros if None.
        lower_bound: what the log-decay never falls below.
    """
    rate = A_log.clamp(max=70).exp()[:, None]
    cut = (A_log - 70).clamp(min=0)[:, None]
    x = g if dt_bias is None else g + dt_bias
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.where(x < -40, (x + cut).clamp(max=0).exp(), torch.nn.functional.softplus(x))


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor] = None,
    scale: Optional[float] = None,
    l2norm: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    lower_bound: Optional[float] = None,
) -> Tuple[Tensor, Tensor]:
    """Each sequence by its recurrence, from its own state.

    With decays ``a_t = exp(g_t)`` ``[K]``, a state ``S`` ``[K, V]`` a value head and ``q`` already times ``scale``::

        u_t = beta_t (v_t - (diag(a_t) S_{t-1})^T k_t)
        S_t = diag(a_t) S_{t-1} + k_t u_t^T
        o_t = S_t^T q_t

    Args:
        q, k: ``[T, H, K]``. Value head ``h`` reads key head ``h // (HV / H)``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``, the log-decay, or with ``A_log`` the input of :func:`kda_gate_reference`.
        beta: ``[T, HV]``.
        cu_seqlens: offsets ``[N + 1]``.
        initial_state: ``[N, HV, K, V]``; zeros if None.
        scale: of q; ``K ** -0.5`` if None.
        l2norm: whether rows of q and k are divided by ``sqrt(|x|^2 + 1e-6)`` first.
        A_log, dt_bias, lower_bound: the gate; see :func:`kda_gate_reference`.

    Returns:
        ``o`` ``[T, HV, V]`` in q's dtype, 0 after the last offset, and the final states ``[N, HV, K, V]``. The state is
        kept in fp32, or in fp64 for fp64 inputs, as the function promises.
    """
    tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    dtype = accumulation_dtype(q)
    group = value_heads // key_heads
    out_dtype = q.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if A_log is not None:
        g = kda_gate_reference(g, A_log.to(dtype), None if dt_bias is None else dt_bias.to(dtype), lower_bound)
    if l2norm:
        q, k = _l2norm(q), _l2norm(k)
    q = q * (key_dim**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    bounds = sequence_bounds(cu_seqlens)
    outputs, states = [], []
    for n, (bos, eos) in enumerate(bounds):
        state = q.new_zeros(value_heads, key_dim, value_dim) if initial_state is None else initial_state[n].to(dtype)
        for t in range(bos, eos):
            state = g[t].exp()[:, :, None] * state
            u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * u[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    padding = tokens - (bounds[-1][1] if bounds else 0)
    outputs += list(v.new_zeros(padding, value_heads, value_dim))
    o = torch.stack(outputs) if outputs else v.new_zeros(0, value_heads, value_dim)
    final = torch.stack(states) if states else q.new_zeros(0, value_heads, key_dim, value_dim)
    return o.to(out_dtype), final
