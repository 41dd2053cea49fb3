"""Whether a model's forward is packed, and where: decided once, at the outermost forward.

The keywords of the call are completed in place, so that every layer is told the same thing in each spelling.
"""

from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _sharing, packing
from .._checks import value_error
from . import completion, guards, internals, spellings
from .context import Boundaries
from .functions import supported
from .spellings import Batch, Call, Mask, Signature

__all__ = ["Signature", "boundaries_of_call"]

_CUT_BY_A_LOADER = (
    " (a loader that dispatches batches cuts each tensor to its first rows: with an IterableDataset pass "
    "accelerator_config={'dispatch_batches': False} to TrainingArguments)"
)


class _Told(NamedTuple):
    """Offsets ``[N + 1]`` over the tokens, and the argument that told them."""

    cu_seqlens: Tensor
    argument: str


def boundaries_of_call(model: Any, call: Call, signature: Signature) -> Optional[Boundaries]:
    """The boundaries of ``model.forward(**call)``, or None if the call is not packed and stays as it is.

    Packed is a call with ``seq_idx``, ``cu_seq_lens_q`` or an ``attention_mask`` of sample numbers; and one whose
    ``position_ids`` start again inside a row. Position ids of one row that never start again count as one packed sample
    in training and where ``use_cache=False``; otherwise the caller may want a cache back, and the stock path gives one.

    A packed call gets whichever boundary keywords are missing (where the model takes any keyword), ``position_ids`` if
    they are missing and can be known, ``use_cache=False`` if unset, and loses an ``attention_mask`` that masks nothing.

    Raises:
        TypeError, ValueError: boundaries that are malformed or disagree; a keyword that tells them and is read by
            nobody; a cache or an ``attention_mask`` that masks something beside a pack; a model that cannot be packed.
    """
    batch = spellings.batch_of(call)
    if batch is None or batch.tokens == 0 or not supported(batch.device):
        return None
    if any(call.get(name) is not None for name in internals.PAGED_KEYWORDS):
        return None
    op = type(model).__name__
    spellings.refuse_foreign_keywords(op, call, signature)
    positions = spellings.read_positions(op, call, batch)
    mask = spellings.read_mask(op, call, batch)
    _forget_cut_offsets(op, call, positions, mask)
    told = _told(op, call, batch, mask)
    if told is not None:
        cu_seqlens = _beside_positions(op, call, batch, told, positions, mask)
        if not _allows_packing(op, call, cu_seqlens, batch):
            for name in internals.BOUNDARY_KEYWORDS:
                call.pop(name, None)
            return None
        if mask.numbers is not None:
            call["attention_mask"] = None
        else:
            _drop_mask(op, call, mask)
    else:
        cu_seqlens = _counted(model, op, call, batch, positions, mask)
        if cu_seqlens is None:
            completion.refuse_lone_longest(op, call, batch)
            return None
    if guards.why_not_packed(model):
        if _one_sample_a_row(cu_seqlens, batch):
            return None
        guards.refuse_packed(model)
    return completion.complete(model, op, call, signature, cu_seqlens, batch)


def _one_sample_a_row(cu_seqlens: Tensor, batch: Batch) -> bool:
    """Whether it is known that nothing is packed; what is no pack needs no boundaries and is not refused."""
    if not packing.reads_values(cu_seqlens):
        return False
    ends = torch.unique_consecutive(cu_seqlens).tolist()
    return ends == list(range(0, batch.tokens + 1, batch.length))


# ---- boundaries that are told ----


def _forget_cut_offsets(op: str, call: Call, positions: Optional[Tensor], mask: Mask) -> None:
    """Take offsets that hold no sample out of the call where something whole beside them tells the samples."""
    cut = [name for name in internals.OFFSET_KEYWORDS if spellings.holds_no_sample(call.get(name))]
    if not cut:
        return
    # Positions that never start again may be those of one sample or of the whole row: the longest sample tells.
    positions_tell = positions is not None and call.get("max_length_q") is not None
    if call.get("seq_idx") is None and mask.numbers is None and not positions_tell:
        raise value_error(op, cut[0], "hold the end of each sample" + _CUT_BY_A_LOADER, "a single offset")
    for name in internals.OFFSET_KEYWORDS:
        call.pop(name, None)


def _told(op: str, call: Call, batch: Batch, mask: Mask) -> Optional[_Told]:
    """What ``cu_seq_lens_q`` (or ``_k`` alone), ``seq_idx`` and sample numbers say together; None without any."""
    offsets = _offsets(op, call, batch)
    told = offsets[0] if offsets else None
    if call.get("seq_idx") is not None:
        labels = packing.resolve_packing(op, batch.rows, batch.length, batch.device, seq_idx=call["seq_idx"])
        told = _agreed(op, told, _Told(labels.cu_seqlens, "seq_idx"))
    for other in offsets[1:]:
        told = _agreed(op, told, other)
    if mask.numbers is not None:
        labels = spellings.labels_of_numbers(mask.numbers)
        labels = packing.resolve_packing(op, batch.rows, batch.length, batch.device, seq_idx=labels)
        told = _agreed(op, told, _Told(labels.cu_seqlens, "attention_mask"), batch, mask.real)
    return told


def _offsets(op: str, call: Call, batch: Batch) -> List[_Told]:
    found = []
    for name in internals.OFFSET_KEYWORDS:
        if call.get(name) is not None:
            offsets = packing.check_cu_seqlens(op, call[name], batch.tokens, batch.device, argument=name)
            packing.check_rows_are_cut(op, offsets, batch.rows, batch.length, name, hint=_CUT_BY_A_LOADER)
            found.append(_Told(offsets, name))
    return found


def _agreed(
    op: str, told: Optional[_Told], other: _Told, batch: Optional[Batch] = None, real: Optional[Tensor] = None
) -> _Told:
    """``told``, with which ``other`` must agree where values may be read, on the tokens that are ``real`` if given."""
    if told is None:
        return other
    if not (packing.reads_values(told.cu_seqlens) and packing.reads_values(other.cu_seqlens)):
        return told
    if real is None:
        same = packing.same_boundaries(told.cu_seqlens, other.cu_seqlens)
    else:
        first, second = (spellings.starts_of_offsets(cut.cu_seqlens, batch) for cut in (told, other))
        same = torch.equal(first & real, second & real) and not real.reshape(-1)[int(told.cu_seqlens[-1]) :].any()
    if not same:
        must = f"cut the row where {told.argument} {packing.brief_offsets(told.cu_seqlens)} does"
        raise value_error(op, other.argument, must, f"cuts at {packing.brief_offsets(other.cu_seqlens)}")
    return told


def _beside_positions(
    op: str, call: Call, batch: Batch, told: _Told, positions: Optional[Tensor], mask: Mask
) -> Tensor:
    """The told offsets, which ``position_ids`` beside them must not contradict (where values may be read).

    Offsets may cut where positions count on, through the whole row, say. Samples that positions show behind the last
    offset are kept apart too: its end may have been forgotten, and on padding it makes no difference.
    """
    cu_seqlens = told.cu_seqlens
    if positions is None or not (packing.reads_values(cu_seqlens) and packing.reads_values(positions)):
        return cu_seqlens
    starts = spellings.starts_of_offsets(cu_seqlens, batch)
    if told.argument == "attention_mask":
        _check_numbers_count(op, mask, starts, positions)
        return cu_seqlens
    end = int(cu_seqlens[-1])
    again = (spellings.restarts(positions) & ~starts).reshape(-1)[:end]
    if bool(again.any()):
        must = f"cut the row where position_ids start again, at token {int(again.nonzero()[0])}{_CUT_BY_A_LOADER}"
        raise value_error(op, told.argument, must, packing.brief_offsets(cu_seqlens))
    behind = packing.starts_from_position_ids(positions).reshape(-1)[end:].nonzero().squeeze(-1) + end
    if call.get("seq_idx") is not None or not behind.numel():
        return cu_seqlens
    together = torch.cat([cu_seqlens, behind, behind.new_tensor([batch.tokens])]).unique().to(torch.int32)
    return _sharing.own(together, batch.tokens)


def _check_numbers_count(op: str, mask: Mask, starts: Tensor, positions: Tensor) -> None:
    """Positions beside sample numbers start again at each sample, and nowhere else."""
    _, only_falls = packing.row_of_positions(positions)
    counted = spellings.real_starts(positions, mask.real)
    wrong = mask.real & (counted & ~starts if only_falls else counted != starts)
    if bool(wrong.any()):
        row, token = (int(value) for value in wrong.nonzero()[0])
        must = "number the samples that position_ids count"
        raise value_error(op, "attention_mask", must, f"another sample at row {row}, token {token}")


# ---- boundaries that positions count ----


def _counted(
    model: Any, op: str, call: Call, batch: Batch, positions: Optional[Tensor], mask: Mask
) -> Optional[Tensor]:
    """Offsets that ``position_ids`` count, or None where they count no pack."""
    cache = _cache_argument(call)
    wants_no_cache = cache is None and (getattr(model, "training", False) or call.get("use_cache") is False)
    if positions is None or (batch.length == 1 and not wants_no_cache):
        return None
    if mask.prepared and spellings.has_cache(call):
        return None  # generate() prepares masks for static caches, and what was padding is only in them
    # transformers' own attention honours such a mask, whatever it says.
    honoured = mask.prepared and not guards.uses_our_attention(model)
    several = (spellings.real_starts(positions, mask.real).sum(-1) > 1).any()
    # Beside a mask, or where a cache may be wanted, the values decide, on a GPU too; else a pack is a pack.
    decided_by_values = mask.given or not wants_no_cache
    if packing.has_values(positions) if decided_by_values else packing.reads_values(positions):
        if not bool(several):
            as_one_sample = batch.rows == 1 and wants_no_cache and not honoured
            if not as_one_sample or (mask.real is not None and _hides_tokens(mask.real)):
                return None
        elif cache is not None:
            raise _cache_error(op, call, cache)
    elif cache is not None or (batch.rows > 1 and mask.real is not None):
        torch._assert_async(~several, "position_ids must not pack samples beside a cache or a padded batch")
        return None
    if honoured:
        completion.check_prepared_mask(op, call["attention_mask"], positions)
    else:
        _drop_mask(op, call, mask)
    return packing.cu_seqlens_from_position_ids(positions)


# ---- what stands beside a pack ----


def _cache_argument(call: Call) -> Optional[str]:
    for name in internals.CACHE_KEYWORDS:
        if call.get(name) is not None:
            return name
    return "use_cache" if call.get("use_cache") else None


def _cache_error(op: str, call: Call, cache: str) -> ValueError:
    got = repr(call[cache]) if cache == "use_cache" else type(call[cache]).__name__
    return value_error(op, cache, "be left out or off in a packed call (a cache holds one sample a row)", got)


def _allows_packing(op: str, call: Call, cu_seqlens: Tensor, batch: Batch) -> bool:
    """False for one sample a row that wants a cache: the stock path serves it. A cache beside more is an error."""
    cache = _cache_argument(call)
    if cache is None:
        return True
    rows = list(range(0, batch.tokens + 1, batch.length))
    if packing.reads_values(cu_seqlens) and torch.unique_consecutive(cu_seqlens).tolist() == rows:
        return False
    raise _cache_error(op, call, cache)


def _hides_tokens(real: Tensor) -> bool:
    """Whether a mask hides a token. While tracing, the graph gets the check and fails where it does.

    On a GPU this waits for the mask: a failed check would end the process.
    """
    if packing.has_values(real):
        return not bool(real.all())
    torch._assert_async(real.all(), "attention_mask must mask nothing in a packed call")
    return False


def _drop_mask(op: str, call: Call, mask: Mask) -> None:
    """Take an ``attention_mask`` that masks nothing out of a packed call and refuse any other."""
    if mask.prepared:
        got = f"a {type(call['attention_mask']).__name__} of another shape"
    elif mask.real is not None and _hides_tokens(mask.real):
        got = "one that masks tokens"
    else:
        if call.get("attention_mask") is not None:
            call["attention_mask"] = None
        return
    raise value_error(op, "attention_mask", "be left out or mask nothing in a packed call", got)
