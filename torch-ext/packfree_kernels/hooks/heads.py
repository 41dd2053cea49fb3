"""Heads that give one result a sample: on a pack they read each sample where they would read it alone.

A classification head reads one place of its row, or the mean over it; on a pack that would be one score for all
samples. Here the head runs on a batch of N rows of one place each: its base model computes the pack as ever, and what
that returns, hidden states ``[B, T, D]``, reaches the head as ``[N, 1, D]``: the last or first tokens of the samples,
or their means. The head's own code makes logits ``[N, num_labels]`` and a loss from them and N labels. Modules that
pool a row inside a base model (``BertPooler``) read the first tokens in the same way.

Which head reads what is a table in ``head_kinds.py``. What reads a row in another way is refused when it is called on a
pack. A model that the table does not know is refused if it returns one result for a row of several samples.
"""

import functools
import sys
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import value_error
from .._dtypes import accumulation_dtype
from . import context, head_kinds, internals
from .context import Boundaries
from .undo import UndoList

Call = Dict[str, Any]

_WAY_OUT = "Use padded batches (DataCollatorWithPadding) instead"


class Samples(NamedTuple):
    """The N samples of a pack, without empty sequences and padding.

    Attributes:
        index: int64 ``[N]``, which sequence of ``cu_seqlens`` each is.
        first: int64 ``[N]``, its first token among the ``B * T`` of the batch.
        end: int64 ``[N]``, the token after its last.
    """

    index: Tensor
    first: Tensor
    end: Tensor


class Reading(NamedTuple):
    """A head that has begun and has not called its base model yet.

    Attributes:
        shown: tensors that the head was given, one row for each sample.
        packed: those of the pack, which the base model gets in their place.
        pool: hidden states ``[B, T, D]`` -> what the head reads of each sample, ``[N, 1, D]``.
    """

    shown: Tuple[Tensor, ...]
    packed: Tuple[Tensor, ...]
    pool: Callable[[Tensor], Tensor]

    def swap(self, value: Any) -> Any:
        for shown, packed in zip(self.shown, self.packed):
            if value is shown:
                return packed
        return value


# ---- what stands in for forwards ----


def serve(cls: type, stock: Callable, names: Tuple[str, ...]) -> Callable:
    """What stands in for ``stock``, the forward that ``cls`` defines with parameters ``names``: itself for no head."""
    reads = head_kinds.head_reads(cls)
    if reads is None and "start_positions" not in names:
        return stock

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = context.current()
        if not context.inside_forward() or len(args) > len(names):
            return stock(self, *args, **kwargs)
        call = {**dict(zip(names, args)), **kwargs}
        tokens = _tokens(call)
        if here is None or tokens is None or not here.fit(*tokens.shape[:2]):
            _refuse_packed_choices(self, call, tokens)
            return stock(self, **call)
        if reads is None:
            _refuse_answers(self, call, here)
            return stock(self, **call)
        place, why_not = head_kinds.place_of(self, reads)
        if why_not:
            if not context.is_one_sample(here, wait=True):
                raise _refused(self, why_not)
            place = None
        if place is None or context.is_one_sample(here):
            return stock(self, **call)
        return _run(self, stock, call, here, place)

    return forward


def inner(model: Any, stock: Callable, args: Tuple[Any, ...], kwargs: Call) -> Any:
    """The forward of a model inside another: a head's base model gets the pack, and the head what it reads of it."""
    reading = context.reading()
    if reading is None:
        return stock(model, *args, **kwargs)
    context.set_reading(None)
    swapped = {name: reading.swap(value) for name, value in kwargs.items()}
    output = stock(model, *[reading.swap(value) for value in args], **swapped)
    if isinstance(output, tuple):
        return (reading.pool(output[0]), *output[1:])
    output.last_hidden_state = reading.pool(output.last_hidden_state)
    return output


def wrap_poolers(cls: type, undo: UndoList) -> None:
    """Wrap the modules beside the model ``cls`` that read the first token of a row."""
    beside = vars(sys.modules.get(cls.__module__, head_kinds))
    for name in head_kinds.FIRST_TOKEN_MODULES:
        module = beside.get(name)
        if isinstance(module, type) and head_kinds.is_of_transformers(module):
            stock = vars(module).get("forward")
            if stock is not None and not hasattr(stock, "packfree_stock"):
                undo.replace(module, "forward", _first_tokens(stock))


def _first_tokens(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        here = context.current()
        if (
            here is None
            or hidden_states.dim() != 3
            or not here.fit(*hidden_states.shape[:2])
            or context.is_one_sample(here)
        ):
            return stock(self, hidden_states, *args, **kwargs)
        samples = _samples(type(self).__name__, here, context.results())
        return stock(self, hidden_states.flatten(0, 1)[samples.first][:, None], *args, **kwargs)

    forward.packfree_stock = stock
    return forward


def check_output(model: Any, output: Any, here: Boundaries) -> None:
    """Refuse what a head outside the table has made of a pack.

    Raises:
        ValueError: a result has one entry for each row, and a row holds several samples.
    """
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        whole = isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (1, 2)
        if not whole or value.shape[0] != here.batch or any(word in name for word in ("loss", "hidden")):
            continue
        if value.shape[1:] != (here.length,) and (here.shard is not None or _count(here) > here.batch):
            why = f"its {name} {tuple(value.shape)} hold one result for each row, not for each sample"
            raise _refused(model, why)


# ---- a head on a pack ----


def _run(model: Any, stock: Callable, call: Call, here: Boundaries, place: str) -> Any:
    op = type(model).__name__
    labels = call.get("labels")
    labels = labels if labels is None else _one_a_sample(model, labels)
    samples = _samples(op, here, None if labels is None else labels.shape[0])
    if labels is not None:
        call["labels"] = labels
    before = context.reading(), context.results()
    context.set_results(samples.index.shape[0])
    if place != head_kinds.POOLED:
        context.set_reading(_reading(model, call, here, samples, place))
    try:
        return stock(model, **call)
    finally:
        context.set_reading(before[0])
        context.set_results(before[1])


def _reading(model: Any, call: Call, here: Boundaries, samples: Samples, place: str) -> Reading:
    """Put a row for each sample in the place of the call's tokens, and say how the pack comes back."""
    count = samples.index.shape[0]
    if place == head_kinds.LAST:
        index = _last_tokens(model, call, samples)
    else:
        index = samples.first
    shown, packed = [], []
    for name in ("input_ids", "inputs_embeds", "attention_mask"):
        value = call.get(name)
        if isinstance(value, Tensor) and here.fit(*value.shape[:2]):
            call[name] = value.flatten(0, 1)[index][:, None]
            shown.append(call[name])
            packed.append(value)

    def pool(hidden: Tensor) -> Tensor:
        if place == head_kinds.MEAN:
            return _means(hidden.flatten(0, 1), here.cu_seqlens)[samples.index][:, None]
        return hidden.flatten(0, 1)[index.to(hidden.device)][:, None]

    if place == head_kinds.LAST and count != 1 and head_kinds.padding_token(model) is None:
        must = "be set in a packed call (to a token that ends no sample), as for a padded batch"
        raise value_error(type(model).__name__, "config.pad_token_id", must, None)
    return Reading(tuple(shown), tuple(packed), pool)


def _last_tokens(model: Any, call: Call, samples: Samples) -> Tensor:
    """int64 ``[N]``: the last token of each sample that is no padding token, or its first where all are."""
    padding, ids = head_kinds.padding_token(model), call.get("input_ids")
    if padding is None or ids is None:
        return samples.end - 1
    flat = ids.reshape(-1)
    index = torch.arange(flat.shape[0], device=flat.device)
    latest = torch.where(flat != padding, index, -1).cummax(0).values
    return torch.maximum(latest[samples.end - 1], samples.first)


def _means(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[N, D]``: the mean of each sequence of hidden states ``[B * T, D]``, summed in float32, token after token."""
    offsets = cu_seqlens.to(hidden.device, torch.int64)
    wide = hidden.to(accumulation_dtype(hidden))
    sums = torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True)
    return (sums / torch.diff(offsets).clamp(min=1)[:, None]).to(hidden.dtype)


def _one_a_sample(model: Any, labels: Tensor) -> Tensor:
    """Labels ``[N]`` or ``[1, N]`` as ``[N]``; with one entry a class, ``[N, L]`` or ``[1, N, L]`` as ``[N, L]``."""
    config = model.config
    classes, problem = getattr(config, "num_labels", 1), getattr(config, "problem_type", None)
    wide = problem in ("multi_label_classification", "regression") or (problem is None and labels.is_floating_point())
    return labels.reshape(-1, classes) if wide and classes > 1 else labels.reshape(-1)


# ---- the samples of a pack ----


def _samples(op: str, here: Boundaries, results: Optional[int]) -> Samples:
    """The samples; ``results`` is how many the caller has labels for, where it has.

    Where values may not be read, on a GPU and while tracing, the labels say how many samples there are, or the offsets
    that the call was given. With neither, a call on a GPU waits for one value.

    Raises:
        ValueError: not one label a sample; or nothing says how many samples a trace holds.
    """
    bos, eos = here.cu_seqlens[:-1].long(), here.cu_seqlens[1:].long()
    tokens = here.batch * here.length
    real = (eos > bos) & (here.seq_idx.reshape(-1)[bos.clamp(max=tokens - 1)] >= 0)
    # One entry a token: the form that offsets have where the number of samples is not known.
    unknown = results is None and bos.shape[0] == tokens
    if unknown and torch.compiler.is_compiling():
        must = "be given when a packed forward without labels is compiled, because the number of samples is a shape"
        raise value_error(op, "cu_seq_lens_q", must, None)
    if packing.reads_values(here.cu_seqlens) or unknown or (packing.has_values(real) and results == tokens):
        index = real.nonzero().squeeze(-1)
        if results not in (None, index.shape[0]):
            raise value_error(op, "labels", f"hold one label for each of the {index.shape[0]} samples", results)
    else:
        count = bos.shape[0] if results is None else results
        if torch.compiler.is_compiling():
            torch._assert_async(real.sum() == count, "there must be one label for each packed sample")
        # Samples first, in their order, whatever empty sequences lie between them.
        index = torch.sort(real.logical_not().to(torch.uint8), stable=True).indices[:count]
    return Samples(index, bos[index], eos[index])


def _count(here: Boundaries) -> int:
    """How many samples there are; of a trace, the rows, if its shapes do not tell more."""
    if packing.has_values(here.cu_seqlens):
        return int((torch.diff(here.cu_seqlens) > 0).sum())
    count = here.cu_seqlens.shape[0] - 1
    return here.batch if count == here.batch * here.length else count


# ---- refusals ----


def _tokens(call: Call) -> Optional[Tensor]:
    found = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    return found if isinstance(found, Tensor) else None


def _refused(model: Any, why: str) -> ValueError:
    kind = internals.model_type(getattr(model, "config", None))
    return ValueError(f"{type(model).__name__} (model type {kind!r}) cannot run on packed samples: {why}. {_WAY_OUT}")


def _refuse_answers(model: Any, call: Call, here: Boundaries) -> None:
    """Spans of answers are scored by a softmax over the row."""
    if call.get("start_positions") is None or context.is_one_sample(here, wait=True):
        return
    raise _refused(model, "its loss, for which it was given start_positions, is a softmax over all tokens of the row")


def _refuse_packed_choices(model: Any, call: Call, tokens: Optional[Tensor]) -> None:
    """Rows of choices ``[B, C, T]`` are no batch whose boundaries the hooks read, so packed ones are found here."""
    positions = call.get("position_ids")
    if tokens is None or "MultipleChoice" not in type(model).__name__ or call.get("attention_mask") is not None:
        return
    if isinstance(positions, Tensor) and positions.shape == tokens.shape[:3] and packing.has_values(positions):
        if bool((torch.diff(positions) != 1).any()):
            raise _refused(model, head_kinds.CHOICES)
