"""Forward: out = softmax(mask(score)) v with the running maximum and denominator of online softmax."""

from typing import Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.attention import (
    LN2,
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


def forward_tile(on: Target, dims: int, bytes_each: int, dropout: bool) -> Dict[str, int]:
    """The largest tile that spills no register, for head dims padded to ``dims`` of ``bytes_each`` bytes an element."""
    wide = dims > 128
    if not is_roomy(on):
        return tile(16 if bytes_each == 4 else 64, 16 if bytes_each == 4 else 32, 4, 1)
    if bytes_each == 4:
        rows = 32 if wide else 64
        return tile(rows // 2 if on.arch < 90 and dims > 64 else rows, 32, 8, 2)
    if on.arch < 90:
        return tile(32, 64, 8, 2) if wide or dropout else tile(128, 32, 8, 3)
    if wide or dropout:
        return tile(64, 32, 8, 2)
    # Blackwell's products end in a memory of their own and come back through registers.
    return tile(128, 32 if on.arch >= 100 and dims > 64 else 64, 8, 2 if dims > 64 else 3)


def flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Tuple[Tensor, Tensor]:
    check_served("flash_attn_varlen_fwd", q, v)
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    tokens, heads, key_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    out = q.new_empty((tokens, heads, value_dim))
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    call = Call.of(q, k, dropout_p, abs(softmax_scale), window_left, window_right, softcap)
    dims = padded(key_dim), padded(value_dim)
    shape = forward_tile(target(q), max(dims), q.element_size(), dropout_p > 0)
    rows = Rows(shape.pop("BM"), heads // kv_heads)
    blocks = cut_into_blocks(cu_seqlens_q, tokens, rows.tokens, padding=True)
    launch(
        _forward, programs(q, blocks.most * kv_heads * rows.chunks, 8),
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, ranges, s_aux, dropout_seed(seed, dropout_p),
        blocks.items, blocks.count, cu_seqlens_q.shape[0] - 1, tokens, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], call.inner, max(call.outer, 1e-30), call.left, call.right, call.threshold, call.keep_scale,
        kv_heads, **rows.constants, K=key_dim, V=value_dim, BK=dims[0], BV=dims[1], NEGATIVE=softmax_scale < 0,
        SOFTCAP=softcap > 0, PRECISION=dot_precision(q), **shape,
    )  # fmt: skip
    return out, lse


@triton.jit
def _fold(
    q, m, total, o, k, v, k_token, v_token, first, key_length, begin, end, streams, inner, outer, threshold, keep_scale,
    MASKED: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Folds a block of keys into the rows' running maximum m, denominator total and output o."""
    key = first + tl.arange(0, BN)
    here = key < key_length if MASKED else key >= 0
    k_block = load_rows(k, key.to(tl.int64) * k_token, here, K, BK)
    s = tl.dot(q, tl.trans(k_block), input_precision=PRECISION)
    if SOFTCAP:
        s = tanh(s * inner)
    if MASKED:
        s = tl.where((key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None]), s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * outer)
    # A row that has seen no key yet keeps the maximum -infinity; subtracting 0 keeps its probabilities 0.
    shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s * outer - shift[:, None])
    decay = tl.exp2(m - shift)
    total = total * decay + tl.sum(p, 1)
    if DROPOUT:
        p *= dropout_keep(streams[:, None], key[None, :], threshold, keep_scale)
    v_block = load_rows(v, key.to(tl.int64) * v_token, here, V, BV)
    o = tl.dot(p.to(v_block.dtype), v_block, o * decay[:, None], input_precision=PRECISION)
    return top, total, o


@triton.jit(do_not_specialize=["sequences", "tokens", "left", "right", "threshold"])
def _forward(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, ranges, s_aux, seed, items, count, sequences, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, inner, outer, left, right, threshold, keep_scale, kv_heads,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NEGATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of a sequence and key/value head after the other; see README.md for the letters."""
    blocks = tl.load(count)
    for item in range(tl.program_id(0), blocks * (kv_heads * CHUNKS), tl.num_programs(0)):
        # The last block of a causal sequence sees most keys, so it is started first.
        place = blocks - 1 - item % blocks
        kv_head = item // blocks // CHUNKS
        sequence, part = tl.load(items + 2 * place), tl.load(items + 2 * place + 1)
        live = sequence < sequences
        q_bos = tl.load(cu_seqlens_q + sequence)
        query_length = tl.load(cu_seqlens_q + sequence + 1, live, tokens) - q_bos
        # Padding counts as a last sequence, whose queries see no key.
        k_bos = tl.load(cu_seqlens_k + sequence, live, 0)
        key_length = tl.load(cu_seqlens_k + sequence + 1, live, 0) - k_bos

        i, head, here = tile_rows(part, item // blocks % CHUNKS, query_length, BM, G, GROUP)
        head += kv_head * GROUP
        token = (q_bos + i).to(tl.int64)
        q_tile = load_rows(q, token * q_token + head.to(tl.int64) * q_head, here, K, BK)
        if NEGATIVE:
            q_tile = -q_tile
        if ranges is not None:
            seen = here & (i < tl.where(live, query_length, 0))
            begin, end = listed_keys(ranges, token, seen, key_length)
        else:
            begin, end = visible_keys(i, query_length, key_length, left, right)
        streams = i
        if seed is not None:
            streams = dropout_streams(seed, sequence, head, i)

        if s_aux is not None:
            m = tl.load(s_aux + head, here, 0.0) * LOG2E
            total = tl.full((BM,), 1.0, tl.float32)
        else:
            m = tl.full((BM,), float("-inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
        o = tl.zeros((BM, BV), tl.float32)

        low, whole, whole_end, high = key_blocks(
            ranges, begin, end, here, part, query_length, key_length, left, right, BM // G, BN
        )
        k_rows = k + k_bos.to(tl.int64) * k_token + kv_head.to(tl.int64) * k_head
        v_rows = v + k_bos.to(tl.int64) * v_token + kv_head.to(tl.int64) * v_head
        for step in range(whole - low + high - whole_end):
            block = low + step + tl.where(step < whole - low, 0, whole_end - whole)
            m, total, o = _fold(
                q_tile, m, total, o, k_rows, v_rows, k_token, v_token, block * BN, key_length, begin, end, streams,
                inner, outer, threshold, keep_scale, True, BN, K, V, BK, BV, SOFTCAP, seed is not None, PRECISION,
            )  # fmt: skip
        for block in range(whole, whole_end):
            m, total, o = _fold(
                q_tile, m, total, o, k_rows, v_rows, k_token, v_token, block * BN, key_length, begin, end, streams,
                inner, outer, threshold, keep_scale, False, BN, K, V, BK, BV, SOFTCAP, seed is not None, PRECISION,
            )  # fmt: skip

        # Where nothing was seen the output is 0 and the maximum, with it the log of the denominator, -infinity.
        total = tl.where(total == 0, 1.0, total)
        o *= (1 / total)[:, None]
        store_rows(out, (token * (kv_heads * GROUP) + head) * V, here, o, V, BV)
        log_sum = tl.where(live, (m + tl.log2(total)) * LN2, 0.0)
        tl.store(lse + head.to(tl.int64) * tokens + token, log_sum, here)
