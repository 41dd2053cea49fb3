"""The delta rules in chunks, backward: what _triton/delta.py does, in reverse. Gradients of tiles begin with d_."""

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta import (
    chunk_of,
    load_head,
    load_heads,
    load_over,
    load_rows,
    load_state,
    load_states,
    store_head,
    store_heads,
    store_states,
    walk,
)
from .delta_sizes import Prepared, Sizes, states_or
from .launch import launch, padded


@triton.jit
def _read_back(
    read, dout, cu_seqlens, items, count, d_written, HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P^T dO, the part of the gradient of B Z that no state has to do with, a chunk and BV columns at a time."""
    columns: tl.constexpr = (V + BV - 1) // BV
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * (HV * columns), tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item // columns, HV, cu_seqlens, items, C)
        value = item % columns * BV + tl.arange(0, BV)
        here = first + j < eos
        pairs = tl.trans(load_heads(read, first, here, hv, HV, j, C))
        d_out = load_heads(dout, first, here, hv, HV, value, V)
        store_heads(d_written, first, here, hv, HV, value, V, tl.dot(pairs, d_out, input_precision=PRECISION))


@triton.jit
def _walk_back(
    q_start, q_factors, q_token, q_head, k_start, start_factors, start_token, start_head, k_end, end_factors, end_token,
    end_head, over, solve_back, dout, d_written, beta, cu_seqlens, order, sequences, dfinal_state, d_states, d_right,
    dinitial_state, HV: tl.constexpr, ROW_GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a sequence's states in BV columns of one value head, from the last chunk back:

    dR = (I + B M)^-T (P^T dO + k_end dS);  dS = over dS + q_start^T dO - k_start^T B dR.
    """
    columns: tl.constexpr = (V + BV - 1) // BV
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(sequences) * (HV * columns), tl.num_programs(0), disable_licm=True):
        n = tl.load(order + item // (HV * columns)).to(tl.int64)
        hv = item // columns % HV
        head = hv // ROW_GROUP
        value = item % columns * BV + tl.arange(0, BV)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
        d_state = load_states(dfinal_state, n, hv, HV, K, value, V, BK)
        chunks = (eos - bos + C - 1) // C
        for back in tl.range(1, chunks + 1, disable_licm=True):
            first = bos + (chunks - back) * C
            here = first + j < eos
            if back > 1:
                store_states(d_states, first // C + 1, hv, HV, K, value, V, BK, d_state)
            by_written = load_heads(d_written, first, here, hv, HV, value, V)
            for row in tl.static_range(0, K, BK):
                k = row + tl.arange(0, BK)
                rows = load_rows(k_end, end_factors, end_token, end_head, first, here, head, hv, HV, k, K)
                by_written = tl.dot(rows, d_state[row // BK], by_written, input_precision=PRECISION)
            inverse = tl.trans(load_heads(solve_back, first, here, hv, HV, j, C))
            d_z = tl.dot(inverse, by_written, input_precision=PRECISION)
            store_heads(d_right, first, here, hv, HV, value, V, d_z)
            d_z *= -load_head(beta, first, here, hv, HV)[:, None]
            d_out = load_heads(dout, first, here, hv, HV, value, V)
            before = ()
            for row in tl.static_range(0, K, BK):
                k = row + tl.arange(0, BK)
                kept = load_over(over, first, hv, HV, k, K, PER_CHANNEL) * d_state[row // BK]
                rows = load_rows(k_start, start_factors, start_token, start_head, first, here, head, hv, HV, k, K)
                kept = tl.dot(tl.trans(rows), d_z, kept, input_precision=PRECISION)
                rows = load_rows(q_start, q_factors, q_token, q_head, first, here, head, hv, HV, k, K)
                before += (tl.dot(tl.trans(rows), d_out, kept, input_precision=PRECISION),)
            d_state = before
        if dinitial_state is not None:
            store_states(dinitial_state, n, hv, HV, K, value, V, BK, d_state)


@triton.jit
def _pair_gradients(
    dout, d_right, corrections, beta, cu_seqlens, items, count, d_read, d_mix, dbeta, dv, HV: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dP = dO X^T, dM = -dV X^T, dbeta_i = dR_i . Z_i, dV = B dR, where X = B Z, a chunk and value head at a time."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        here = first + j < eos
        strength = load_head(beta, first, here, hv, HV)
        by_read = tl.zeros((C, C), tl.float32)
        by_mix = tl.zeros((C, C), tl.float32)
        by_beta = tl.zeros((C,), tl.float32)
        for at in tl.range(0, V, BV, disable_licm=True):
            value = at + tl.arange(0, BV)
            d_z = load_heads(d_right, first, here, hv, HV, value, V)
            z = load_heads(corrections, first, here, hv, HV, value, V)
            by_beta += tl.sum(d_z * z, 1)
            d_z *= strength[:, None]
            store_heads(dv, first, here, hv, HV, value, V, d_z)
            written = tl.trans(z * strength[:, None])
            d_out = load_heads(dout, first, here, hv, HV, value, V)
            by_read = tl.dot(d_out, written, by_read, input_precision=PRECISION)
            by_mix -= tl.dot(d_z, written, input_precision=PRECISION)
        i = j[:, None] + zero
        store_heads(d_read, first, here, hv, HV, j, C, tl.where(i >= j[None, :], by_read, 0.0))
        store_heads(d_mix, first, here, hv, HV, j, C, tl.where(i > j[None, :], by_mix, 0.0))
        store_head(dbeta, first, here, hv, HV, by_beta)


@triton.jit
def _row_gradients(
    dout, d_right, corrections, beta, over, initial_state, states, dfinal_state, d_states, cu_seqlens, items, count,
    d_q_start, d_k_start, d_k_end, d_over, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of decayed rows, dO S^T, -dV S^T and X dS^T, and of the exponents of the decay over the chunk."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        here = first + j < eos
        strength = load_head(beta, first, here, hv, HV)[:, None]
        over_chunk = 0.0
        for row in tl.range(0, K, BK, disable_licm=True):
            k = row + tl.arange(0, BK)
            by_q = tl.zeros((C, BK), tl.float32)
            by_start = tl.zeros((C, BK), tl.float32)
            by_end = tl.zeros((C, BK), tl.float32)
            by_over = tl.zeros((BK,), tl.float32)
            for at in tl.range(0, V, BV, disable_licm=True):
                value = at + tl.arange(0, BV)
                state = load_state(initial_state, states, n, first > bos, first // C, hv, HV, k, K, value, V)
                d_state = load_state(
                    dfinal_state, d_states, n, first + C < eos, first // C + 1, hv, HV, k, K, value, V
                )
                by_over += tl.sum(state * d_state, 1)
                state = tl.trans(state)
                d_out = load_heads(dout, first, here, hv, HV, value, V)
                by_q = tl.dot(d_out, state, by_q, input_precision=PRECISION)
                d_z = load_heads(d_right, first, here, hv, HV, value, V) * strength
                by_start -= tl.dot(d_z, state, input_precision=PRECISION)
                written = load_heads(corrections, first, here, hv, HV, value, V) * strength
                by_end = tl.dot(written, tl.trans(d_state), by_end, input_precision=PRECISION)
            store_heads(d_q_start, first, here, hv, HV, k, K, by_q)
            store_heads(d_k_start, first, here, hv, HV, k, K, by_start)
            store_heads(d_k_end, first, here, hv, HV, k, K, by_end)
            at_first = first * HV + hv
            if PER_CHANNEL:
                by_over *= tl.load(over + at_first * K + k, k < K, 0.0)
                tl.store(d_over + at_first * K + k, by_over, k < K)
            else:
                over_chunk += tl.sum(by_over, 0)
        if not PER_CHANNEL:
            tl.store(d_over + first * HV + hv, over_chunk * tl.load(over + first * HV + hv))


@triton.jit
def _finish_rows(
    x, x_token, x_head, parts, cu_seqlens, items, count, dx, scale, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """From gradients of the rows scale x / |x| of each value head, summed in their order, to those of x."""
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * H, tl.num_programs(0), disable_licm=True):
        h, n, first, eos, zero = chunk_of(item, H, cu_seqlens, items, C)
        here = first + j < eos
        square = tl.zeros((C,), tl.float32)
        along = tl.zeros((C,), tl.float32)
        if L2NORM:
            for row in tl.range(0, K, BK, disable_licm=True):
                k = row + tl.arange(0, BK)
                rows = load_rows(x, None, x_token, x_head, first, here, h, h, 1, k, K)
                square += tl.sum(rows * rows, 1)
                along += tl.sum(rows * _sum_of_group(parts, first, here, h, HV, H, k, K), 1)
        inverse = 1.0 / tl.sqrt(square + 1e-6) if L2NORM else 1.0 + square
        for row in tl.range(0, K, BK, disable_licm=True):
            k = row + tl.arange(0, BK)
            d_rows = _sum_of_group(parts, first, here, h, HV, H, k, K)
            if L2NORM:
                rows = load_rows(x, None, x_token, x_head, first, here, h, h, 1, k, K)
                d_rows -= (rows * inverse[:, None]) * (along * inverse)[:, None]
            store_heads(dx, first, here, h, H, k, K, d_rows * (inverse * scale)[:, None])


@triton.jit
def _sum_of_group(parts, first, here, h, HV: tl.constexpr, H: tl.constexpr, k, K: tl.constexpr):
    total = load_heads(parts, first, here, h * (HV // H), HV, k, K)
    for hv in range(h * (HV // H) + 1, (h + 1) * (HV // H)):
        total += load_heads(parts, first, here, hv, HV, k, K)
    return total


@dataclass(frozen=True)
class Gradients:
    """What the backward passes of both rules start from: gradients of :class:`Prepared` and those that are done.

    Attributes:
        read, mix: of P and M, fp32 ``[T, HV, C]``.
        q_start, k_start, k_end: of the decayed rows, fp32 ``[T, HV, K]``.
        over: of the exponents of ``Prepared.over``, in its shape.
        v, beta: results, of tokens of sequences.
        initial_state: result, or None.
    """

    read: Tensor
    mix: Tensor
    q_start: Tensor
    k_start: Tensor
    k_end: Tensor
    over: Tensor
    v: Tensor
    beta: Tensor
    initial_state: Optional[Tensor]


def backward(
    sizes: Sizes,
    prepared: Prepared,
    dout: Tensor,
    dfinal_state: Optional[Tensor],
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
) -> Gradients:
    """Runs the states forward again, then their gradients back, then every chunk by itself."""
    states, corrections = walk(sizes, prepared, v, beta, cu_seqlens, initial_state, None)
    d_states, d_written, d_right = sizes.states(v), torch.empty_like(corrections), torch.empty_like(corrections)
    blocks = (cu_seqlens, sizes.blocks.items, sizes.blocks.count)
    columns = dict(BV=16, num_stages=1)
    square = dict(HV=sizes.value_heads, V=sizes.value_dim, C=sizes.chunk, PRECISION=sizes.precision)
    programs = sizes.chunk_programs(v, sizes.value_heads)
    launch(_read_back, programs, prepared.read, dout, *blocks, d_written, **square, **columns, num_warps=4)
    dinitial_state = None if initial_state is None else states_or(dfinal_state, sizes.state_shape, v)
    per_channel = prepared.over.dim() == 3
    launch(
        _walk_back, sizes.walk_programs(v), *prepared.q_start.arguments, *prepared.k_start.arguments,
        *prepared.k_end.arguments, prepared.over, prepared.solve_back, dout, d_written, beta, cu_seqlens,
        sizes.order, sizes.sequences, dfinal_state, d_states, d_right, dinitial_state,
        **sizes.walk_back_constants, ROW_GROUP=prepared.q_start.group, PER_CHANNEL=per_channel,
    )  # fmt: skip
    d_read, d_mix = torch.empty_like(prepared.read), torch.empty_like(prepared.read)
    dbeta, dv = torch.empty_like(beta), v.new_empty(v.shape)
    launch(
        _pair_gradients, programs, dout, d_right, corrections, beta, *blocks, d_read, d_mix, dbeta, dv, **square,
        **columns, num_warps=sizes.chunk // 8,
    )  # fmt: skip
    shape = (*beta.shape, sizes.key_dim)
    d_q_start, d_k_start, d_k_end = (beta.new_empty(shape) for _ in range(3))
    d_over = torch.empty_like(prepared.over)
    launch(
        _row_gradients, programs, dout, d_right, corrections, beta, prepared.over, initial_state, states, dfinal_state,
        d_states, *blocks, d_q_start, d_k_start, d_k_end, d_over, **sizes.constants, **columns,
        PER_CHANNEL=per_channel, num_warps=8,
    )  # fmt: skip
    return Gradients(d_read, d_mix, d_q_start, d_k_start, d_k_end, d_over, dv, dbeta, dinitial_state)


def finish_rows(
    sizes: Sizes, x: Tensor, parts: Tensor, cu_seqlens: Tensor, scale: float, l2norm: bool
) -> Tensor:
    """The gradient of q or k ``[T, H, K]`` from those of its rows, normalised and scaled: ``parts`` ``[T, HV, K]``.

    Of tokens of sequences, as all that comes from here.
    """
    dx = x.new_empty(x.shape)
    launch(
        _finish_rows, sizes.chunk_programs(x, sizes.key_heads), x, x.stride(0), x.stride(1), parts, cu_seqlens,
        sizes.blocks.items, sizes.blocks.count, dx, float(scale), HV=sizes.value_heads, H=sizes.key_heads,
        K=sizes.key_dim, C=sizes.chunk, BK=min(32, padded(sizes.key_dim)), L2NORM=l2norm, num_warps=4,
    )  # fmt: skip
    return dx

