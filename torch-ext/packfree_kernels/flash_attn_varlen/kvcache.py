"""Attention of new queries over a cache of keys and values, contiguous or in pages. Forward only."""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from .._autograd import refuse_backward, refuse_graph_of_updated, refuse_tangents
from .._checks import (
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    type_error,
    value_error,
    with_checked_kinds,
)
from .._dtypes import DTYPES, dtype_name
from ..packing import has_values
from .api import Window, _attend, _check_heads, _refuse, checked_window

Lengths = Union[int, Tensor]


@with_checked_kinds
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Lengths] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Append new keys and values to a cache, in place, and attend to everything in it.

    Args:
        q: ``[B, Tq, H, K]``, Tq new queries a row.
        k_cache, v_cache: ``[B', S, HK, K]`` and ``[B', S, HK, V]``, S positions a row; with ``block_table``
            ``[pages, S, HK, K]`` and ``[pages, S, HK, V]``, S positions a page. Any strides; float dtype of ``q``.
        k, v: ``[B, Tnew, HK, K]`` and ``[B, Tnew, HK, V]``, written behind the ``cache_seqlens`` positions already
            there. Both or neither.
        cache_seqlens: integers ``[B]`` or one int, positions filled before this call. None: all S (none if new keys
            come without it).
        cache_batch_idx: integers ``[B]``, the cache row of each batch row; default row b. Not with ``block_table``.
        block_table: integers ``[B, pages a row]``, the page of each stretch of S positions.
        num_splits, rotary_interleaved: accepted and without effect.
        rotary_cos, rotary_sin, cache_leftpad, alibi_slopes: not supported.
        The others, and which keys a query sees: as ``flash_attn_varlen_func``, with the last query aligned to the last
        filled position.

    Returns:
        out ``[B, Tq, H, V]``, with ``return_softmax_lse`` also the log-sum-exp ``[B, H, Tq]``. Reads ``cache_seqlens``
        and ``block_table``, and copies the filled part of the cache. Under ``torch.compile`` it reads no value, copies
        whole rows of the cache, and values out of range raise RuntimeError when the graph runs.

    Raises:
        TypeError, ValueError: as ``flash_attn_varlen_func``; lengths that pass the cache's end; pages or rows out of
            range; only one of ``k`` and ``v``.
        NotImplementedError: an unsupported argument given; in the backward pass (call ``flash_attn_varlen_func`` to
            train), and at once where a cache to be written to requires gradients.

    Source: the function of this name in the flash-attn package (interface).
    """
    op = "flash_attn_with_kvcache"
    _refuse(
        op, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes
    )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(op, name, tensor, 4)
        check_dtype(op, name, tensor, DTYPES)
        check_served(op, name, tensor)
        check_same_device(op, name, tensor, q.device)
    check_shape(op, "v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]), "[B, S, HK, V]")
    if (k is None) != (v is None):
        raise value_error(op, "k and v", "come together", f"only {'v' if k is None else 'k'}")
    batch, query_length = q.shape[0], q.shape[1]
    new = 0 if k is None else k.shape[1]
    rows = _table(op, batch, k_cache, cache_batch_idx, block_table)
    page_size = k_cache.shape[1]
    filled = _filled(op, cache_seqlens, batch, new, rows.shape[1] * page_size)
    end = filled.to(rows.device) + new
    places = _places(op, rows, end, k_cache)
    tensors = (q, k_cache, v_cache, k, v, s_aux)
    refuse_tangents(op, tensors)
    if new:
        refuse_graph_of_updated(op, "k_cache", k_cache)
        refuse_graph_of_updated(op, "v_cache", v_cache)
    with torch.no_grad():
        if k is not None and v is not None:
            _check_heads(op, q, k, v, 4)
            check_shape(op, "k", k, (batch, new, *k_cache.shape[2:]), "[B, Tnew, HK, K]")
            check_shape(op, "v", v, (batch, new, *v_cache.shape[2:]), "[B, Tnew, HK, V]")
            position = (end - new)[:, None] + torch.arange(new, device=rows.device)
            behind = rows.gather(1, position // page_size), position % page_size
            k_cache[behind] = k
            v_cache[behind] = v
        queries = q.flatten(0, 1)
        offsets_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * query_length
        keys, values, offsets_k, visible_keys = _read(q, k_cache, v_cache, places, end, causal, window_size)
        _check_heads(op, queries, keys, values, 3)
        if visible_keys is not None:
            causal, window_size = False, (-1, -1)
        out, lse = _attend(
            op, queries, keys, values, offsets_q, offsets_k, 0.0, softmax_scale, causal, window_size, softcap, s_aux,
            visible_keys=visible_keys,
        )  # fmt: skip
    out, lse = refuse_backward(op, "flash_attn_varlen_func", (out, lse), tensors)
    out = out.unflatten(0, (batch, query_length))
    if not return_softmax_lse:
        return out
    return out, lse.unflatten(1, (batch, query_length)).transpose(0, 1)


def _check_integers(op: str, name: str, tensor: Tensor, shape: Tuple[int, ...], letters: str, below: int) -> Tensor:
    check_tensor(op, name, tensor, len(shape))
    if tensor.dtype not in (torch.int32, torch.int64):
        raise type_error(op, name, "be an int32 or int64 tensor", dtype_name(tensor))
    check_shape(op, name, tensor, shape, letters)
    _check_readable(op, name, tensor)
    tensor = tensor.to(torch.int64)
    outside = (tensor < 0) | (tensor >= below)
    if not _all_inside(op, name, outside):
        raise value_error(op, name, f"lie in 0 .. {below - 1}", int(tensor[outside][0]))
    return tensor


def _check_readable(op: str, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise value_error(op, name, "hold values", "a meta tensor")


def _table(
    op: str, batch: int, k_cache: Tensor, cache_batch_idx: Optional[Tensor], block_table: Optional[Tensor]
) -> Tensor:
    """The first axis of the cache for each stretch of S positions of each batch row, int64 ``[B, stretches]``."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise value_error(op, "cache_batch_idx", "be absent where block_table is given", "both")
        check_tensor(op, "block_table", block_table, 2)
        # Entries behind the filled pages are often -1, so the values are checked where they are used.
        if block_table.dtype not in (torch.int32, torch.int64):
            raise type_error(op, "block_table", "be an int32 or int64 tensor", block_table.dtype)
        check_shape(op, "block_table", block_table, (batch, block_table.shape[1]), "[B, pages a row]")
        _check_readable(op, "block_table", block_table)
        return block_table.to(k_cache.device, torch.int64)
    if cache_batch_idx is not None:
        rows = _check_integers(op, "cache_batch_idx", cache_batch_idx, (batch,), "[B]", k_cache.shape[0])
        return rows.to(k_cache.device)[:, None]
    if k_cache.shape[0] < batch:
        raise value_error(op, "k_cache", f"have a row for each of the {batch} rows of q", k_cache.shape[0])
    return torch.arange(batch, device=k_cache.device)[:, None]


def _filled(op: str, cache_seqlens: Optional[Lengths], batch: int, new: int, capacity: int) -> Tensor:
    """Positions filled before the call, int64 ``[B]``."""
    if cache_seqlens is None:
        cache_seqlens = capacity if new == 0 else 0
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens)
    return _check_integers(op, "cache_seqlens", cache_seqlens, (batch,), "[B]", capacity - new + 1)


def _all_inside(op: str, argument: str, outside: Tensor) -> bool:
    """Whether nothing is ``outside`` of the cache. While torch.compile traces the graph asks, and raises RuntimeError.

    No number is in the graph's message: it would be one that the graph is compiled for.
    """
    if has_values(outside):
        return not bool(outside.any())
    torch._assert_async(~outside.any(), f"{op}: {argument} must point into the cache")
    return True


def _places(op: str, rows: Tensor, end: Tensor, k_cache: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Cache row or page, and place in it, of each position of each batch row, and whether it is below ``end``."""
    pages, page_size = k_cache.shape[:2]
    position = torch.arange(rows.shape[1] * page_size, device=rows.device)
    used = position < end[:, None]
    page = rows[:, position // page_size]
    unknown = used & ((page < 0) | (page >= pages))
    if not _all_inside(op, "block_table", unknown):
        raise value_error(op, "block_table", f"name pages 0 .. {pages - 1} where used", int(page[unknown][0]))
    return page, (position % page_size).expand_as(page), used


def _read(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tuple[Tensor, Tensor, Tensor],
    end: Tensor,
    causal: bool,
    window_size: Window,
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """Keys, values and their offsets: the filled part of each batch row, and None.

    How much is filled is not known while torch.compile traces: there each row is read whole, 0 where it is not filled,
    and comes with the range of keys that each query sees.
    """
    page, slot, used = places
    batch, capacity = page.shape
    if has_values(end):
        filled = page[used], slot[used]
        offsets = torch.cat([end.new_zeros(1), torch.cumsum(end, 0)]).to(q.device, torch.int32)
        return k_cache[filled], v_cache[filled], offsets, None
    page, used = torch.where(used, page, 0), used[:, :, None, None]
    keys, values = (torch.where(used, cache[page, slot], 0).flatten(0, 1) for cache in (k_cache, v_cache))
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * capacity
    left, right = checked_window("flash_attn_with_kvcache", window_size)
    own = end[:, None] - q.shape[1] + torch.arange(q.shape[1], device=end.device)  # the query's key
    first = (own - left).clamp(min=0) if left >= 0 else torch.zeros_like(own)
    right = 0 if causal else right
    last = torch.minimum(own + right, end[:, None] - 1) if right >= 0 else (end[:, None] - 1).expand_as(own)
    return keys, values, offsets, torch.stack([first, last], -1).flatten(0, 1).to(q.device, torch.int32)
