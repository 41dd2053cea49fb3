"""A packed call gets what its layers need to be told, and is checked against what the model does with it."""

from typing import Any

import torch
from torch import Tensor

from .. import _sharing, packing
from .._checks import value_error
from . import guards, internals, spellings
from .context import Boundaries
from .spellings import Batch, Call, Signature

# A score this far below another has weight 0 in every dtype, so an additive mask hides there.
_HIDDEN = -1e3


def complete(model: Any, op: str, call: Call, signature: Signature, cu_seqlens: Tensor, batch: Batch) -> Boundaries:
    """Fill in the boundary keywords, positions and ``use_cache`` of a packed call that are missing.

    Raises:
        ValueError: companions of the offsets contradict them; positions or a model that would mix the samples.
    """
    rows, length, _ = batch
    # What layers make of them ends with this forward and its backward, however long the caller keeps the batch.
    cu_seqlens = _sharing.alias(cu_seqlens)
    seq_idx = packing.seq_idx_from_cu_seqlens(cu_seqlens, batch.tokens).view(rows, length)
    if rows == 1:
        packing.tell_labels(seq_idx, cu_seqlens)
    max_length = _longest(op, call, cu_seqlens, batch)
    config = internals.text_config(model)
    if call.get("position_ids") is None and may_count_positions(model, call, signature):
        call["position_ids"] = count_positions(model, cu_seqlens, seq_idx)
    _check_positions(model, op, call, cu_seqlens, batch)
    # Labels of one row say no more than these offsets; those of several tell padding between the rows, too.
    if signature.any_keyword if call.get("seq_idx") is None else rows == 1:
        call["seq_idx"] = seq_idx
    if signature.any_keyword:
        call.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
        for name in internals.LONGEST_KEYWORDS:
            # A trace would be good for the caller's number only, and another one cost a new graph.
            if torch.compiler.is_compiling() or call.get(name) is None:
                call[name] = max_length
    switch_cache_off(model, call, signature)
    if rows > 1 and call.get("seq_idx") is not None:
        # Padding at the end of a row that is not the last is a sequence of its own in the offsets.
        seq_idx = torch.where(call["seq_idx"].to(seq_idx.device) < 0, -1, seq_idx)
    return Boundaries(cu_seqlens, seq_idx, rows, length, max_length, op, type(config))


def switch_cache_off(model: Any, call: Call, signature: Signature) -> None:
    """``use_cache=False`` where it is unset and means something to ``model``."""
    takes = hasattr(internals.text_config(model), "use_cache")
    if ("use_cache" in signature.names or (signature.any_keyword and takes)) and call.get("use_cache") is None:
        call["use_cache"] = False


def may_count_positions(model: Any, call: Call, signature: Signature) -> bool:
    """Whether ``model`` takes positions that each sample's tokens have by their order alone, which images do not."""
    takes = "position_ids" in signature.names or (signature.any_keyword and guards.facts(model).takes_positions)
    if not takes or internals.text_config(model) is getattr(model, "config", None):
        return takes
    others = (name for name in call if call[name] is not None and name not in internals.TEXT_KEYWORDS)
    return call.get("input_ids") is not None and not any(isinstance(call[name], Tensor) for name in others)


def _longest(op: str, call: Call, cu_seqlens: Tensor, batch: Batch) -> int:
    """An upper bound of the longest sequence; raises where the call's own ``max_length_*`` is below it."""
    if torch.compiler.is_compiling() or not packing.reads_values(cu_seqlens):
        return batch.length
    longest = int(torch.diff(cu_seqlens).max()) if cu_seqlens.shape[0] > 1 else 0
    for name in internals.LONGEST_KEYWORDS:
        if call.get(name) is not None and int(call[name]) < longest:
            raise value_error(op, name, f"be at least the longest sample ({longest})", int(call[name]))
    return longest


def refuse_lone_longest(op: str, call: Call, batch: Batch) -> None:
    """Refuse the length of the longest sample where nothing else tells of samples shorter than the row."""
    for name in internals.LONGEST_KEYWORDS:
        if isinstance(call.get(name), int) and call[name] < batch.length:
            must = "come with boundaries (cu_seq_lens_q, seq_idx or position_ids that start again)"
            raise value_error(op, name, must, f"{call[name]} for rows of {batch.length} tokens without any")


def _check_positions(model: Any, op: str, call: Call, cu_seqlens: Tensor, batch: Batch) -> None:
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
    positions = spellings.read_positions(op, call, batch)
    if positions is None or (positions.dim() == 3 and positions.shape[0] == 3):
        got = None if positions is None else "3 rows without a text row"
        raise value_error(op, "position_ids", f"hold text positions in a packed call under {attention} attention", got)
    if packing.reads_values(positions):
        first = cu_seqlens[cu_seqlens < batch.tokens].long()
        if not bool(packing.starts_from_position_ids(positions).reshape(-1)[first].all()):
            must = f"start again at each sample in a packed call under {attention} attention"
            raise value_error(op, "position_ids", must, positions.tolist())


def count_positions(model: Any, cu_seqlens: Tensor, seq_idx: Tensor) -> Tensor:
    """``[B, T]``: each token's place in its sequence. Label -1 (tail padding) reads the last offset."""
    index = torch.arange(seq_idx.numel(), device=seq_idx.device).view(seq_idx.shape)
    return index - cu_seqlens[seq_idx.long()] + internals.first_position(model, guards.facts(model).counter)


def check_prepared_mask(op: str, mask: Any, positions: Tensor) -> None:
    """A mask ``[B, H, T, T]`` made by the caller must hide the samples of a pack from each other.

    Attention honours such a mask, and positions that repeat are no pack to it (several ends of one beginning, say); but
    they start samples for the layers that are no attention. While tracing, the graph gets the check.

    Raises:
        ValueError: it shows one sample to another, or is no such tensor.
    """
    if isinstance(mask, dict):
        for part in mask.values():
            if part is not None:
                check_prepared_mask(op, part, positions)
        return
    length = positions.shape[-1]
    if not isinstance(mask, Tensor) or mask.dim() != 4 or tuple(mask.shape[-2:]) != (length, length):
        got = f"a {type(mask).__name__} of another shape"
        raise value_error(op, "attention_mask", "be left out or mask nothing in a packed call", got)
    sample = packing.starts_from_position_ids(positions).cumsum(-1)
    visible = mask > _HIDDEN if mask.is_floating_point() else mask != 0
    mixes = (visible & (sample[:, None, :, None] != sample[:, None, None, :])).any()
    if not packing.has_values(mask):
        torch._assert_async(~mixes, "attention_mask must hide the samples of a packed call from each other")
    elif bool(mixes):
        must = "hide the samples that position_ids count from each other, because layers besides attention cut there"
        raise value_error(op, "attention_mask", must, f"one of shape {tuple(mask.shape)} that shows one to another")
