"""Attention as its definition says, one sequence and one head group at a time, in any float dtype.

Ground truth of the tests. Materialises the scores of a sequence, so it is for small inputs.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..packing import sequence_bounds
from .visible import visible_mask

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


def _scatter64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _murmur_rounds(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK_32
    return x ^ (x >> 16)


def dropout_keep(seed: int, sequence: int, head: int, query_length: int, key_length: int, dropout_p: float) -> Tensor:
    """The attention weights that survive dropout, bool ``[query_length, key_length]``.

    A pure function of its arguments: query and key positions count from the sequence's first token and ``sequence`` is
    the sequence's index in ``cu_seqlens``, so the pattern does not depend on the lengths beside it, but does depend on
    how many sequences (empty ones included) come before.
    """
    keys = torch.arange(key_length, dtype=torch.int64)
    rows = []
    for query in range(query_length):
        stream = _scatter64(_scatter64(_scatter64(_scatter64(seed) + sequence) + head) + query)
        hashed = _murmur_rounds((keys + (stream & _MASK_32)) & _MASK_32)
        rows.append(_murmur_rounds(hashed ^ (stream >> 32)) >= int(dropout_p * 2**32))
    return torch.stack(rows) if rows else torch.zeros(0, key_length, dtype=torch.bool)


def windowed_keys(query_length: int, key_length: int, causal: bool, window_size: Tuple[int, int]) -> Tensor:
    """Which keys each query sees, bool ``[query_length, key_length]``; the last query is aligned with the last key."""
    left, right = window_size
    if causal:
        right = 0
    offset = torch.arange(key_length)[None, :] - (torch.arange(query_length)[:, None] + key_length - query_length)
    seen = torch.ones(query_length, key_length, dtype=torch.bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    return seen


def flash_attn_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    seed: Optional[int] = None,
    visible_keys: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Attention of each sequence by itself.

    Args:
        q: ``[Tq, H, K]``.  k: ``[Tk, HK, K]``.  v: ``[Tk, HK, V]``.
        cu_seqlens_q, cu_seqlens_k: offsets ``[N + 1]``.
        s_aux: ``[H]`` or None, an extra logit of each head whose value is 0.
        seed: of :func:`dropout_keep`; needed if ``dropout_p > 0``.
        visible_keys: ``[Tq, 2]`` or None, in place of ``causal`` and ``window_size``.
        The others: see ``flash_attn_varlen_func``.

    Returns:
        out ``[Tq, H, V]`` and the log of the softmax's denominator ``[H, Tq]``, both in ``q.dtype``. Rows after the
        last offset are 0 in both; a row that sees no key (and no sink) has output 0 and -infinity.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    bounds = list(zip(sequence_bounds(cu_seqlens_q), sequence_bounds(cu_seqlens_k)))
    for n, ((q_bos, q_eos), (k_bos, k_eos)) in enumerate(bounds):
        query = q[q_bos:q_eos].transpose(0, 1)  # [H, Lq, K]
        key = k[k_bos:k_eos].transpose(0, 1).repeat_interleave(group, 0)  # [H, Lk, K]
        value = v[k_bos:k_eos].transpose(0, 1).repeat_interleave(group, 0)  # [H, Lk, V]
        score = query @ key.transpose(1, 2) * scale
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if visible_keys is None:
            seen = windowed_keys(q_eos - q_bos, k_eos - k_bos, causal, window_size)
        else:
            seen = visible_mask(visible_keys[q_bos:q_eos], k_eos - k_bos)
        score = score.masked_fill(~seen, float("-inf"))
        if s_aux is not None:
            sink = s_aux.to(score.dtype)[:, None, None].expand(heads, q_eos - q_bos, 1)
            score = torch.cat([score, sink], dim=-1)
        else:
            # A column that nothing sees keeps the softmax of a row without keys defined.
            score = torch.cat([score, score.new_full((heads, q_eos - q_bos, 1), float("-inf"))], dim=-1)
        lse = torch.logsumexp(score, dim=-1)
        empty = lse == float("-inf")
        weight = torch.exp(score - lse.masked_fill(empty, 0.0)[..., None])[..., :-1]
        if dropout_p > 0:
            keep = torch.stack(
                [dropout_keep(seed, n, head, q_eos - q_bos, k_eos - k_bos, dropout_p) for head in range(heads)]
            )
            weight = weight * keep / (1 - dropout_p)
        outs.append((weight @ value).transpose(0, 1))
        lses.append(lse)
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros(rest, heads, v.shape[-1]))
    lses.append(q.new_zeros(heads, rest))
    return torch.cat(outs), torch.cat(lses, dim=1)
