"""Kimi delta attention on a GPU, forward: chunks prepared side by side, then what _triton/delta.py does with them."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.chunk_math import double_spans, level_pairs
from .._triton.delta import chunk_of, forward, load_heads, load_rows, solve_systems, store_head, store_heads
from .._triton.delta_sizes import Prepared, Rows, Sizes, dense, serves
from .._triton.delta_step import recurrent
from .._triton.launch import launch
from .triton_gate import gated


@triton.jit
def halves(inside, behind, s):
    """For pairs of level s: decays of the upper token from the middle between the two, and of the lower one up to it.

    Their product is the decay from the one to the other. Rows that are not upper, or not lower, are 0.
    """
    is_upper = (tl.arange(0, inside.shape[0]) & s)[:, None] != 0
    return tl.where(is_upper, tl.exp(inside), 0.0), tl.where(is_upper, 0.0, tl.exp(behind))


@triton.jit
def _pairs(
    q, k, q_token, q_head, k_token, k_head, g, cu_seqlens, items, count, q_start, k_start, k_end, over, read, mix,
    q_factors, k_factors, scale, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Decayed rows and pairs, a chunk and a value head at a time. Rows are normalised by factors of their own."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        h = hv // (HV // H)
        here = first + j < eos
        by_q = tl.zeros((C, C), tl.float32)
        by_k = tl.zeros((C, C), tl.float32)
        diagonal = tl.zeros((C,), tl.float32)
        q_square = tl.zeros((C,), tl.float32)
        k_square = tl.zeros((C,), tl.float32)
        for row in tl.range(0, K, BK, disable_licm=True):
            x = row + tl.arange(0, BK)
            q_rows = load_rows(q, None, q_token, q_head, first, here, h, h, 1, x, K)
            k_rows = load_rows(k, None, k_token, k_head, first, here, h, h, 1, x, K)
            diagonal += tl.sum(q_rows * k_rows, 1)
            q_square += tl.sum(q_rows * q_rows, 1)
            k_square += tl.sum(k_rows * k_rows, 1)
            inside = load_heads(g, first, here, hv, HV, x, K)
            behind = tl.zeros((C, BK), tl.float32)
            for level in tl.range(0, LEVELS, disable_licm=True):
                up, low = halves(inside, behind, 1 << level)
                keys = tl.trans(k_rows * low)
                parted = level_pairs(1 << level, zero, C)
                by_q += tl.where(parted, tl.dot(q_rows * up, keys, input_precision=PRECISION), 0.0)
                by_k += tl.where(parted, tl.dot(k_rows * up, keys, input_precision=PRECISION), 0.0)
                inside, behind = double_spans(inside, behind, 1 << level)
            from_start = tl.exp(inside)
            store_heads(q_start, first, here, hv, HV, x, K, q_rows * from_start)
            store_heads(k_start, first, here, hv, HV, x, K, k_rows * from_start)
            store_heads(k_end, first, here, hv, HV, x, K, k_rows * tl.exp(behind))
            # The last row: tokens behind the sequence's end do not decay.
            over_chunk = tl.sum(tl.where((j == C - 1)[:, None], from_start, 0.0), 0)
            tl.store(over + (first * HV + hv) * K + x, over_chunk, x < K)
        q_factor = tl.zeros((C,), tl.float32) + scale
        k_factor = tl.zeros((C,), tl.float32) + 1.0
        if L2NORM:
            q_factor /= tl.sqrt(q_square + 1e-6)
            k_factor /= tl.sqrt(k_square + 1e-6)
        store_head(q_factors, first, here, hv, HV, q_factor)
        store_head(k_factors, first, here, hv, HV, k_factor)
        by_q += tl.where(j[:, None] + zero == j[None, :], diagonal[:, None], 0.0)
        store_heads(read, first, here, hv, HV, j, C, by_q * q_factor[:, None] * k_factor[None, :])
        store_heads(mix, first, here, hv, HV, j, C, by_k * k_factor[:, None] * k_factor[None, :])


def prepare(
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    l2norm: bool,
    for_backward: bool = False,
) -> Prepared:
    """Every chunk by itself: q, k ``[T, H, K]``, log-decays g fp32 ``[T, HV, K]``, beta fp32 ``[T, HV]``."""
    q_start, k_start, k_end, over = (torch.empty_like(g) for _ in range(4))
    q_factor, k_factor = torch.empty_like(beta), torch.empty_like(beta)
    read, mix = (g.new_empty((*beta.shape, sizes.chunk)) for _ in range(2))
    launch(
        _pairs, sizes.chunk_programs(q, sizes.value_heads), q, k, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        g, cu_seqlens, sizes.blocks.items, sizes.blocks.count, q_start, k_start, k_end, over, read, mix, q_factor,
        k_factor, float(scale), **sizes.constants, H=sizes.key_heads, LEVELS=sizes.chunk.bit_length() - 1,
        L2NORM=l2norm, num_warps=8, num_stages=1,
    )  # fmt: skip
    solve, solve_back = solve_systems(sizes, mix, beta, cu_seqlens, for_backward)
    return Prepared(
        Rows(q_start, q_factor, 1), Rows(k_start, k_factor, 1), Rows(k_end, k_factor, 1), over, read, mix, solve,
        q_factor, k_factor, solve_back,
    )  # fmt: skip


def kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    """The op of this name; see bindings/kda.cpp."""
    q, k, v = serves("kda_fwd", q, k, v)
    g, beta, a_log, dt_bias, initial_state = dense(g, beta, a_log, dt_bias, initial_state)
    sizes = Sizes.of(q, v, cu_seqlens)
    g = gated(sizes, g, a_log, dt_bias, lower_bound, cu_seqlens)
    prepared = prepare(sizes, q, k, g, beta, cu_seqlens, scale, l2norm)
    return forward(sizes, prepared, v, beta, cu_seqlens, initial_state, want_state)


def kda_recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    """The op of this name; see bindings/kda.cpp."""
    op = "kda_recurrent_fwd"
    q, k, v = serves(op, q, k, v)
    g, a_log, dt_bias = dense(g, a_log, dt_bias)
    if a_log is not None:
        g = gated(Sizes.of(q, v, cu_seqlens), g, a_log, dt_bias, lower_bound, cu_seqlens)
    return recurrent(op, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, want_state)
