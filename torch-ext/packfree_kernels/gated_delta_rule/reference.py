"""Gated delta rule, token by token in plain torch: what the kernels must compute."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..packing import sequence_bounds


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor] = None,
    scale: Optional[float] = None,
    l2norm: bool = False,
) -> Tuple[Tensor, Tensor]:
    """Each sequence by its recurrence, from its own state.

    With decay ``a_t = exp(g_t)``, a state ``S`` ``[K, V]`` a value head and ``q`` already times ``scale``::

        u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)
        S_t = a_t S_{t-1} + k_t u_t^T
        o_t = S_t^T q_t

    Args:
        q, k: ``[T, H, K]``. Value head ``h`` reads key head ``h // (HV / H)``.
        v: ``[T, HV, V]``.
        g, beta: ``[T, HV]``.
        cu_seqlens: offsets ``[N + 1]``.
        initial_state: ``[N, HV, K, V]``; zeros if None.
        scale: of q; ``K ** -0.5`` if None.
        l2norm: whether rows of q and k are divided by ``sqrt(|x|^2 + 1e-6)`` first.

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
    if l2norm:
        q, k = _l2norm(q), _l2norm(k)
    q = q * (key_dim**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    bounds = sequence_bounds(cu_seqlens)
    outputs, states = [], []
    for n, (bos, eos) in enumerate(bounds):
        state = q.new_zeros(value_heads, key_dim, value_dim) if initial_state is None else initial_state[n].to(dtype)
        for t in range(bos, eos):
            state = g[t].exp()[:, None, None] * state
            u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * u[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    padding = tokens - (bounds[-1][1] if bounds else 0)
    outputs += list(v.new_zeros(padding, value_heads, value_dim))
    o = torch.stack(outputs) if outputs else v.new_zeros(0, value_heads, value_dim)
    final = torch.stack(states) if states else q.new_zeros(0, value_heads, key_dim, value_dim)
    return o.to(out_dtype), final
