"""What each argument of a forward says about its samples, read and checked by itself.

A batch tells its samples by offsets (``cu_seq_lens_q``), labels (``seq_idx``), sample numbers in a 2-D
``attention_mask``, or ``position_ids`` that start again. How they decide together is in ``boundaries.py``.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import type_error, value_error
from .._dtypes import dtype_name
from . import internals

Call = Dict[str, Any]


class Signature(NamedTuple):
    """What a forward accepts: its parameter names in order, and whether it takes any keyword."""

    names: Tuple[str, ...]
    any_keyword: bool


class Batch(NamedTuple):
    """The tokens of a call: B rows of T, and where they are."""

    rows: int
    length: int
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class Mask(NamedTuple):
    """What an ``attention_mask`` says about the tokens of the call.

    Attributes:
        real: bool ``[B, T]``, False on padding; None without a 2-D mask.
        numbers: integers ``[B, T]``, the sample of each token and 0 on padding; None if the mask is no pack.
        prepared: it has another form (four axes, a dictionary, ...) and only attention can read it.
    """

    real: Optional[Tensor] = None
    numbers: Optional[Tensor] = None
    prepared: bool = False

    @property
    def given(self) -> bool:
        return self.real is not None or self.prepared


def batch_of(call: Call) -> Optional[Batch]:
    tokens, dims = call.get("input_ids"), 2
    if tokens is None:
        tokens, dims = call.get("inputs_embeds"), 3
    # Choices [B, C, T], say, are no rows; the model makes some of them and calls a model inside it.
    if not isinstance(tokens, Tensor) or tokens.dim() != dims:
        return None
    return Batch(tokens.shape[0], tokens.shape[1], tokens.device)


def has_cache(call: Call) -> bool:
    """Whether the call hands over a cache, full or empty."""
    return any(call.get(name) is not None for name in internals.CACHE_KEYWORDS)


def refuse_foreign_keywords(op: str, call: Call, signature: Signature) -> None:
    """Refuse keywords of other packages that tell boundaries: the model would drop them without a word."""
    for name, instead in internals.FOREIGN_BOUNDARY_KEYWORDS.items():
        if call.get(name) is not None and name not in signature.names:
            must = f"be left out: {op} does not read it; pass {instead}"
            raise value_error(op, name, must, _brief(call[name]))


def _brief(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


# ---- position_ids ----


def read_positions(op: str, call: Call, batch: Batch) -> Optional[Tensor]:
    """``position_ids`` as ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; None without any and where they cannot tell.

    Positions ``[T]`` become one row in the call too, since rotary embeddings want rows.

    Raises:
        TypeError, ValueError: positions that say nothing about these tokens. Beside a cache, where they may be meant
            for others too, the model is left to judge.
    """
    positions = call.get("position_ids")
    if positions is None:
        return None
    unfit = _unfit(op, positions, batch)
    if unfit is not None:
        if has_cache(call):
            return None
        raise unfit
    rows, length, _ = batch
    if positions.dim() == 1:
        call["position_ids"] = positions = positions[None]
    if positions.dtype not in (torch.int32, torch.int64):
        positions = positions.long()  # narrow ones would wrap around where they are compared
    positions = positions.expand(*positions.shape[:-2], rows, length)
    if positions.dim() == 3 and positions.shape[0] not in (3, 4):
        _refuse_other_rows(op, positions)
        return None
    return positions


def _unfit(op: str, positions: Any, batch: Batch) -> Optional[Exception]:
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        got = dtype_name(positions) if isinstance(positions, Tensor) else type(positions).__name__
        return type_error(op, "position_ids", "be an integer tensor", got)
    rows, length, _ = batch
    shape = tuple(positions.shape)
    if len(shape) in (1, 2, 3) and shape[-1] == length and (len(shape) == 1 or shape[-2] in (1, rows)):
        return None
    must = f"have shape [T], [1, T], [B, T], [3, B, T] or [4, B, T] with B, T = {(rows, length)}"
    return value_error(op, "position_ids", must, shape)


def _refuse_other_rows(op: str, positions: Tensor) -> None:
    """Some models have more axes of positions; which row would tell the samples apart is theirs to know."""
    falls = positions[0, :, 1:] < positions[0, :, :-1]
    if packing.reads_values(positions) and bool(falls.any()):
        raise value_error(op, "position_ids", "have 1, 3 or 4 rows in a packed call", tuple(positions.shape))


def real_starts(positions: Tensor, real: Optional[Tensor]) -> Tensor:
    """Mark the first token of each sample, bool ``[B, T]``, comparing each token with the real one before it.

    The position of a token behind padding counts on by one (positions that count tokens) or by the distance (positions
    that count places), or starts a sample. Where a prompt ends in padding, generate() counts on from the padding's own
    position; that is no start either unless it leads to where the row's samples begin. Padding starts nothing.
    """
    if real is None:
        return packing.starts_from_position_ids(positions)
    row, only_falls = packing.row_of_positions(positions)
    index = torch.arange(row.shape[-1], device=row.device).expand_as(row)
    before = previous_real(real)
    step = row - row.gather(-1, before.clamp(min=0))
    continues = step >= 0 if only_falls else (step == 1) | (step == index - before)
    first = row.gather(-1, real.int().argmax(-1, keepdim=True))
    behind_padding = torch.cat([torch.zeros_like(real[:, :1]), ~real[:, :-1] & (row[:, 1:] == row[:, :-1] + 1)], -1)
    continues = continues | (behind_padding & (row != first))
    return real & ~(continues & (before >= 0))


def previous_real(real: Tensor) -> Tensor:
    """int64 ``[B, T]``: the place of the last real token before each token, -1 where there is none."""
    index = torch.arange(real.shape[-1], device=real.device).expand_as(real)
    last = torch.where(real, index, -1).cummax(-1).values
    return torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], -1)


def restarts(positions: Tensor) -> Tensor:
    """Where positions begin again, bool ``[B, T]``: they fall, or stay at the row's first one (one-token samples).

    Narrower than where samples start by positions alone: explicit boundaries may hold a sample whose positions jump.
    """
    row, only_falls = packing.row_of_positions(positions)
    step = row[:, 1:] - row[:, :-1]
    again = step < 0 if only_falls else (step < 0) | ((step == 0) & (row[:, 1:] == row[:, :1]))
    return torch.cat([torch.zeros_like(row[:, :1], dtype=torch.bool), again], -1)


# ---- attention_mask ----


def read_mask(op: str, call: Call, batch: Batch) -> Mask:
    """What ``attention_mask`` says. Numbers that are the same through each row become an ordinary mask of 0 and 1.

    A cache puts more columns in front of those of the call. While tracing, a mask of numbers cannot be told from an
    ordinary one, so the graph gets a check that it is ordinary.

    Raises:
        TypeError, ValueError: neither a mask nor sample numbers.
    """
    mask = call.get("attention_mask")
    if mask is None:
        return Mask()
    rows, length, _ = batch
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < length:
        return Mask(prepared=True)
    if mask.dtype != torch.bool and length > 1:
        if not packing.has_values(mask):
            ordinary = ((mask == 0) | (mask == 1)).all()
            torch._assert_async(
                ordinary, "attention_mask must hold 0 and 1 while tracing; pass sample numbers as seq_idx"
            )
        elif _numbers_samples(op, mask):
            _check_numbers(op, mask, length)
            numbers = mask.to(batch.device)
            return Mask(real=numbers != 0, numbers=numbers)
        elif not mask.is_floating_point() and int(mask.max()) > 1:
            call["attention_mask"] = mask = (mask != 0).to(mask.dtype)
    if mask.shape[1] > length and not has_cache(call):
        return Mask(prepared=True)
    return Mask(real=mask[:, -length:].to(batch.device, torch.bool))


def _numbers_samples(op: str, mask: Tensor) -> bool:
    """Whether a row of the mask ``[B, L]`` tells several samples apart; raises where it cannot be a mask either."""
    if mask.is_floating_point():
        other = mask[(mask != 0) & (mask != 1)]
        if other.numel():
            raise type_error(op, "attention_mask", "hold 0 and 1, or sample numbers as integers", float(other[0]))
        return False
    lowest, highest = torch.stack(mask.aminmax()).tolist()
    if lowest < 0:
        raise value_error(op, "attention_mask", "hold 0 and 1, or sample numbers from 1 on", lowest)
    if highest <= 1:
        return False
    smallest = torch.where(mask == 0, mask.max(), mask).amin(-1)
    return bool((smallest < mask.amax(-1)).any())


def _check_numbers(op: str, mask: Tensor, length: int) -> None:
    """Sample numbers ``[B, T]`` never decrease along a row; padding lies between samples, not inside one."""
    if mask.shape[1] != length:
        must = f"have one column for each of the {length} tokens where it holds sample numbers"
        raise value_error(op, "attention_mask", must, f"shape {tuple(mask.shape)}")
    before = previous_real(mask != 0)
    last = mask.gather(-1, before.clamp(min=0))
    follows = (mask != 0) & (before >= 0)
    falls = follows & (mask < last)
    index = torch.arange(length, device=mask.device)
    holes = follows & (mask == last) & (before < index - 1)
    for bad, must in (
        (falls, "hold sample numbers that never decrease along a row"),
        (holes, "hold sample numbers without padding inside a sample"),
    ):
        if bool(bad.any()):
            row, token = (int(value) for value in bad.nonzero()[0])
            got = f"{int(mask[row, token])} after {int(last[row, token])} at row {row}, token {token}"
            raise value_error(op, "attention_mask", must, got)


def labels_of_numbers(numbers: Tensor) -> Tensor:
    """int32 labels ``[B, T]`` as ``seq_idx`` has them; a stretch of padding is a sequence of its own."""
    changes = numbers[:, 1:] != numbers[:, :-1]
    return torch.cat([torch.zeros_like(numbers[:, :1]), changes.cumsum(-1)], -1).to(torch.int32)


# ---- cu_seq_lens_q ----


def holds_no_sample(offsets: Any) -> bool:
    """Whether offsets have a single entry. A loader that cuts every tensor to its first row leaves them so."""
    if isinstance(offsets, Tensor):
        return offsets.dim() == 1 and offsets.shape[0] == 1
    return isinstance(offsets, (list, tuple)) and len(offsets) == 1


def starts_of_offsets(cu_seqlens: Tensor, batch: Batch) -> Tensor:
    """bool ``[B, T]``: the first token of each sequence, and of the padding behind the last offset; reads values."""
    starts = torch.zeros(batch.tokens, dtype=torch.bool, device=cu_seqlens.device)
    starts[cu_seqlens[cu_seqlens < batch.tokens].long()] = True
    return starts.view(batch.rows, batch.length)
