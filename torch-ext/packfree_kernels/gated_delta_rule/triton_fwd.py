"""Gated delta rule on a GPU, forward: chunks prepared side by side, then what _triton/delta.py does with them."""

from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from .._triton.chunk_math import decay_between
from .._triton.delta import chunk_of, forward, load_head, load_rows, solve_systems, store_head, store_heads
from .._triton.delta_sizes import Prepared, Rows, Sizes, dense, serves
from .._triton.delta_step import recurrent
from .._triton.launch import launch


@triton.jit
def key_products(
    q, k, q_token, q_head, k_token, k_head, first, here, head, scale, K: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q k^T and k k^T [C, C] of rows that are normalised and scaled, and the factors [C] that make them so."""
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    q_square = tl.zeros((C,), tl.float32)
    k_square = tl.zeros((C,), tl.float32)
    for at in tl.range(0, K, BK, disable_licm=True):
        channel = at + tl.arange(0, BK)
        q_rows = load_rows(q, None, q_token, q_head, first, here, head, head, 1, channel, K)
        k_rows = load_rows(k, None, k_token, k_head, first, here, head, head, 1, channel, K)
        transposed = tl.trans(k_rows)
        qk += tl.dot(q_rows, transposed, input_precision=PRECISION)
        kk += tl.dot(k_rows, transposed, input_precision=PRECISION)
        q_square += tl.sum(q_rows * q_rows, 1)
        k_square += tl.sum(k_rows * k_rows, 1)
    q_factor = tl.zeros((C,), tl.float32) + scale
    k_factor = tl.zeros((C,), tl.float32) + 1.0
    if L2NORM:
        q_factor /= tl.sqrt(q_square + 1e-6)
        k_factor /= tl.sqrt(k_square + 1e-6)
    return qk * q_factor[:, None] * k_factor[None, :], kk * k_factor[:, None] * k_factor[None, :], q_factor, k_factor


@triton.jit
def _pairs(
    q, k, q_token, q_head, k_token, k_head, g, beta, cu_seqlens, items, count, q_start, k_start, k_end, over, read,
    mix, q_factors, k_factors, scale, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Decays and pairs, a chunk and a key head with its value heads at a time."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * H, tl.num_programs(0), disable_licm=True):
        h, n, first, eos, zero = chunk_of(item, H, cu_seqlens, items, C)
        here = first + j < eos
        qk, kk, q_factor, k_factor = key_products(
            q, k, q_token, q_head, k_token, k_head, first, here, h, scale, K, C, BK, L2NORM, PRECISION
        )
        store_head(q_factors, first, here, h, H, q_factor)
        store_head(k_factors, first, here, h, H, k_factor)
        for hv in range(h * (HV // H), (h + 1) * (HV // H)):
            log_decay = load_head(g, first, here, hv, HV)
            decay = decay_between(log_decay, zero, C)
            from_start = tl.exp(tl.cumsum(log_decay, 0))
            # The last row: tokens behind the sequence's end do not decay.
            to_end = tl.sum(tl.where((j + zero == C - 1)[:, None], decay, 0.0), 0)
            tl.store(over + first * HV + hv, tl.sum(tl.where(j == C - 1, from_start, 0.0), 0))
            store_head(q_start, first, here, hv, HV, q_factor * from_start)
            store_head(k_start, first, here, hv, HV, k_factor * from_start)
            store_head(k_end, first, here, hv, HV, k_factor * to_end)
            store_heads(read, first, here, hv, HV, j, C, qk * decay)
            store_heads(mix, first, here, hv, HV, j, C, tl.where(j[:, None] + zero > j[None, :], kk * decay, 0.0))


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
    """Every chunk by itself: q, k ``[T, H, K]``, g, beta fp32 ``[T, HV]``."""
    q_start, k_start, k_end, over = (g.new_empty(g.shape) for _ in range(4))
    q_factor, k_factor = (g.new_empty(q.shape[:2]) for _ in range(2))
    shape = (*g.shape, sizes.chunk)
    read, mix = g.new_empty(shape), g.new_empty(shape)
    launch(
        _pairs, sizes.chunk_programs(q, sizes.key_heads), q, k, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        g, beta, cu_seqlens, sizes.blocks.items, sizes.blocks.count, q_start, k_start, k_end, over, read, mix,
        q_factor, k_factor, float(scale), **sizes.constants, H=sizes.key_heads, L2NORM=l2norm,
        num_warps=sizes.chunk // 4, num_stages=1,
    )  # fmt: skip
    solve, solve_back = solve_systems(sizes, mix, beta, cu_seqlens, for_backward)
    group = sizes.value_heads // sizes.key_heads
    return Prepared(
        Rows(q, q_start, group), Rows(k, k_start, group), Rows(k, k_end, group), over, read, mix, solve,
        q_factor, k_factor, solve_back,
    )  # fmt: skip


def gated_delta_rule_fwd(
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
    """The op of this name; see bindings/gated_delta_rule.cpp."""
    q, k, v = serves("gated_delta_rule_fwd", q, k, v)
    g, beta, initial_state = dense(g, beta, initial_state)
    sizes = Sizes.of(q, v, cu_seqlens)
    prepared = prepare(sizes, q, k, g, beta, cu_seqlens, scale, l2norm)
    return forward(sizes, prepared, v, beta, cu_seqlens, initial_state, want_state)


def gated_delta_rule_recurrent_fwd(
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
    """The op of this name; see bindings/gated_delta_rule.cpp."""
    op = "gated_delta_rule_recurrent_fwd"
    return recurrent(op, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, want_state)
