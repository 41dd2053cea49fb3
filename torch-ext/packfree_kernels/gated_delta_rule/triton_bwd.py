"""Gated delta rule on a GPU, backward: that of _triton/delta_bwd.py, then back through the decays."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.chunk_math import decay_between
from .._triton.delta import chunk_of, load_head, load_heads, load_rows, store_head, store_heads
from .._triton.delta_bwd import backward, finish_rows
from .._triton.delta_sizes import Sizes, dense, serves
from .._triton.launch import launch
from .._triton.padding import clear_padding
from .triton_fwd import prepare


@triton.jit
def _take_decay(
    g, read, mix, d_read, d_mix, cu_seqlens, items, count, d_qk, d_kk, d_pairs, HV: tl.constexpr, C: tl.constexpr
):
    """From gradients of P and M to those of q k^T, k k^T and the exponents between, a chunk and value head at a time.

    Of the latter only what they give to each dg_t: the sum over j < t <= i, by column sums from the last row up, then
    along the row, so that no pair is added and taken away again.
    """
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        i = j[:, None] + zero
        here = first + j < eos
        decay = decay_between(load_head(g, first, here, hv, HV), zero, C)
        by_read = load_heads(d_read, first, here, hv, HV, j, C)
        store_heads(d_qk, first, here, hv, HV, j, C, by_read * decay)
        pairs = by_read * load_heads(read, first, here, hv, HV, j, C)
        by_mix = load_heads(d_mix, first, here, hv, HV, j, C)
        store_heads(d_kk, first, here, hv, HV, j, C, by_mix * decay)
        pairs += by_mix * load_heads(mix, first, here, hv, HV, j, C)
        spanned = tl.cumsum(tl.where(i > j[None, :], pairs, 0.0), 0, reverse=True)
        store_head(d_pairs, first, here, hv, HV, tl.sum(tl.where(i > j[None, :], spanned, 0.0), 1))


@triton.jit
def _row_and_decay_gradients(
    q, k, q_token, q_head, k_token, k_head, q_factors, k_factors, g, d_qk, d_kk, d_pairs, d_q_start, d_k_start, d_k_end,
    d_over, cu_seqlens, items, count, d_q, d_k, dg, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of normalised rows and of log-decays, a chunk and a value head at a time."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        h = hv // (HV // H)
        here = first + j < eos
        from_start = tl.exp(tl.cumsum(load_head(g, first, here, hv, HV), 0))
        # Behind each token, all that follow it: no difference of running sums.
        follows = load_head(g, first + 1, (j + 1 < C) & (first + j + 1 < eos), hv, HV)
        to_end = tl.exp(tl.cumsum(follows, 0, reverse=True))
        by_start = tl.zeros((C,), tl.float32)
        by_end = tl.zeros((C,), tl.float32)
        for row in tl.range(0, K, BK, disable_licm=True):
            x = row + tl.arange(0, BK)
            q_rows = load_rows(q, q_factors, q_token, q_head, first, here, h, h, H, x, K)
            k_rows = load_rows(k, k_factors, k_token, k_head, first, here, h, h, H, x, K)
            pairs = load_heads(d_qk, first, here, hv, HV, j, C)
            d_rows = load_heads(d_q_start, first, here, hv, HV, x, K) * from_start[:, None]
            by_start += tl.sum(d_rows * q_rows, 1)
            d_rows = tl.dot(pairs, k_rows, d_rows, input_precision=PRECISION)
            store_heads(d_q, first, here, hv, HV, x, K, d_rows)
            end_rows = load_heads(d_k_end, first, here, hv, HV, x, K) * to_end[:, None]
            by_end += tl.sum(end_rows * k_rows, 1)
            d_rows = load_heads(d_k_start, first, here, hv, HV, x, K) * from_start[:, None]
            by_start += tl.sum(d_rows * k_rows, 1)
            d_rows = tl.dot(tl.trans(pairs), q_rows, d_rows + end_rows, input_precision=PRECISION)
            pairs = load_heads(d_kk, first, here, hv, HV, j, C)
            d_rows = tl.dot(pairs + tl.trans(pairs), k_rows, d_rows, input_precision=PRECISION)
            store_heads(d_k, first, here, hv, HV, x, K, d_rows)
        # What begins before token t and leads to the end, what begins with the chunk and ends at t or later.
        total = load_head(d_pairs, first, here, hv, HV) + tl.load(d_over + first * HV + hv)
        total += tl.sum(tl.where(j[:, None] + zero < j[None, :], by_end[:, None], by_start[:, None]), 0)
        store_head(dg, first, here, hv, HV, total)


def gated_delta_rule_bwd(
    dout: Tensor,
    dfinal_state: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    scale: float,
    l2norm: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op of this name; see bindings/gated_delta_rule.cpp."""
    q, k, v = serves("gated_delta_rule_bwd", q, k, v)
    dout, g, beta, dfinal_state, initial_state = dense(dout, g, beta, dfinal_state, initial_state)
    sizes = Sizes.of(q, v, cu_seqlens)
    prepared = prepare(sizes, q, k, g, beta, cu_seqlens, scale, l2norm, for_backward=True)
    d = backward(sizes, prepared, dout, dfinal_state, v, beta, cu_seqlens, initial_state)
    programs, blocks = sizes.chunk_programs(q, sizes.value_heads), (cu_seqlens, sizes.blocks.items, sizes.blocks.count)
    d_qk, d_kk, d_pairs = torch.empty_like(d.read), torch.empty_like(d.mix), torch.empty_like(g)
    launch(
        _take_decay, programs, g, prepared.read, prepared.mix, d.read, d.mix, *blocks, d_qk, d_kk, d_pairs,
        HV=sizes.value_heads, C=sizes.chunk, num_warps=8, num_stages=1,
    )  # fmt: skip
    d_q, d_k, dg = torch.empty_like(d.q_start), torch.empty_like(d.q_start), torch.empty_like(g)
    launch(
        _row_and_decay_gradients, programs, q, k, q.stride(0), q.stride(1), k.stride(0), k.stride(1), prepared.q_factor,
        prepared.k_factor, g, d_qk, d_kk, d_pairs, d.q_start, d.k_start, d.k_end, d.over, *blocks, d_q, d_k, dg,
        **dict(sizes.constants, BK=16), H=sizes.key_heads, num_warps=4, num_stages=1,
    )  # fmt: skip
    dq = finish_rows(sizes, q, d_q, cu_seqlens, scale, l2norm)
    dk = finish_rows(sizes, k, d_k, cu_seqlens, 1.0, l2norm)
    clear_padding(cu_seqlens, dq, dk, d.v, dg, d.beta)
    return dq, dk, d.v, dg, d.beta, g.new_empty((0,)) if d.initial_state is None else d.initial_state
