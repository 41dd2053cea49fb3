"""A forward whose row is a shard: one rank's part of a row that the ranks of a group share (``sequence_parallel``).

Whatever mixes tokens does so over all ranks: the functions of the table and our attention, which are given the shard's
``ContextParallel``. No boundary keyword is handed to the layers, which could only tell this rank's own; every layer
asks the running forward. What reads a row in another way is refused before the ranks exchange anything.
"""

import os
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import type_error, value_error
from ..context_parallel.agree import Shard, agree, fail
from ..context_parallel.switch import Switch
from ..flash_attn_varlen.api import flash_attn_varlen_func
from . import completion, counts, guards, head_kinds, internals, spellings
from .context import Boundaries
from .functions import supported
from .spellings import Batch, Call, Signature

_IGNORED = -100  # the label that no loss counts
_WAY_OUT = "Train it with data parallelism (DDP, FSDP, ZeRO), which keeps every row whole"
# Tensors that a shard's call may hold.
_KNOWN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "labels", "shift_labels")
_KNOWN += ("num_items_in_batch", *internals.BOUNDARY_KEYWORDS)


class Loss(NamedTuple):
    """What this rank's summand of the loss is made of.

    Attributes:
        function: transformers' loss of a causal language model.
        shift_labels: ``[1, t]``, for each token the label of the next.
        items: how many labels of all ranks count; None: those of this rank.
    """

    function: Any
    shift_labels: Tensor
    items: Any

    def of(self, output: Any) -> Any:
        """``output`` with the loss in it."""
        logits = output[0] if isinstance(output, tuple) else output.logits
        loss = self.function(
            logits=logits, labels=None, vocab_size=logits.shape[-1], shift_labels=self.shift_labels,
            num_items_in_batch=self.items,
        )  # fmt: skip
        return (loss, *output) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})


def boundaries_of_shard(
    model: Any, call: Call, signature: Signature, switch: Switch, summed: bool
) -> Tuple[Boundaries, Optional[Loss]]:
    """The boundaries of a forward on a shard, and its loss if there are labels, which are taken out of the call.

    ``summed``: losses of the ranks add up to that of the row. An engine of torch averages the means of the ranks.

    Raises (a rank that raises before the exchange makes all others raise in it):
        TypeError, ValueError, NotImplementedError: the model or an argument cannot be served on a shard.
    """
    op, group = type(model).__name__, switch.group
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: sequence_parallel must be left out under torch.compile: messages between ranks are not traced. "
            "Train the model without torch.compile"
        )
    try:
        _refuse_model(model)
        batch = _batch(op, call, signature)
        labels = _Labels.read(op, model, call, batch)
        shard, spelling = _shard(op, call, batch)
    except Exception:
        fail(group, _Labels.NUMBERS)
        raise
    told = labels.numbers()
    context, everyone = agree(op, group, shard, told, spelling | labels.spelling, switch.attention)
    if 0 in context.lengths:
        # Each of transformers' layers would have to take a row without tokens, and most do not.
        must = "hold a token or more on every rank that shares a row"
        raise value_error(op, "input_ids", must, list(context.lengths)[:8])
    offsets = context.offsets_on(batch.device)
    seq_idx = packing.seq_idx_from_cu_seqlens(offsets, batch.length)
    if shard.offsets is not None:
        _check_beside_offsets(op, call, context, batch)
    for name in internals.BOUNDARY_KEYWORDS:
        call.pop(name, None)
    if call.get("position_ids") is None and completion.may_count_positions(model, call, signature):
        call["position_ids"] = _positions(model, context, offsets, seq_idx)
    completion.switch_cache_off(model, call, signature)
    config_type = type(internals.text_config(model))
    here = Boundaries(offsets, seq_idx, 1, batch.length, batch.length, op, config_type, context)
    return here, labels.loss(context.rank, context.lengths, everyone, summed)


# ---- what is refused ----


def _refuse_model(model: Any) -> None:
    """Raises ValueError where a model reads a row in a way that does not reach over ranks."""
    why = _why_not(model)
    if why:
        raise ValueError(f"{guards.named(model)} cannot run on shards of a row (sequence_parallel): {why}. {_WAY_OUT}")


def _why_not(model: Any) -> str:
    config = internals.text_config(model)
    if not guards.concerns(model):
        return "nothing of it is served by packfree-kernels; load it with this kernel as attn_implementation"
    if guards.why_not_packed(model):
        return guards.why_not_packed(model)
    if internals.has_attention(config) and not guards.uses_our_attention(model):
        attention = guards.attention_name(model)
        return f"its attention is {attention!r}, which sees this rank's tokens only; load it with this kernel's name"
    if internals.has_attention(config) and not guards.facts(model).takes_positions:
        return "it counts positions through its row and takes no position_ids"
    if head_kinds.head_reads(type(model)) is not None:
        return "it gives one result for each sample, and samples may end on other ranks"
    rope = internals.table_of_a_length(model)
    if rope:
        return f"its rotary tables of rope type {rope!r} depend on the length of a sample, which other ranks have"
    names = {type(part).__name__ for part in model.modules()}
    for name in (*head_kinds.FIRST_TOKEN_MODULES, *counts.CLASSES):
        if name in names:
            return f"{name} reads a sample's first token or counts along it, and the sample may begin on another rank"
    if getattr(config, "output_router_logits", False):
        return "its balancing loss is a product of means over the whole row; set output_router_logits=False"
    return ""


def _batch(op: str, call: Call, signature: Signature) -> Batch:
    """The tokens of the call, in which nothing is left that reads a row and is not known here."""
    batch = spellings.batch_of(call)
    if batch is None or batch.rows != 1 or not supported(batch.device):
        tokens = call.get("input_ids", call.get("inputs_embeds"))
        got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise value_error(op, "input_ids", "hold one row [1, t] of tokens of a served device on a shard", got)
    spellings.refuse_foreign_keywords(op, call, signature)
    for name, value in call.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            raise value_error(op, name, "be left out on a shard, as it is not known what it is over ranks", "a tensor")
    for name in ("use_cache", "output_router_logits", "logits_to_keep", "output_attentions"):
        if call.get(name):
            raise value_error(op, name, "be left out or off on a shard of a row", call[name])
    for name in (*internals.CACHE_KEYWORDS, *internals.PAGED_KEYWORDS):
        if call.get(name) is not None:
            raise value_error(op, name, "be left out on a shard of a row", type(call[name]).__name__)
    mask = spellings.read_mask(op, call, batch)
    if mask.prepared or mask.numbers is not None or (mask.real is not None and not bool(mask.real.all())):
        must = "be left out or mask nothing on a shard (pass position_ids, and padding as samples of its own)"
        raise value_error(op, "attention_mask", must, "another")
    if call.get("attention_mask") is not None:
        call["attention_mask"] = None
    return batch


# ---- boundaries ----


def _shard(op: str, call: Call, batch: Batch) -> Tuple[Shard, int]:
    """What this rank's arguments tell of its shard, and a number for which they are."""
    positions = spellings.read_positions(op, call, batch)
    given = [call.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")]
    spelling = sum(2**place for place, there in enumerate([positions is not None, *given]) if there)
    if given[0] or given[1]:
        name = "cu_seq_lens_q" if given[0] else "cu_seq_lens_k"
        offsets = packing.check_cu_seqlens(op, call[name], 2**31 - 1, torch.device("cpu"), name).tolist()
        return Shard(batch.length, offsets=offsets), spelling
    if given[2]:
        labels = call["seq_idx"]
        packing.resolve_packing(op, 1, batch.length, batch.device, seq_idx=labels)  # its checks
        return _counted(labels, torch.diff(labels, dim=1) != 0, 0), spelling
    if positions is None:
        return Shard(batch.length), spelling
    row, only_falls = packing.row_of_positions(positions)
    if only_falls:
        must = "hold a row of text positions on a shard, or come with cu_seq_lens_q of the whole row"
        raise value_error(op, "position_ids", must, f"{positions.shape[0]} rows of an image's grid")
    return _counted(row, torch.diff(row, dim=1) != 1, 1), spelling


def _counted(row: Tensor, starts: Tensor, step: int) -> Shard:
    if not row.shape[1]:
        return Shard(0, step=step)  # agreed upon, then refused on every rank
    # One look at the values.
    first, last, *found = torch.cat([row[0, :1], row[0, -1:], starts[0].nonzero()[:, 0] + 1]).tolist()
    return Shard(row.shape[1], found, first, last, step)


def _check_beside_offsets(op: str, call: Call, context: Any, batch: Batch) -> None:
    """Positions and labels beside offsets of the whole row must not begin samples elsewhere (where values are read)."""
    positions, labels = spellings.read_positions(op, call, batch), call.get("seq_idx")
    starts = torch.zeros(1, batch.length, dtype=torch.bool)
    starts[0, [offset for offset in context.offsets[:-1] if offset < batch.length]] = True
    for name, again in (
        ("position_ids", None if positions is None else spellings.restarts(positions)),
        ("seq_idx", None if labels is None else torch.nn.functional.pad(torch.diff(labels, dim=1) != 0, (1, 0))),
    ):
        if again is not None and packing.reads_values(again) and bool((again & ~starts).any()):
            place = int((again & ~starts)[0].nonzero()[0])
            raise value_error(op, name, "begin samples where cu_seq_lens_q does", f"one at token {place} of the shard")


def _positions(model: Any, context: Any, offsets: Tensor, seq_idx: Tensor) -> Tensor:
    """``[1, t]``: each token's place in its sample, which may have begun on an earlier rank."""
    positions = completion.count_positions(model, offsets, seq_idx)
    if context.entering is not None:
        chain, place = context.entering
        positions = positions + (seq_idx == 0) * sum(chain.lengths[:place])
    return positions


# ---- labels ----


class _Labels(NamedTuple):
    """Labels of a shard: ``[1, t]`` each token's own, or (``shifted``) the next one's; None without any."""

    values: Optional[Tensor]
    shifted: bool
    items: Any
    function: Any

    NUMBERS = 2

    @staticmethod
    def read(op: str, model: Any, call: Call, batch: Batch) -> "_Labels":
        """Take the labels out of the call."""
        labels, shifted = call.pop("labels", None), call.pop("shift_labels", None)
        items = call.pop("num_items_in_batch", None)
        values = labels if shifted is None else shifted
        if values is None:
            return _Labels(None, False, items, None)
        name = "labels" if shifted is None else "shift_labels"
        function = internals.causal_loss(model)
        if function is None:
            must = "be left out on a shard, where causal language models alone have a loss; compute it from the logits"
            raise value_error(op, name, must, "a tensor")
        if not isinstance(values, Tensor) or tuple(values.shape) not in ((1, batch.length), (batch.length,)):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise type_error(op, name, f"be a tensor [1, {batch.length}] on this shard", got)
        return _Labels(values.view(1, -1), shifted is not None, items, function)

    @property
    def spelling(self) -> int:
        if self.values is None:
            return 0
        return 16 + 32 * self.shifted + 64 * (self.items is not None)

    def numbers(self) -> List[int]:
        """What the other ranks need: the first label, and how many count of those whose token is here."""
        if self.values is None or not self.values.shape[1]:
            return [_IGNORED, 0]
        own = self.values if self.shifted else self.values[:, 1:]
        return torch.stack([self.values[0, 0], (own != _IGNORED).sum()]).tolist()

    def loss(
        self, rank: int, lengths: Sequence[int], everyone: Sequence[Sequence[int]], summed: bool
    ) -> Optional[Loss]:
        if self.values is None:
            return None
        items, shifted = self.items, self.values
        firsts = [first for (first, _), length in zip(everyone, lengths) if length]
        if not self.shifted:
            behind = [first for (first, _), length in zip(everyone[rank + 1 :], lengths[rank + 1 :]) if length]
            next_label = self.values.new_full((1, 1), behind[0] if behind else _IGNORED)
            shifted = torch.cat([self.values[:, 1:], next_label], 1) if self.values.shape[1] else self.values
        if items is None and summed:
            items = sum(count for _, count in everyone)
            if not self.shifted:
                items += sum(first != _IGNORED for first in firsts[1:])
        return Loss(self.function, shifted, items)


# ---- attention ----


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    here: Boundaries,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    deterministic: Optional[bool] = None,
    **_: Any,
) -> Tuple[Tensor, None]:
    """One layer's attention on a shard, as transformers' entry of flash-style kernels does it on a row.

    Args:
        query, key, value: ``[1, H, t, K]``, ``[1, HK, t, K]`` and ``[1, HK, t, V]``.
        The others: as transformers passes them.

    Returns:
        ``[1, t, H, V]``, and None for the weights.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query, key, value = internals.cast_for_attention(module, query, key, value)
    if deterministic is None:
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    reach = -1 if sliding_window is None else sliding_window - 1
    out = flash_attn_varlen_func(
        query[0], key[0], value[0], here.cu_seqlens, dropout_p=dropout, softmax_scale=scaling,
        causal=module.is_causal if is_causal is None else is_causal, window_size=(reach, reach), softcap=softcap or 0.0,
        deterministic=deterministic, s_aux=s_aux, cp_context=here.shard,
    )  # fmt: skip
    return out[None], None
