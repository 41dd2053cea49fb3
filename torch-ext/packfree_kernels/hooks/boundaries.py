"""Whether a model's forward is packed, and where: read once, at the outermost forward.

The keywords of the call are completed in place, so that every layer is told the same thing in each spelling.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import type_error, value_error
from . import guards, internals
from .context import Boundaries
from .functions import supported

Call = Dict[str, Any]


class Signature(NamedTuple):
    """What a forward accepts: its parameter names in order, and whether it takes any keyword."""

    names: Tuple[str, ...]
    any_keyword: bool


class _Batch(NamedTuple):
    rows: int
    length: int
    device: torch.device


def _batch_of(call: Call) -> Optional[_Batch]:
    tokens = call.get("input_ids")
    if tokens is None:
        tokens = call.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    return _Batch(tokens.shape[0], tokens.shape[1], tokens.device)


def boundaries_of_call(model: Any, call: Call, signature: Signature) -> Optional[Boundaries]:
    """The boundaries of ``model.forward(**call)``, or None if the call is not packed and stays as it is.

    Packed is a call with ``seq_idx`` or ``cu_seq_lens_q``; and one without a cache whose ``position_ids`` start again
    inside a row. Position ids of one row that never start again count as one packed sample in training and where
    ``use_cache=False``; otherwise the caller may want a cache back, and the stock path gives one.

    A packed call gets whichever boundary keywords are missing (where the model takes any keyword), ``position_ids`` if
    they are missing and can be known, ``use_cache=False`` if unset, and loses an ``attention_mask`` that masks nothing.

    Raises:
        ValueError: boundaries that are malformed or disagree; a cache or an ``attention_mask`` that masks something
            beside a pack; a model that cannot be packed.
    """
    batch = _batch_of(call)
    if batch is None or batch.rows * batch.length == 0 or not supported(batch.device):
        return None
    if any(call.get(name) is not None for name in internals.PAGED_KEYWORDS):
        return None
    op = type(model).__name__
    if call.get("seq_idx") is not None or call.get("cu_seq_lens_q") is not None:
        cu_seqlens = _explicit(op, call, batch)
        if not _allows_packing(op, call, cu_seqlens, batch):
            for name in internals.BOUNDARY_KEYWORDS:
                call.pop(name, None)
            return None
        _drop_mask(op, call, batch, keep_dense=False)
    else:
        cu_seqlens = _from_positions(model, op, call, batch)
        if cu_seqlens is None:
            return None
    guards.refuse_packed(model)
    return _complete(model, op, call, signature, cu_seqlens, batch)


def _explicit(op: str, call: Call, batch: _Batch) -> Tensor:
    """Offsets ``[N + 1]`` over the rows from ``cu_seq_lens_q``, ``seq_idx`` or both."""
    rows, length, device = batch
    cu_seqlens = call.get("cu_seq_lens_q")
    labelled = None
    if call.get("seq_idx") is not None:
        labelled = packing.resolve_packing(op, rows, length, device, seq_idx=call["seq_idx"]).cu_seqlens
    if cu_seqlens is None:
        return labelled
    cu_seqlens = packing.check_cu_seqlens(op, cu_seqlens, rows * length, device, argument="cu_seq_lens_q")
    if packing.reads_values(cu_seqlens):
        if labelled is not None and not packing.same_boundaries(cu_seqlens, labelled):
            must = f"cut the row where cu_seq_lens_q {packing.brief_offsets(cu_seqlens)} does"
            raise value_error(op, "seq_idx", must, f"cuts at {packing.brief_offsets(labelled)}")
    packing.check_rows_are_cut(op, cu_seqlens, rows, length, "cu_seq_lens_q")
    return cu_seqlens


def _cache_argument(call: Call) -> Optional[str]:
    for name in internals.CACHE_KEYWORDS:
        if call.get(name) is not None:
            return name
    return "use_cache" if call.get("use_cache") else None


def _allows_packing(op: str, call: Call, cu_seqlens: Tensor, batch: _Batch) -> bool:
    """False for one sample that wants a cache: the stock path serves it. A cache beside several is an error."""
    cache = _cache_argument(call)
    if cache is None:
        return True
    if packing.reads_values(cu_seqlens) and torch.unique_consecutive(cu_seqlens).tolist() == [
        0,
        batch.rows * batch.length,
    ]:
        return False
    raise _cache_error(op, call, cache)


def _cache_error(op: str, call: Call, cache: str) -> ValueError:
    got = repr(call[cache]) if cache == "use_cache" else type(call[cache]).__name__
    return value_error(op, cache, "be left out or off in a packed call (a cache holds one sample a row)", got)


def _masks_something(mask: Tensor) -> bool:
    """Whether a ``[B, T]`` mask hides a token. While tracing, the graph gets the check and fails where it does.

    On a GPU this waits for the mask, the only look that a packed call takes there: a failed check would end the
    process.
    """
    if packing.has_values(mask):
        return not bool(mask.all())
    torch._assert_async(mask.bool().all(), "attention_mask must mask nothing in a packed call")
    return False


def _drop_mask(op: str, call: Call, batch: _Batch, keep_dense: bool) -> None:
    """Take an ``attention_mask`` that masks nothing out of a packed call and refuse any other.

    ``keep_dense`` leaves a mask of another shape in place: attention through a mask (eager, sdpa) honours it.
    """
    mask = call.get("attention_mask")
    if mask is None:
        return
    two_dimensional = isinstance(mask, Tensor) and tuple(mask.shape) == (batch.rows, batch.length)
    if two_dimensional and not _masks_something(mask):
        call["attention_mask"] = None
    elif two_dimensional or not keep_dense:
        got = "one that masks tokens" if two_dimensional else f"a {type(mask).__name__} of another shape"
        raise value_error(op, "attention_mask", "be left out or mask nothing in a packed call", got)


def _positions(call: Call, batch: _Batch) -> Optional[Tensor]:
    """``position_ids`` with the batch's rows, ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; None if of another form."""
    positions = call.get("position_ids")
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dim() not in (1, 2, 3):
        return None
    if positions.dim() == 1:
        positions = positions[None]
    if positions.dim() == 3 and positions.shape[0] not in (3, 4):
        return None
    if positions.shape[-1] != batch.length or batch.length == 1 or positions.shape[-2] not in (1, batch.rows):
        return None
    return positions.expand(*positions.shape[:-2], batch.rows, batch.length)


def _check_form(op: str, positions: Any, batch: _Batch) -> None:
    """Refuse positions that say nothing about these tokens, which a model that drops them would never notice."""
    if positions is None:
        return
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise type_error(op, "position_ids", "be an integer tensor", got)
    fits = positions.dim() > 2 or (
        positions.shape[-1] == batch.length and positions.shape[:-1].numel() in (1, batch.rows)
    )
    if not fits:
        must = f"have shape [T], [1, T] or [B, T] with B, T = {(batch.rows, batch.length)}"
        raise value_error(op, "position_ids", must, tuple(positions.shape))


def _from_positions(model: Any, op: str, call: Call, batch: _Batch) -> Optional[Tensor]:
    cache = _cache_argument(call)
    if cache in internals.CACHE_KEYWORDS:
        return None
    _check_form(op, call.get("position_ids"), batch)
    positions = _positions(call, batch)
    if positions is None:
        return None
    starts = packing.starts_from_position_ids(positions)
    mask = call.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.shape == starts.shape else None
    wants_no_cache = cache is None and (getattr(model, "training", False) or call.get("use_cache") is False)
    # Beside a mask, or where a cache may be wanted, the values decide, on a GPU too; else a pack is a pack.
    decided_by_values = mask is not None or not wants_no_cache
    if not (packing.has_values(positions) if decided_by_values else packing.reads_values(positions)):
        return _from_traced_positions(op, call, batch, positions, starts, mask, cache)
    # Padding starts "sequences" of its own; what counts is where real tokens start.
    real_starts = starts if mask is None else starts & mask.bool()
    if bool((real_starts.sum(-1) <= 1).all()):
        if batch.rows > 1 or not wants_no_cache or (mask is not None and _masks_something(mask)):
            return None
    elif cache is not None:
        raise _cache_error(op, call, cache)
    _drop_mask(op, call, batch, keep_dense=not guards.uses_our_attention(model))
    return packing.cu_seqlens_from_position_ids(positions)


def _from_traced_positions(
    op: str, call: Call, batch: _Batch, positions: Tensor, starts: Tensor, mask: Optional[Tensor], cache: Optional[str]
) -> Optional[Tensor]:
    """The same decision without a look at values: by shapes, with the assumption written into the graph as a check."""
    if cache is not None or (batch.rows > 1 and mask is not None):
        real_starts = starts if mask is None else starts & mask.bool()
        torch._assert_async(
            (real_starts.sum(-1) <= 1).all(), "position_ids must not pack samples beside a cache or a padded batch"
        )
        return None
    _drop_mask(op, call, batch, keep_dense=True)
    return packing.cu_seqlens_from_position_ids(positions)


def _complete(model: Any, op: str, call: Call, signature: Signature, cu_seqlens: Tensor, batch: _Batch) -> Boundaries:
    rows, length, _ = batch
    seq_idx = packing.seq_idx_from_cu_seqlens(cu_seqlens, rows * length).view(rows, length)
    max_length = _longest(op, call, cu_seqlens, batch)
    config = internals.text_config(model)
    if (
        call.get("position_ids") is None
        and "position_ids" in signature.names
        and config is getattr(model, "config", None)
    ):
        call["position_ids"] = _count_positions(model, cu_seqlens, seq_idx)
    _check_positions(model, op, call, cu_seqlens, batch)
    if signature.any_keyword:
        if call.get("seq_idx") is None:
            call["seq_idx"] = seq_idx
        call.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
        for name in internals.LONGEST_KEYWORDS:
            # A trace would be good for the caller's number only, and another one cost a new graph.
            if torch.compiler.is_compiling() or call.get(name) is None:
                call[name] = max_length
    takes_cache = "use_cache" in signature.names or (signature.any_keyword and hasattr(config, "use_cache"))
    if takes_cache and call.get("use_cache") is None:
        call["use_cache"] = False
    return Boundaries(cu_seqlens, seq_idx, rows, length, max_length, op, type(config))


def _longest(op: str, call: Call, cu_seqlens: Tensor, batch: _Batch) -> int:
    """An upper bound of the longest sequence; raises where the call's own companions of cu_seq_lens_q contradict it."""
    if torch.compiler.is_compiling():
        return batch.length
    keys = call.get("cu_seq_lens_k")
    if keys is not None:
        keys = packing.check_cu_seqlens(op, keys, batch.rows * batch.length, batch.device, argument="cu_seq_lens_k")
    if not packing.reads_values(cu_seqlens):
        return batch.length
    if keys is not None and not packing.same_boundaries(keys, cu_seqlens):
        must = f"cut the row where the samples end, at {packing.brief_offsets(cu_seqlens)}"
        raise value_error(op, "cu_seq_lens_k", must, packing.brief_offsets(keys))
    longest = int(torch.diff(cu_seqlens).max()) if cu_seqlens.shape[0] > 1 else 0
    for name in internals.LONGEST_KEYWORDS:
        if call.get(name) is not None and int(call[name]) < longest:
            raise value_error(op, name, f"be at least the longest sample ({longest})", int(call[name]))
    return longest


def _check_positions(model: Any, op: str, call: Call, cu_seqlens: Tensor, batch: _Batch) -> None:
    """Refuse positions with which the model itself would not keep the samples apart.

    Attention through a mask (eager, sdpa, flex) is cut by transformers where the text row of position_ids starts again,
    and by nothing else.
    """
    attention = guards.attention_name(model)
    if not internals.has_attention(internals.text_config(model)):
        return
    if not guards.facts(model).takes_positions:
        must = "be something the model takes: it counts positions through the whole row; use padded batches"
        raise value_error(op, "position_ids", must, "a packed batch")
    if attention not in internals.MASK_ATTENTION:
        return
    model_type = internals.model_type(internals.text_config(model))
    if model_type in internals.MASK_WITHOUT_POSITIONS:
        must = f"be this kernel in a packed call, because {model_type} builds its attention mask without position_ids"
        raise value_error(op, "attn_implementation", must, attention)
    positions = _positions(call, batch)
    if positions is None or (positions.dim() == 3 and positions.shape[0] == 3):
        got = None if positions is None else "3 rows without a text row"
        raise value_error(op, "position_ids", f"hold text positions in a packed call under {attention} attention", got)
    if packing.reads_values(positions):
        first = cu_seqlens[cu_seqlens < batch.rows * batch.length].long()
        if not bool(packing.starts_from_position_ids(positions).reshape(-1)[first].all()):
            must = f"start again at each sample in a packed call under {attention} attention"
            raise value_error(op, "position_ids", must, positions.tolist())


def _count_positions(model: Any, cu_seqlens: Tensor, seq_idx: Tensor) -> Tensor:
    """``[B, T]``: each token's place in its sequence. Label -1 (tail padding) reads the last offset."""
    index = torch.arange(seq_idx.numel(), device=seq_idx.device).view(seq_idx.shape)
    return index - cu_seqlens[seq_idx.long()] + internals.first_position(model)
