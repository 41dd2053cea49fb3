"""The delta rules token by token: for decoding, where sequences have few tokens."""

from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from .delta import state_at
from .delta_sizes import dense, serves, states_or
from .launch import launch, programs
from .padding import clear_padding
from .work import longest_first


@triton.jit
def _step(
    q, k, v, q_token, q_head, k_token, k_head, v_token, v_head, g, beta, cu_seqlens, order, sequences, initial_state,
    o, final_state, scale, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """A sequence in BV columns of one value head's state, as the recurrence says."""
    columns: tl.constexpr = (V + BV - 1) // BV
    x = tl.arange(0, BK)
    for item in tl.range(tl.program_id(0), tl.load(sequences) * (HV * columns), tl.num_programs(0), disable_licm=True):
        n = tl.load(order + item // (HV * columns)).to(tl.int64)
        hv = item // columns % HV
        h = hv // (HV // H)
        value = item % columns * BV + tl.arange(0, BV)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
        if initial_state is not None:
            at, valid = state_at(initial_state, n, hv, HV, x, K, value, V)
            state = tl.load(at, valid, 0.0)
        else:
            state = tl.zeros((BK, BV), tl.float32)
        for token in range(bos, eos):
            q_row = tl.load(q + token * q_token + h * q_head + x, x < K, 0.0).to(tl.float32)
            k_row = tl.load(k + token * k_token + h * k_head + x, x < K, 0.0).to(tl.float32)
            if L2NORM:
                q_row /= tl.sqrt(tl.sum(q_row * q_row, 0) + 1e-6)
                k_row /= tl.sqrt(tl.sum(k_row * k_row, 0) + 1e-6)
            if PER_CHANNEL:
                state *= tl.exp(tl.load(g + (token * HV + hv) * K + x, x < K, 0.0))[:, None]
            else:
                state *= tl.exp(tl.load(g + token * HV + hv))
            written = tl.load(v + token * v_token + hv * v_head + value, value < V, 0.0).to(tl.float32)
            written = (written - tl.sum(state * k_row[:, None], 0)) * tl.load(beta + token * HV + hv)
            state += k_row[:, None] * written[None, :]
            out = tl.sum(state * (q_row * scale)[:, None], 0)
            tl.store(o + (token * HV + hv) * V + value, out.to(o.dtype.element_ty), value < V)
        if final_state is not None:
            at, valid = state_at(final_state, n, hv, HV, x, K, value, V)
            tl.store(at, state, valid)


def recurrent(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    """What the recurrent ops return; ``g`` holds log-decays, fp32 ``[T, HV]`` or ``[T, HV, K]``."""
    (q, k, v), (g, beta, initial_state) = serves(op, q, k, v), dense(g, beta, initial_state)
    key_heads, key_dim = q.shape[1:]
    value_heads, value_dim = v.shape[1:]
    order, sequences = longest_first(cu_seqlens)
    final_state = None
    if want_state:
        final_state = states_or(initial_state, (order.shape[0], value_heads, key_dim, value_dim), v)
    o = v.new_empty(v.shape)
    clear_padding(cu_seqlens, o)
    width = min(32 if key_dim <= 128 else 16, triton.next_power_of_2(value_dim))
    items = order.shape[0] * value_heads * triton.cdiv(value_dim, width)
    launch(
        _step, programs(v, items, 4), q, k, v, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), g, beta, cu_seqlens, order, sequences, initial_state, o, final_state, float(scale), HV=value_heads,
        H=key_heads, K=key_dim, V=value_dim, BK=triton.next_power_of_2(key_dim), BV=width, PER_CHANNEL=g.dim() == 3,
        L2NORM=l2norm, num_warps=4, num_stages=1,
    )  # fmt: skip
    return o, beta.new_empty((0,)) if final_state is None else final_state
