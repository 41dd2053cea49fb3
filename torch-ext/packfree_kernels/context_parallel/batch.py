"""One packed row, cut into the shards of the ranks."""

from itertools import accumulate
from typing import Any, Dict, Mapping, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import packing
from .._checks import is_integer, type_error, value_error
from .switch import group_of

_OP = "shard_batch"
# What tells the boundaries of the whole row; its shard is told by positions or labels.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
_WHOLE = (*_OFFSETS, "max_length_q", "max_length_k")
_IGNORED = -100  # the label that no loss counts


def shard_batch(
    batch: Mapping[str, Any], group: Any = None, lengths: Optional[Sequence[int]] = None
) -> Dict[str, Any]:
    """This rank's shard of one packed row, for a model's call in :func:`sequence_parallel`.

    Args:
        batch: what a flattening collator returns, the same on every rank: ``input_ids`` ``[1, T]`` (or
            ``inputs_embeds`` ``[1, T, D]``); ``position_ids`` ``[1, T]`` (also 3 or 4 such rows), ``seq_idx`` and
            ``cu_seq_lens_q`` as they are there; ``labels``; an ``attention_mask`` and other tensors ``[1, T]``. What is
            no tensor is handed on.
        group: of the ranks that share the row, as for :func:`sequence_parallel`.
        lengths: tokens of each rank's shard; None: as equal as they can be, the first ranks one token longer.

    Returns:
        The shard's call. Boundaries are told by its part of the positions if these tell all, else also by offsets of
        the whole row. Beside ``labels`` stand ``shift_labels``, for each token the label of the next one in the whole
        row: labels that are shifted inside a shard lose the one behind its end.

    Raises:
        TypeError, ValueError: another batch than that, boundaries that disagree, or lengths that do not fit.
    """
    group = group_of(_OP, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if not isinstance(batch, Mapping):
        raise type_error(_OP, "batch", "be a mapping of a forward's keywords", type(batch).__name__)
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    tokens = batch.get(name)
    if not isinstance(tokens, Tensor) or tokens.dim() != (2 if name == "input_ids" else 3) or tokens.shape[0] != 1:
        got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise value_error(_OP, name, "hold one row [1, T]", got)
    total = tokens.shape[1]
    begin, end = _cut(total, rank, ranks, lengths)
    shard = {}
    for key, value in _told(batch, total).items():
        shard[key] = value[:, begin:end] if key == "inputs_embeds" else _part(key, value, total, begin, end)
    if isinstance(batch.get("labels"), Tensor) and batch.get("shift_labels") is None:
        shifted = torch.nn.functional.pad(batch["labels"].reshape(1, -1)[:, 1:], (0, 1), value=_IGNORED)
        shard["shift_labels"] = shifted[:, begin:end]
    return shard


def _cut(total: int, rank: int, ranks: int, lengths: Optional[Sequence[int]]) -> Sequence[int]:
    """The first token of this rank, and the one after its last."""
    if lengths is None:
        lengths = [total // ranks + (place < total % ranks) for place in range(ranks)]
    elif not isinstance(lengths, (list, tuple)) or not all(is_integer(length) for length in lengths):
        raise type_error(_OP, "lengths", "be a list of ints", type(lengths).__name__)
    if len(lengths) != ranks or min(lengths) < 0 or sum(lengths) != total:
        must = f"hold 0 or more of the {total} tokens for each of the {ranks} ranks"
        raise value_error(_OP, "lengths", must, list(lengths)[:8])
    ends = [0, *accumulate(lengths)]
    return ends[rank], ends[rank + 1]


def _told(batch: Mapping[str, Any], total: int) -> Dict[str, Any]:
    """``batch`` with no more boundaries than tell all samples: positions alone if they do, else offsets too."""
    given = {key: value for key, value in batch.items() if value is not None and key not in _WHOLE}
    offsets = [batch[name] for name in _OFFSETS if batch.get(name) is not None]
    labels, positions = given.pop("seq_idx", None), given.get("position_ids")
    if not offsets and labels is None:
        return given
    host = torch.device("cpu")
    found = packing.resolve_packing(_OP, 1, total, host, cu_seqlens=offsets[0] if offsets else None, seq_idx=labels)
    for other in offsets[1:]:
        packing.resolve_packing(_OP, 1, total, host, cu_seqlens=other, seq_idx=_labels_of(found.cu_seqlens, total))
    cu_seqlens = torch.cat([found.cu_seqlens, torch.tensor([total], dtype=torch.int32)])  # padding is a sample
    counted = None if positions is None else packing.cu_seqlens_from_position_ids(positions.cpu())
    if counted is None or not packing.same_boundaries(counted, cu_seqlens):
        given["cu_seq_lens_q"] = cu_seqlens
    return given


def _labels_of(cu_seqlens: Tensor, total: int) -> Tensor:
    return packing.seq_idx_from_cu_seqlens(cu_seqlens, total)


def _part(key: str, value: Any, total: int, begin: int, end: int) -> Any:
    if not isinstance(value, Tensor) or key in ("cu_seq_lens_q", "num_items_in_batch"):
        return value
    if value.shape[-1:] != (total,):
        raise value_error(_OP, key, f"have one entry for each of the {total} tokens", f"shape {tuple(value.shape)}")
    return value[..., begin:end]
