"""Kimi delta attention on a GPU, backward: that of _triton/delta_bwd.py, then back through the decays."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.chunk_math import double_spans, level_pairs
from .._triton.delta import chunk_of, load_heads, load_rows, store_heads
from .._triton.delta_bwd import backward, finish_rows
from .._triton.delta_sizes import Sizes, dense, serves
from .._triton.launch import launch
from .._triton.padding import clear_padding
from .triton_fwd import halves, prepare
from .triton_gate import gate_gradients, gated


@triton.jit
def _spanning(d_sums, is_inside, s, zero, C: tl.constexpr, PRECISION: tl.constexpr):
    """What gradients of sums over blocks of s tokens (see double_spans) give to each of their terms.

    ``is_inside`` [1, C] tells which sums end at their own token; the others begin behind it. A product with a matrix of
    0 and 1: only sums that span a term are added, and none is taken away again.
    """
    term = tl.arange(0, C)[:, None] + zero
    i = tl.arange(0, C)[None, :]
    spans = ((term ^ i) < s) & (is_inside == (i >= term))
    return tl.dot(tl.where(spans, 1.0, 0.0), d_sums, input_precision=PRECISION)


@triton.jit
def _side_gradients(
    rows, row_token, row_head, row_factors, k, k_token, k_head, k_factors, g, d_pairs, d_start, d_k_end, d_over,
    d_k_before, dg_before, cu_seqlens, items, count, d_rows, d_k, dg, HV: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What P gives to the gradients of normalised rows of q and k and of log-decays, or what M gives to those of k.

    A chunk, a value head and BK channels at a time. The rows that the pairs decay up to are ``rows`` for P, which are
    those of q, and ``d_rows`` their gradients. M has those of k on both sides and neither of the two: both sides add to
    ``d_k``, and so do the rows of k at the chunk's end and what P gave before.
    """
    columns: tl.constexpr = (K + BK - 1) // BK
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * (HV * columns), tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item // columns, HV, cu_seqlens, items, C)
        h = hv // (HV // H)
        x = item % columns * BK + tl.arange(0, BK)
        here = first + j < eos
        k_rows = load_rows(k, k_factors, k_token, k_head, first, here, h, hv, HV, x, K)
        if rows is not None:
            up_rows = load_rows(rows, row_factors, row_token, row_head, first, here, h, hv, HV, x, K)
            # The diagonal of P has no decay; that of M is 0.
            diagonal = tl.load(d_pairs + (first * HV + hv) * C + j * (HV * C + 1), here, 0.0)[:, None]
            by_up = diagonal * k_rows
            by_low = diagonal * up_rows
        else:
            up_rows = k_rows
            by_up = tl.zeros((C, BK), tl.float32)
            by_low = tl.zeros((C, BK), tl.float32)
        by_g = tl.zeros((C, BK), tl.float32)
        inside = load_heads(g, first, here, hv, HV, x, K)
        behind = tl.zeros((C, BK), tl.float32)
        for level in tl.range(0, LEVELS, disable_licm=True):
            s = 1 << level
            up, low = halves(inside, behind, s)
            pairs = tl.where(level_pairs(s, zero, C), load_heads(d_pairs, first, here, hv, HV, j, C), 0.0)
            d_up = tl.dot(pairs, k_rows * low, input_precision=PRECISION) * up
            d_low = tl.dot(tl.trans(pairs), up_rows * up, input_precision=PRECISION) * low
            by_up += d_up
            by_low += d_low
            by_g += _spanning(up_rows * d_up + k_rows * d_low, (j & s)[None, :] != 0, s, zero, C, PRECISION)
            inside, behind = double_spans(inside, behind, s)
        d_part = load_heads(d_start, first, here, hv, HV, x, K) * tl.exp(inside)
        by_up += d_part
        by_g += _spanning(d_part * up_rows, j[None, :] >= 0, C, zero, C, PRECISION)
        if d_rows is not None:
            store_heads(d_rows, first, here, hv, HV, x, K, by_up)
        else:
            d_part = load_heads(d_k_end, first, here, hv, HV, x, K) * tl.exp(behind)
            by_g += _spanning(d_part * k_rows, j[None, :] < 0, C, zero, C, PRECISION)
            by_low += by_up + d_part + load_heads(d_k_before, first, here, hv, HV, x, K)
            by_g += tl.load(d_over + (first * HV + hv) * K + x, x < K, 0.0)[None, :]
            by_g += load_heads(dg_before, first, here, hv, HV, x, K)
        store_heads(d_k, first, here, hv, HV, x, K, by_low)
        store_heads(dg, first, here, hv, HV, x, K, by_g)


def kda_bwd(
    dout: Tensor,
    dfinal_state: Optional[Tensor],
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
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op of this name; see bindings/kda.cpp."""
    q, k, v = serves("kda_bwd", q, k, v)
    dout, g, beta, a_log, dt_bias = dense(dout, g, beta, a_log, dt_bias)
    dfinal_state, initial_state = dense(dfinal_state, initial_state)
    sizes = Sizes.of(q, v, cu_seqlens)
    log_decay = gated(sizes, g, a_log, dt_bias, lower_bound, cu_seqlens)
    prepared = prepare(sizes, q, k, log_decay, beta, cu_seqlens, scale, l2norm, for_backward=True)
    d = backward(sizes, prepared, dout, dfinal_state, v, beta, cu_seqlens, initial_state)
    d_q, d_k_by_read, d_k, dg_by_read = (torch.empty_like(g) for _ in range(4))
    d_log_decay = torch.empty_like(g)
    keys = (k, k.stride(0), k.stride(1), prepared.k_factor)
    behind = (cu_seqlens, sizes.blocks.items, sizes.blocks.count)
    for side in (
        (q, q.stride(0), q.stride(1), prepared.q_factor, *keys, log_decay, d.read, d.q_start, None, None, None, None,
         *behind, d_q, d_k_by_read, dg_by_read),
        (None, 0, 0, None, *keys, log_decay, d.mix, d.k_start, d.k_end, d.over, d_k_by_read, dg_by_read,
         *behind, None, d_k, d_log_decay),
    ):  # fmt: skip
        launch(
            _side_gradients, sizes.chunk_programs(q, sizes.value_heads, triton.cdiv(sizes.key_dim, 16)), *side,
            **dict(sizes.constants, BK=16), H=sizes.key_heads, LEVELS=sizes.chunk.bit_length() - 1, num_warps=8,
            num_stages=1,
        )  # fmt: skip
    dg, d_rates = gate_gradients(sizes, g, a_log, dt_bias, lower_bound, cu_seqlens, d_log_decay)
    dq = finish_rows(sizes, q, d_q, cu_seqlens, scale, l2norm)
    dk = finish_rows(sizes, k, d_k, cu_seqlens, 1.0, l2norm)
    clear_padding(cu_seqlens, dq, dk, d.v, dg, d.beta, d_rates)
    # Sums over tokens are torch's, whose order is fixed by the shape.
    da_log = d_rates if a_log is None else d_rates.sum(0)
    ddt_bias = g.new_empty((0,)) if a_log is None or dt_bias is None else dg.sum(0)
    dinitial_state = g.new_empty((0,)) if d.initial_state is None else d.initial_state
    return dq, dk, d.v, dg, d.beta, da_log, ddt_bias, dinitial_state
