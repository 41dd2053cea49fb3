"""A packed batch, and the samples in it as batches of their own."""

import inspect
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import torch
from torch import Tensor

from .. import packing
from .._checks import check_tensor, type_error, value_error
from ..hooks import adapters, internals

_OP = "leak_report"
# What a collator adds for the loss.
_LOSS_KEYWORDS = ("labels", "num_items_in_batch")


class Pack(NamedTuple):
    """A row of T tokens that holds N samples.

    Attributes:
        packed: keywords of the packed forward.
        alone: keywords of each sample's own forward.
        bounds: first token of each sample and the one after its last.
        tokens: T.
        told: the spellings in which the batch tells its boundaries: position_ids, cu_seq_lens, seq_idx.
        virtual: tokens that an adapter of PEFT puts before each row.
    """

    packed: Dict[str, Any]
    alone: List[Dict[str, Any]]
    bounds: List[Tuple[int, int]]
    tokens: int
    told: Tuple[str, ...]
    virtual: int

    def live(self) -> Tensor:
        """int64 ``[L]``: the tokens that belong to a sample, which leaves out padding at the end."""
        return torch.cat([torch.arange(bos, eos) for bos, eos in self.bounds])

    def sample_of(self) -> Tensor:
        """int64 ``[L]``: the sample of each live token."""
        return torch.cat([torch.full((eos - bos,), index) for index, (bos, eos) in enumerate(self.bounds)])

    def redrawn(self, mask: Tensor) -> Dict[str, Any]:
        """``packed`` with another token wherever the bool ``mask`` ``[L]`` is true, one that occurs in the pack."""
        ids = self.packed["input_ids"]
        live = self.live()
        known, index = ids[0, live.to(ids.device)].cpu().unique(return_inverse=True)
        step = torch.randint(1, max(len(known), 2), index.shape, generator=torch.Generator().manual_seed(0))
        other = known[(index + step) % len(known)] if len(known) > 1 else (known - 1).abs().expand(index.shape)
        changed = ids.clone()
        changed[0, live[mask].to(ids.device)] = other[mask].to(ids.device, ids.dtype)
        return {**self.packed, "input_ids": changed}


def read_batch(model: Any, batch: Any) -> Pack:
    """Raises what :func:`leak_report` says about ``batch``."""
    if not isinstance(batch, Mapping):
        raise type_error(_OP, "batch", "be a mapping of a forward's keywords", type(batch).__name__)
    given = {name: value for name, value in batch.items() if value is not None and name not in _LOSS_KEYWORDS}
    if "input_ids" not in given:
        raise value_error(_OP, "batch", "hold input_ids", sorted(given) or "nothing")
    ids = given["input_ids"]
    check_tensor(_OP, "input_ids", ids, ndim=2)
    if ids.shape[0] != 1:
        raise value_error(_OP, "input_ids", "have shape [1, T], one packed row", tuple(ids.shape))
    bounds = _bounds(given, ids.shape[1])
    told = tuple(
        shown
        for name, shown in (("position_ids", "position_ids"), ("cu_seq_lens_q", "cu_seq_lens"), ("seq_idx", "seq_idx"))
        if name in given
    )
    off = {"use_cache": False} if _takes_cache(model) else {}
    alone = [{**_cut(given, bos, eos), **off} for bos, eos in bounds]
    return Pack({**given, **off}, alone, bounds, ids.shape[1], told, adapters.virtual_tokens(model))


def _bounds(given: Dict[str, Any], tokens: int) -> List[Tuple[int, int]]:
    spellings = {"cu_seqlens": "cu_seq_lens_q", "seq_idx": "seq_idx", "position_ids": "position_ids"}
    values = {ours: given[name] for ours, name in spellings.items() if name in given}
    if not values:
        raise value_error(_OP, "batch", "hold position_ids, cu_seq_lens_q or seq_idx", sorted(given))
    # On the CPU, where the values are checked too.
    values = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
    found = packing.resolve_packing(_OP, 1, tokens, torch.device("cpu"), **values)
    bounds = [(bos, eos) for bos, eos in packing.sequence_bounds(found.cu_seqlens) if eos > bos]
    if len(bounds) < 2:
        raise value_error(_OP, "batch", "pack two samples or more", f"{len(bounds)} of {tokens} tokens")
    return bounds


def _cut(given: Dict[str, Any], bos: int, eos: int) -> Dict[str, Any]:
    """The keywords of one sample's forward: no boundaries, no mask, and positions as the model itself counts them."""
    shape = given["input_ids"].shape
    cut = {}
    for name, value in given.items():
        if name in (*internals.BOUNDARY_KEYWORDS, "position_ids", "attention_mask"):
            continue
        if isinstance(value, Tensor):
            if value.shape[:2] != shape:
                raise value_error(_OP, name, f"have shape {tuple(shape)} like input_ids", tuple(value.shape))
            value = value[:, bos:eos]
        cut[name] = value
    return cut


def _takes_cache(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters
    any_keyword = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (any_keyword and hasattr(internals.text_config(model), "use_cache"))
