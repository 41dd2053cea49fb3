"""Backward: probabilities are recomputed from lse, block by block, so nothing of size T^2 is kept."""

from typing import Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.attention import (
    LOG2E,
    Call,
    Rows,
    check_served,
    contiguous_rows,
    dropout_keep,
    dropout_seed,
    dropout_streams,
    is_roomy,
    key_blocks,
    listed_keys,
    load_rows,
    store_rows,
    tanh,
    tile,
    tile_rows,
    visible_keys,
)
from .._triton.launch import Target, dot_precision, launch, padded, programs, target
from .._triton.work import cut_into_blocks

# For kernels of 8 warps that ptxas would rather spill than give a thread more than 128 registers, so that two blocks of
# them fit.
ALL_REGISTERS = dict(maxnreg=255)


def query_tile(on: Target, dims: int, bytes_each: int, dropout: bool) -> Dict[str, int]:
    """The tile of the kernel for dq; see ``forward_tile``."""
    wide = dims > 128
    if not is_roomy(on):
        return tile(16 if bytes_each == 4 else 32, 16 if bytes_each == 4 else 32, 4, 1)
    if bytes_each == 4:
        if wide:
            return dict(tile(32, 16, 8, 2), **(ALL_REGISTERS if on.arch < 90 else {}))
        return tile(32, 16 if on.arch >= 100 and dims > 64 else 32, 8, 2)
    if dropout:
        return tile(32, 32, 4 if wide and on.arch >= 100 else 8, 2)
    if on.arch < 90:
        return tile(64, 32 if wide else 64, 8, 2)
    if wide:
        return dict(tile(32, 64, 8, 2), **ALL_REGISTERS)
    return tile(128 if dims <= 64 or on.arch < 100 else 64, 64, 8, 2)


def key_tile(on: Target, dims: int, bytes_each: int, dropout: bool) -> Dict[str, int]:
    """The tile of the kernel for dk and dv; see ``forward_tile``."""
    wide = dims > 128
    if not is_roomy(on):
        return tile(16 if bytes_each == 4 or wide else 32, 16 if bytes_each == 4 else 32, 4, 1)
    if bytes_each == 4 and on.arch < 90:
        return tile(16 if dims > 64 else 32, 16 if wide else 32, 8, 2)
    if bytes_each == 4:
        return tile(16 if wide else 32, 32, 8, 2)
    if dropout:
        return tile(32, 32 if wide else 64, 8, 2)
    if wide:
        return tile(64 if on.arch >= 90 else 32, 32, 8, 2)
    return tile(64, 128, 8, 2) if dims <= 64 and on.arch >= 90 else tile(32, 64, 8, 2)


def flash_attn_varlen_bwd(
    dout: Tensor,
    dlse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    s_aux: Optional[Tensor],
    seed: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    ranges: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    check_served("flash_attn_varlen_bwd", q, v)
    dout, q, k, v, out = (contiguous_rows(x) for x in (dout, q, k, v, out))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    (tokens, heads, key_dim), (keys, kv_heads, value_dim) = q.shape, v.shape
    sequences = cu_seqlens_q.shape[0] - 1
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    call = Call.of(q, k, dropout_p, softmax_scale, window_left, window_right, softcap)
    dims = padded(key_dim), padded(value_dim)
    seed = dropout_seed(seed, dropout_p)
    numbers = (call.inner, call.outer, call.left, call.right, call.threshold, call.keep_scale)
    constants = dict(
        K=key_dim, V=value_dim, BK=dims[0], BV=dims[1], SOFTCAP=softcap > 0, PRECISION=dot_precision(q)
    )
    strides = [stride for x in (dout, q, k, v) for stride in x.stride()[:2]]

    # First dq, which leaves delta for the other.
    kind = (target(q), max(dims), q.element_size(), dropout_p > 0)
    shape = query_tile(*kind)
    rows = Rows(shape.pop("BM"), heads // kv_heads)
    blocks = cut_into_blocks(cu_seqlens_q, tokens, rows.tokens, padding=True)
    launch(
        _backward_queries, programs(q, blocks.most * kv_heads * rows.chunks, 8),
        dout, dlse, q, k, v, out, lse, delta, dq, cu_seqlens_q, cu_seqlens_k, ranges, seed, blocks.items, blocks.count,
        sequences, tokens, *out.stride()[:2], *strides, *numbers, float(softmax_scale), kv_heads,
        **rows.constants, **constants, **shape,
    )  # fmt: skip
    shape = key_tile(*kind)
    rows = Rows(shape.pop("BM"), heads // kv_heads)
    blocks = cut_into_blocks(cu_seqlens_k, keys, shape["BN"], padding=True)
    seen_by = None
    if ranges is not None:
        seen_by = ranges.new_empty((blocks.most, 2))
        launch(
            _queries_of_blocks, programs(q, blocks.most, 8), ranges, seen_by, cu_seqlens_q, cu_seqlens_k, blocks.items,
            blocks.count, sequences, BN=shape["BN"], BT=1024, num_warps=4,
        )  # fmt: skip
    launch(
        _backward_keys, programs(q, blocks.most * kv_heads, 8),
        dout, q, k, v, lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, ranges, seen_by, seed, blocks.items,
        blocks.count, sequences, tokens, keys, *strides, *numbers, float(softmax_scale), kv_heads,
        **rows.constants, **constants, **shape,
    )  # fmt: skip
    return dq, dk, dv, _sink_gradient(s_aux, lse, delta)


def _sink_gradient(s_aux: Optional[Tensor], lse: Tensor, delta: Tensor) -> Tensor:
    """ds_aux ``[H]``: -sum over queries of P_sink delta, which is 0 on padding. Summed in double, in a fixed order."""
    if s_aux is None:
        return lse.new_empty((0,))
    return -(torch.exp(s_aux.unsqueeze(1) - lse) * delta).sum(1, dtype=torch.float64).to(lse.dtype)


@triton.jit
def _score_gradients(
    s, dp, log_sum, delta, keep, visible, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """P Z and dS of scores ``s`` and ``dp = dout v^T``; log_sum in units of log2 and delta broadcast against them."""
    slope = 1.0
    if SOFTCAP:
        s = tanh(s * inner)
        slope = 1 - s * s
    p = tl.exp2(s * outer - log_sum)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    kept = p
    if DROPOUT:
        kept = p * keep
        dp *= keep
    ds = p * (dp - delta) * slope
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return kept, ds


@triton.jit
def _add_to_queries(
    dq, q, dout, log_sum, delta, k, v, k_token, v_token, first, key_length, begin, end, streams, inner, outer,
    threshold, keep_scale, MASKED: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq += dS k for a block of keys."""
    key = first + tl.arange(0, BN)
    here = key < key_length if MASKED else key >= 0
    k_block = load_rows(k, key.to(tl.int64) * k_token, here, K, BK)
    v_block = load_rows(v, key.to(tl.int64) * v_token, here, V, BV)
    s = tl.dot(q, tl.trans(k_block), input_precision=PRECISION)
    dp = tl.dot(dout, tl.trans(v_block), input_precision=PRECISION)
    visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
    keep = s
    if DROPOUT:
        keep = dropout_keep(streams[:, None], key[None, :], threshold, keep_scale)
    _, ds = _score_gradients(
        s, dp, log_sum[:, None], delta[:, None], keep, visible, inner, outer, MASKED, SOFTCAP, DROPOUT
    )
    return tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "tokens", "left", "right", "threshold"])
def _backward_queries(
    dout, dlse, q, k, v, out, lse, delta, dq, cu_seqlens_q, cu_seqlens_k, ranges, seed, items, count, sequences, tokens,
    out_token, out_head, dout_token, dout_head, q_token, q_head, k_token, k_head, v_token, v_head,
    inner, outer, left, right, threshold, keep_scale, final_scale, kv_heads,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and delta of one tile of query rows after the other; mirrors the forward."""
    blocks = tl.load(count)
    for item in range(tl.program_id(0), blocks * (kv_heads * CHUNKS), tl.num_programs(0)):
        place = blocks - 1 - item % blocks
        kv_head = item // blocks // CHUNKS
        sequence, part = tl.load(items + 2 * place), tl.load(items + 2 * place + 1)
        live = sequence < sequences
        q_bos = tl.load(cu_seqlens_q + sequence)
        query_length = tl.load(cu_seqlens_q + sequence + 1, live, tokens) - q_bos
        k_bos = tl.load(cu_seqlens_k + sequence, live, 0)
        key_length = tl.load(cu_seqlens_k + sequence + 1, live, 0) - k_bos

        i, head, here = tile_rows(part, item // blocks % CHUNKS, query_length, BM, G, GROUP)
        head += kv_head * GROUP
        token = (q_bos + i).to(tl.int64)
        q_tile = load_rows(q, token * q_token + head.to(tl.int64) * q_head, here, K, BK)
        # Padding has neither output nor gradient, whatever stands there.
        seen = here & (i < tl.where(live, query_length, 0))
        dout_tile = load_rows(dout, token * dout_token + head.to(tl.int64) * dout_head, seen, V, BV)
        out_tile = load_rows(out, token * out_token + head.to(tl.int64) * out_head, seen, V, BV)
        center = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
        entry = head.to(tl.int64) * tokens + token
        if dlse is not None:
            center -= tl.load(dlse + entry, seen, 0.0)
        tl.store(delta + entry, center, here)
        # Rows that are none get probability 0.
        log_sum = tl.load(lse + entry, here, float("inf")) * LOG2E
        if ranges is not None:
            begin, end = listed_keys(ranges, token, seen, key_length)
        else:
            begin, end = visible_keys(i, query_length, key_length, left, right)
        streams = i
        if seed is not None:
            streams = dropout_streams(seed, sequence, head, i)

        low, whole, whole_end, high = key_blocks(
            ranges, begin, end, here, part, query_length, key_length, left, right, BM // G, BN
        )
        k_rows = k + k_bos.to(tl.int64) * k_token + kv_head.to(tl.int64) * k_head
        v_rows = v + k_bos.to(tl.int64) * v_token + kv_head.to(tl.int64) * v_head
        sum_dq = tl.zeros((BM, BK), tl.float32)
        for step in range(whole - low + high - whole_end):
            block = low + step + tl.where(step < whole - low, 0, whole_end - whole)
            sum_dq = _add_to_queries(
                sum_dq, q_tile, dout_tile, log_sum, center, k_rows, v_rows, k_token, v_token, block * BN, key_length,
                begin, end, streams, inner, outer, threshold, keep_scale, True, BN, K, V, BK, BV, SOFTCAP,
                seed is not None, PRECISION,
            )  # fmt: skip
        for block in range(whole, whole_end):
            sum_dq = _add_to_queries(
                sum_dq, q_tile, dout_tile, log_sum, center, k_rows, v_rows, k_token, v_token, block * BN, key_length,
                begin, end, streams, inner, outer, threshold, keep_scale, False, BN, K, V, BK, BV, SOFTCAP,
                seed is not None, PRECISION,
            )  # fmt: skip
        store_rows(dq, (token * (kv_heads * GROUP) + head) * K, here, sum_dq * final_scale, K, BK)


@triton.jit
def _add_to_keys(
    dk, dv, k, v, dout, q, lse, delta, dout_token, dout_head, q_token, q_head, part, chunk, q_bos, kv_head, tokens,
    query_length, key, key_length, left, right, ranges, seed, sequence, inner, outer, threshold, keep_scale,
    MASKED: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv += (P Z)^T dout, dk += dS^T q for a tile of query rows; scores are held transposed."""
    i, head, here = tile_rows(part, chunk, query_length, BM, G, GROUP)
    head += kv_head * GROUP
    token = (q_bos + i).to(tl.int64)
    q_tile = load_rows(q, token * q_token + head.to(tl.int64) * q_head, here, K, BK)
    dout_tile = load_rows(dout, token * dout_token + head.to(tl.int64) * dout_head, here, V, BV)
    entry = head.to(tl.int64) * tokens + token
    log_sum = tl.load(lse + entry, here, float("inf")) * LOG2E
    center = tl.load(delta + entry, here, 0.0)
    s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dout_tile), input_precision=PRECISION)
    if ranges is not None:
        begin, end = listed_keys(ranges, token, here, key_length)
    else:
        begin, end = visible_keys(i, query_length, key_length, left, right)
    visible = (key[:, None] >= begin[None, :]) & (key[:, None] < end[None, :])
    keep = s
    if seed is not None:
        streams = dropout_streams(seed, sequence, head, i)
        keep = dropout_keep(streams[None, :], key[:, None], threshold, keep_scale)
    kept, ds = _score_gradients(
        s, dp, log_sum[None, :], center[None, :], keep, visible, inner, outer, MASKED, SOFTCAP, seed is not None
    )
    dv = tl.dot(kept.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["sequences"])
def _queries_of_blocks(
    ranges, seen_by, cu_seqlens_q, cu_seqlens_k, items, count, sequences, BN: tl.constexpr, BT: tl.constexpr
):
    """seen_by [2] of each block of keys: the first query that sees some key of it, and the one behind the last."""
    blocks = tl.load(count)
    for place in range(tl.program_id(0), blocks, tl.num_programs(0)):
        sequence, block = tl.load(items + 2 * place), tl.load(items + 2 * place + 1)
        live = sequence < sequences
        key_length = tl.load(cu_seqlens_k + sequence + 1, live, 0) - tl.load(cu_seqlens_k + sequence, live, 0)
        q_bos = tl.load(cu_seqlens_q + sequence, live, 0)
        query_length = tl.load(cu_seqlens_q + sequence + 1, live, 0) - q_bos
        low, high = query_length, 0
        for step in range(0, query_length, BT):
            i = step + tl.arange(0, BT)
            begin, end = listed_keys(ranges, (q_bos + i).to(tl.int64), i < query_length, key_length)
            sees = (begin < (block + 1) * BN) & (end > block * BN) & (begin < end)
            low = tl.minimum(low, tl.min(tl.where(sees, i, query_length)))
            high = tl.maximum(high, tl.max(tl.where(sees, i + 1, 0)))
        # A block that no query sees starts and ends at 0.
        tl.store(seen_by + 2 * place, tl.minimum(low, high))
        tl.store(seen_by + 2 * place + 1, high)


@triton.jit(do_not_specialize=["sequences", "tokens", "keys", "left", "right", "threshold"])
def _backward_keys(
    dout, q, k, v, lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, ranges, seen_by, seed, items, count, sequences,
    tokens, keys,
    dout_token, dout_head, q_token, q_head, k_token, k_head, v_token, v_head,
    inner, outer, left, right, threshold, keep_scale, final_scale, kv_heads,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys after the other; the heads of a group are rows of the tiles it walks over."""
    blocks = tl.load(count)
    for item in range(tl.program_id(0), blocks * kv_heads, tl.num_programs(0)):
        place = item % blocks
        kv_head = item // blocks
        sequence, block = tl.load(items + 2 * place), tl.load(items + 2 * place + 1)
        live = sequence < sequences
        k_bos = tl.load(cu_seqlens_k + sequence)
        key_length = tl.load(cu_seqlens_k + sequence + 1, live, keys) - k_bos
        # Padding counts as a last sequence, whose keys no query sees.
        q_bos = tl.load(cu_seqlens_q + sequence, live, 0)
        query_length = tl.load(cu_seqlens_q + sequence + 1, live, 0) - q_bos

        first = block * BN
        key = first + tl.arange(0, BN)
        here = key < key_length
        row = (k_bos + key).to(tl.int64)
        k_block = load_rows(k, row * k_token + kv_head.to(tl.int64) * k_head, here, K, BK)
        v_block = load_rows(v, row * v_token + kv_head.to(tl.int64) * v_head, here, V, BV)

        # Query tiles that see some key of the block, [low, high), and in the middle of them those that see it whole.
        # Keys behind the sequence's last need no mask: what they gather is not stored.
        if ranges is not None:
            low = tl.load(seen_by + 2 * place) // (BM // G)
            high = tl.cdiv(tl.load(seen_by + 2 * place + 1), BM // G)
            whole, whole_end = high, high
        else:
            last = tl.minimum(first + BN, key_length) - 1
            shift = query_length - key_length
            low = tl.minimum(tl.maximum(first + shift - right, 0), query_length) // (BM // G)
            whole = tl.cdiv(tl.maximum(last + shift - right, 0), BM // G)
            high = tl.cdiv(tl.minimum(tl.maximum(last + shift + left + 1, 0), query_length), BM // G)
            whole_end = tl.maximum(first + shift + left + 1, 0)
            whole_end = tl.where(whole_end >= query_length, high, whole_end // (BM // G))
            any_whole = whole < whole_end
            whole, whole_end = tl.where(any_whole, whole, high), tl.where(any_whole, whole_end, high)
        sum_dk, sum_dv = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BV), tl.float32)
        for step in range(CHUNKS * (whole - low + high - whole_end)):
            part = low + step // CHUNKS + tl.where(step // CHUNKS < whole - low, 0, whole_end - whole)
            sum_dk, sum_dv = _add_to_keys(
                sum_dk, sum_dv, k_block, v_block, dout, q, lse, delta, dout_token, dout_head, q_token, q_head, part,
                step % CHUNKS, q_bos, kv_head, tokens, query_length, key, key_length, left, right, ranges, seed,
                sequence, inner, outer, threshold, keep_scale, True, BM, GROUP, G, K, V, BK, BV, SOFTCAP, PRECISION,
            )  # fmt: skip
        for step in range(CHUNKS * whole, CHUNKS * whole_end):
            sum_dk, sum_dv = _add_to_keys(
                sum_dk, sum_dv, k_block, v_block, dout, q, lse, delta, dout_token, dout_head, q_token, q_head,
                step // CHUNKS, step % CHUNKS, q_bos, kv_head, tokens, query_length, key, key_length, left, right,
                ranges, seed, sequence, inner, outer, threshold, keep_scale, False, BM, GROUP, G, K, V, BK, BV, SOFTCAP,
                PRECISION,
            )  # fmt: skip
        entry = row * kv_heads + kv_head
        store_rows(dk, entry * K, here, sum_dk * final_scale, K, BK)
        store_rows(dv, entry * V, here, sum_dv, V, BV)
