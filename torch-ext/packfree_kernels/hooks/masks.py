"""Attention that sees more than causal, or less: what a model's mask says becomes a range of visible keys a query.

transformers describes a mask as a function of (batch row, head, query, key), built by a few functions that combine
others, and asks the attention implementation's own mask function what to hand to the layers. Flash-style ones drop the
description. Ours reads it: where causality and a window say all, the layers get what they get from transformers; where
tokens see each other both ways in blocks, or only inside chains, they get int32 ``[B, 1, Tq, 2]``, the first and the
last key of each query, which our attention serves. No mask of size T x T is made.

Every part of a description that is understood shows a query itself and, with it, one stretch of keys (or nothing), so
unions and intersections of them are one stretch again. What is not understood is refused by name.
"""

import functools
import os
from typing import Any, Callable, FrozenSet, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import value_error
from ..flash_attn_varlen.api import flash_attn_func, flash_attn_varlen_func
from . import context, functions, internals
from .undo import UndoList

# What a description is made of, besides ``causal``, ``bidirectional``, ``and_masks`` and ``or_masks``.
_WINDOW, _WINDOW_BOTH_WAYS = "sliding_window_overlay", "sliding_window_bidirectional_overlay"
_BLOCKS, _CHAINS = "blockwise_overlay", "packed_sequence_mask_function"
_OF_POSITIONS = "remap_positions_for_packed_sequence"
_UNKNOWN = "unknown"

Range = Tuple[Tensor, Tensor]


# ---- what a mask function says of itself ----


def describe_themselves(undo: UndoList) -> None:
    """Let the functions of which masks are built note on each mask what it is, in the modules loaded by now."""
    for module, name, stock in internals.mask_builders():
        undo.replace(module, name, _noting(name, stock))


def number_without_waiting(undo: UndoList) -> None:
    """Let transformers number a pack's samples on a GPU without a look at the result, in the modules loaded by now."""
    for module, name, stock in internals.sample_finders():
        undo.replace(module, name, _number_samples(stock))


def _number_samples(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def find_packed_sequence_indices(position_ids: Tensor) -> Optional[Tensor]:
        here = None if torch.compiler.is_compiling() else context.current()
        if here is not None and here.shard is not None:
            return None  # attention is told otherwise, and the numbers would be this rank's
        packed = here is not None
        if not packed or packing.reads_values(position_ids):
            return stock(position_ids)
        return packing.starts_from_position_ids(position_ids).cumsum(-1) - 1

    find_packed_sequence_indices.packfree_stock = stock
    return find_packed_sequence_indices


def _noting(name: str, stock: Callable) -> Callable:
    # A note, because a closure's cells cannot be read while torch.compile traces.
    @functools.wraps(stock)
    def build(*parts: Any, **named: Any) -> Callable:
        function = stock(*parts, **named)
        function.packfree_mask = (name, (*parts, *named.values()))
        return function

    build.packfree_stock = stock
    return build


def _of_places(function: Callable) -> Callable:
    """What transformers from 5.23 on wraps in a pack, to call it with positions in the sample instead of in the row.

    It does so beside chains of such positions, where a difference of two is that of their places; and blocks are those
    of the row, which places find and positions do not.
    """
    name, parts = getattr(function, "packfree_mask", ("", ()))
    return parts[0] if name == _OF_POSITIONS else function


def _description(function: Callable) -> Tuple[str, Tuple[Any, ...]]:
    function = _of_places(function)
    plain = internals.plain_mask_name(function)
    return (plain, ()) if plain else getattr(function, "packfree_mask", (_UNKNOWN, ()))


def _kinds(function: Callable) -> FrozenSet[str]:
    name, parts = _description(function)
    kinds = frozenset([name])
    if name in ("and_masks", "or_masks"):
        for part in parts:
            kinds |= _kinds(part)
    return kinds


def _first_unknown(function: Callable) -> str:
    name, parts = _description(function)
    if name == _UNKNOWN:
        function = _of_places(function)
        return getattr(function, "__qualname__", type(function).__name__)
    names = [_first_unknown(part) for part in parts] if name in ("and_masks", "or_masks") else []
    return next((found for found in names if found), "")


# ---- from a description to ranges ----


class _Row(NamedTuple):
    """Where the queries and keys of a call lie in their row, counted from its very first token.

    Attributes:
        at: int64 ``[Tq]``, the place of each query.
        last: place of the last key, an int or a tensor of one.
        seq_idx: ``[B, T]`` of a packed forward, or None.
        model: model type, for messages.
        in_one_piece: blocks of this model are numbered as stretches, so that none is in pieces.
    """

    at: Tensor
    last: Any
    seq_idx: Optional[Tensor]
    model: str
    in_one_piece: bool


def visible_keys_mask(stock: Callable) -> Callable:
    """The mask function of our attention; ``stock`` is the one that transformers registered under our name."""

    @functools.wraps(stock)
    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Optional[Callable] = None,
        attention_mask: Optional[Tensor] = None,
        **rest: Any,
    ) -> Optional[Tensor]:
        device, config = torch.device(rest.get("device", "cpu")), rest.get("config")
        # A static cache is longer than what has been written into it, and counts that in a tensor. A mask tells, too.
        unfilled = isinstance(q_offset, Tensor) or kv_offset + kv_length > q_offset + q_length
        unfilled = unfilled and attention_mask is None
        overlaid = bool(rest.get("use_vmap"))
        needed = mask_function is not None and functions.supported(device)
        if not needed or not _needs_ranges(mask_function, config, overlaid, unfilled):
            return stock(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=mask_function, attention_mask=attention_mask, **rest,
            )  # fmt: skip
        here = context.current()
        if here is not None and here.shard is not None:
            _refuse_on_shard(mask_function, config, overlaid)
            return None
        if here is not None and not (type(config) is here.config_type and here.fit(batch_size, q_length)):
            here = None
        model = internals.model_type(config)
        row = _Row(
            torch.arange(q_length, device=device) + q_offset,
            kv_offset + kv_length - 1,
            None if here is None else here.seq_idx,
            model,
            internals.numbers_every_block(config),
        )
        first, last = (bound.expand(batch_size, q_length) for bound in _range(mask_function, row))
        if attention_mask is not None:
            first, last = _without_padding(first, last, attention_mask.bool(), model)
        if here is None:
            return _as_mask(first - kv_offset, last - kv_offset, kv_length)
        return _in_samples(first, last, here)

    mask.packfree_stock = stock
    return mask


def _needs_ranges(mask_function: Callable, config: Any, overlaid: bool, unfilled: bool) -> bool:
    """Whether causality and a module's window say less than ``mask_function`` does.

    Args:
        overlaid: the model has laid something of its own over transformers' mask.
        unfilled: there are more keys than tokens so far; the last query is not the one of the last key.

    Raises:
        ValueError: a part of it is not understood.
    """
    kinds, both_ways = _kinds(mask_function), internals.sees_both_ways(config)
    if _UNKNOWN in kinds:
        if both_ways:
            return False  # its modules say so themselves
        raise value_error(
            internals.model_type(config), "its attention mask",
            "be causal, a window, or blocks of tokens that lie side by side; load the model with "
            'attn_implementation="eager" and train it on padded batches',
            f"the mask function {_first_unknown(mask_function)}",
        )  # fmt: skip
    if overlaid or _BLOCKS in kinds or "or_masks" in kinds:
        return True
    # Chains beside causality are the samples that transformers finds in position_ids.
    # Modules that drop causality themselves must be told of it: PaliGemma's, outside its prefix.
    return unfilled or both_ways if "causal" in kinds else _CHAINS in kinds


def _refuse_on_shard(mask_function: Callable, config: Any, overlaid: bool) -> None:
    """Raises NotImplementedError: ranges of keys in this rank's row say nothing about the keys of others.

    """
    if overlaid or internals.sees_both_ways(config) or _kinds(mask_function) & {_BLOCKS, "or_masks"}:
        raise NotImplementedError(
            f"{internals.model_type(config)}: its attention mask shows blocks of tokens to each other, which is not "
            "served on shards of a row (sequence_parallel). Train it with data parallelism (DDP, FSDP, ZeRO), which "
            "keeps every row whole"
        )


def _range(function: Callable, row: _Row) -> Range:
    """First and last place that each query sees by ``function``, ``[Tq]`` or ``[B, Tq]``; ``last < first`` for none."""
    name, parts = _description(function)
    at = row.at
    beginning = torch.zeros_like(at)
    end = beginning + row.last
    if name == "causal":
        return beginning, at
    if name == "bidirectional":
        return beginning, end
    if name == _WINDOW:
        return at - parts[0] + 1, end
    if name == _WINDOW_BOTH_WAYS:
        return at - parts[0], at + parts[0]
    if name in (_BLOCKS, _CHAINS):
        return _stretches(parts[0].to(at.device), name == _BLOCKS, row)
    ranges = [_range(part, row) for part in parts]
    firsts, lasts = [first for first, _ in ranges], [last for _, last in ranges]
    if name == "and_masks":
        return functools.reduce(torch.maximum, firsts), functools.reduce(torch.minimum, lasts)
    return functools.reduce(torch.minimum, firsts), functools.reduce(torch.maximum, lasts)


def _stretches(ids: Tensor, are_blocks: bool, row: _Row) -> Range:
    """The stretch of equal ``ids`` ``[B, L]`` around each query, cut where a sample ends. Blocks have ids from 0 on."""
    length = ids.shape[1]
    index = torch.arange(length, device=ids.device)
    starts = torch.diff(ids, dim=1) != 0
    if row.seq_idx is not None:
        starts = starts | (torch.diff(row.seq_idx, dim=1) != 0)
    starts = torch.nn.functional.pad(starts, (1, 0), value=True)
    ends = torch.nn.functional.pad(starts[:, 1:], (0, 1), value=True)
    first = torch.where(starts, index, 0).cummax(1).values
    last = torch.where(ends, index, length).flip(1).cummin(1).values.flip(1)
    _check_in_one_piece(ids, starts, are_blocks, row)
    first, last = first[:, row.at], last[:, row.at]
    if not are_blocks:
        return first, last
    inside = ids[:, row.at] >= 0
    return torch.where(inside, first, row.at), torch.where(inside, last, row.at - 1)


def _check_in_one_piece(ids: Tensor, starts: Tensor, are_blocks: bool, row: _Row) -> None:
    """Tokens of one id in one sample lie side by side, so that one range shows them all."""
    if row.in_one_piece and ids.device.type != "cpu":
        return  # needs no look, which would wait for the GPU
    sample = torch.zeros_like(ids) if row.seq_idx is None else row.seq_idx
    counted = ids >= 0 if are_blocks else torch.ones_like(ids, dtype=torch.bool)
    keys = torch.where(counted, (sample.long() << 32) + ids.long() + 2**31, -1).sort(dim=1).values
    different = (torch.diff(keys, dim=1) != 0) & (keys[:, 1:] >= 0)
    pieces, blocks = (starts & counted).sum(), different.sum() + (keys[:, 0] >= 0).sum()
    what = "blocks of tokens that see each other both ways" if are_blocks else "tokens of one sequence_id"
    _assert(
        pieces == blocks, row.model, what, "lie side by side in their sample under this attention; load the model with "
        'attn_implementation="eager" and train it on padded batches', "one in several pieces",
    )  # fmt: skip


def _without_padding(first: Tensor, last: Tensor, seen: Tensor, model: str) -> Range:
    """The ranges without what a padding mask ``[B, L]`` hides at the ends of a row."""
    index = torch.arange(seen.shape[1], device=seen.device)
    begin = torch.where(seen, index, seen.shape[1]).amin(1)
    end = torch.where(seen, index, -1).amax(1)
    whole = (seen.sum(1) == (end - begin + 1).clamp(min=0)).all()
    _assert(whole, model, "attention_mask", "hide nothing but the ends of a row", "one with a gap")
    return torch.maximum(first, begin[:, None]), torch.minimum(last, end[:, None])


def _assert(holds: Tensor, op: str, argument: str, must: str, got: str) -> None:
    """Raise, or while tracing leave it to the graph. On a GPU this waits, because a failed check ends the process."""
    if packing.has_values(holds):
        if not bool(holds):
            raise value_error(op, argument, must, got)
    else:
        torch._assert_async(holds, f"{op}: {argument} must {must}, got {got}")


def _in_samples(first: Tensor, last: Tensor, here: context.Boundaries) -> Tensor:
    """Ranges ``[B, T]`` in the batch's rows, cut to each token's sample and counted from its first token."""
    rows = torch.arange(here.batch, device=first.device)[:, None] * here.length
    label = here.seq_idx.long()  # -1 of padding reads the last offsets; its ranges are not read
    begin, end = here.cu_seqlens[label], here.cu_seqlens[(label + 1) % here.cu_seqlens.shape[0]]
    length = (end - begin).clamp(min=1)
    return _as_mask(first + rows - begin, last + rows - begin, length)


def _as_mask(first: Tensor, last: Tensor, length: Any) -> Tensor:
    """``[B, 1, Tq, 2]`` int32, the form of a mask that is ready, which transformers hands on as it is."""
    first = first.clamp(min=0)
    last = torch.minimum(last, length - 1) if isinstance(length, Tensor) else last.clamp(max=length - 1)
    return torch.stack([first, last], -1).to(torch.int32)[:, None]


# ---- attention with ranges ----


def is_ranges(attention_mask: Any) -> bool:
    """Whether a layer's mask is one of ours; transformers' own are of bools or floats, or of two dimensions."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.int32 or attention_mask.dim() != 4:
        return False
    return attention_mask.shape[1] == 1 and attention_mask.shape[3] == 2


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: Tensor,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    cache: Any = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    deterministic: Optional[bool] = None,
    **_: Any,
) -> Tuple[Tensor, None]:
    """One layer's attention, as transformers' entry of flash-style kernels does it, with a range of keys a query.

    Args:
        query, key, value: ``[B, H, T, K]``, ``[B, HK, Tk, K]`` and ``[B, HK, Tk, V]``.
        ranges: ``[B, 1, T, 2]``, which say more than ``sliding_window`` and ``is_causal``.
        cu_seq_lens_q: the pack's offsets over ``B * T`` tokens, from whose sequences ranges then count; None: each row
            of the batch is a sequence.
        The others: as transformers passes them; what its layers hand on to each other besides is not needed.

    Returns:
        ``[B, T, H, V]``, and None for the weights.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query, key, value = internals.cast_for_attention(module, query, key, value)
    if deterministic is None:
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    settings = dict(
        dropout_p=dropout, softmax_scale=scaling, softcap=softcap or 0.0, s_aux=s_aux, deterministic=deterministic
    )
    if cu_seq_lens_q is None:
        return flash_attn_func(query, key, value, visible_keys=ranges[:, 0], **settings), None
    out = flash_attn_varlen_func(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), cu_seq_lens_q, cu_seq_lens_q,
        visible_keys=ranges.flatten(0, 2), **settings,
    )  # fmt: skip
    return out.unflatten(0, query.shape[:2]), None


def refuse_dense(module: Any, attention_mask: Any) -> None:
    """Raises ValueError: a mask of its own for each query, of which transformers' flash-style path knows nothing."""
    if isinstance(attention_mask, Tensor) and attention_mask.dim() > 2:
        config = getattr(module, "config", None)
        raise value_error(
            internals.model_type(config) or type(module).__name__, "attention_mask",
            'have the form [B, T] under this attention; load the model with attn_implementation="eager"',
            f"shape {tuple(attention_mask.shape)}",
        )  # fmt: skip


# ---- registration ----


def register(name: str) -> None:
    """Lay ours over the mask function that transformers registered under ``name``."""
    table = internals.mask_functions()
    stock = table.get(name) if table is not None else None
    if stock is not None and not hasattr(stock, "packfree_stock"):
        table.register(name, visible_keys_mask(stock))


def unregister(names: List[str]) -> None:
    table = internals.mask_functions()
    for name in names:
        stock = getattr(table.get(name) if table is not None else None, "packfree_stock", None)
        if stock is not None:
            table.register(name, stock)
