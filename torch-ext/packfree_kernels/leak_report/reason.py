"""Why a setup leaks: what the batch tells, what arrives at the layer, and which functions are hooked."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import torch

from ..hooks import HooksStatus, adapters, functions, guards, internals
from .batch import Pack
from .layers import KINDS
from .verdict import LEAKS, MASKS, OF_THE_ROW, ONE_RESULT, Culprit, LayerResult
from .watch import Call

# The explicit boundary that a function of these names reads where it is not ours; selective scans read none.
_READS = {
    "causal_conv1d_fn": "seq_idx",
    "chunk_gated_delta_rule": "cu_seq_lens",
    "chunk_kda": "cu_seq_lens",
    "mamba_chunk_scan_combined": "seq_idx",
    "mamba_split_conv1d_scan_combined": "seq_idx",
}
_KEYWORDS = {"cu_seq_lens": "cu_seq_lens_q", "seq_idx": "seq_idx"}
_OPTIONS = {"cu_seq_lens": "return_flash_attn_kwargs=True", "seq_idx": "return_seq_idx=True"}


class Setup(NamedTuple):
    """What a report was made of.

    Attributes:
        model: the model, without what wraps it (PEFT, data parallel).
        name: its class name.
        attention: its attention implementation.
        pack: the batch.
        hooks: state of the hooks while it ran.
        device: of the tokens.
        adapter: what an adapter of PEFT does to the row, or an empty string.
    """

    model: Any
    name: str
    attention: str
    pack: Pack
    hooks: HooksStatus
    device: torch.device
    adapter: str

    @classmethod
    def of(cls, model: Any, pack: Pack, hooks: HooksStatus, device: torch.device) -> "Setup":
        base = internals.model_base() if internals.loaded() else type(model)
        inner = next((module for module in model.modules() if isinstance(module, base)), model)
        return cls(
            inner,
            type(inner).__name__,
            guards.attention_name(inner),
            pack,
            hooks,
            device,
            adapters.reads_the_row(model, {}),
        )

    def title(self) -> str:
        hooks = "hooks on" if self.hooks.installed else f"hooks off ({self.hooks.reason})"
        attention = f"{self.attention} attention, " if self.attention else ""
        told = ", ".join(self.pack.told)
        samples = f"{len(self.pack.bounds)} samples in {self.pack.tokens} tokens"
        return f"{self.name}, {attention}{hooks}; {samples}, told by {told}"


def sentence(setup: Setup, rows: Sequence[LayerResult], first: Optional[Culprit]) -> str:
    """Whether the setup leaks, where it begins and why, in one sentence."""
    if first is None:
        layers = sum(row.kind != ONE_RESULT for row in rows)
        largest = max((row.difference / row.scale for row in rows if row.scale > 0), default=0.0)
        return (
            f"No leak: {setup.name} keeps the {len(setup.pack.bounds)} samples apart in all of its {layers} layers, "
            f"and packed equals alone up to rounding (at most {largest:.1e} of the largest number in a layer)."
        )
    row, call = first
    if row.kind == MASKS:
        why = _why_differs(setup, row)
        return f"Samples are kept apart, but packed or alone the output is not that of eager attention, because {why}."
    where = row.layer if call is None else f"{row.layer} ({call.place.kind})"
    count = sum(other.verdict == row.verdict for other in rows)
    place = f"is the first of {count} places" if count > 1 else "is the only place"
    if row.verdict == LEAKS:
        return f"Leak: {where} {place} where samples mix, because {_why_leaks(setup, row, call)}."
    return (
        f"No sample reaches another, but {where} {place} where packed differs from alone, because "
        f"{_why_differs(setup, row)}."
    )


def refusal(setup: Setup, running: Sequence[Call], error: Exception) -> str:
    """For a packed forward that raised ``error`` while the calls ``running`` had begun and not ended."""
    where = f" in {running[0].place.name} ({running[-1].place.kind})" if running else ""
    said = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    return f"Refused: {setup.name} does not run this batch{where}: {type(error).__name__}: {said}."


def _why_leaks(setup: Setup, row: LayerResult, call: Optional[Call]) -> str:
    if row.kind == OF_THE_ROW:
        return f"{setup.name} reads one place of the row for its {row.layer}, or a mean over it, not one of each sample"
    if setup.adapter:
        return setup.adapter
    if call is None:
        return f"the {row.layer} of {setup.name} read tokens of other samples"
    if call.place.functions:
        return _why_functions(setup, call)
    known = guards.found_in(setup.model, internals.leaking_models())
    if known:
        return known
    if call.place.mixers:
        return f"something in it other than its {call.place.kind} reads tokens of other samples"
    if "attention" in call.place.kind:
        return _why_attention(setup, call)
    return f"{type(call.place.module).__name__} mixes tokens outside the functions that can be told boundaries"


def _why_functions(setup: Setup, call: Call) -> str:
    """For a mixer that calls functions of the hooks' table; the fused ones run its parts and add nothing."""
    names = [name for name in call.place.functions if name in KINDS]
    if call.place.hooked and functions.supported(setup.device):
        return f"{_and(names)} did not keep them apart although hooked, which is a fault of packfree-kernels"
    if call.place.hooked:
        hooks = f"serve no {setup.device.type} tensors"
    elif setup.hooks.installed:
        hooks = "do not reach them here"
    else:
        hooks = "are off"
    return f"{_what_arrives(setup, call, names)}, and the hooks of packfree-kernels, which make up for that, {hooks}"


def _what_arrives(setup: Setup, call: Call, names: List[str]) -> str:
    clauses: Dict[str, List[str]] = {}
    for name in names:
        clauses.setdefault(_fate(setup, call, _READS.get(name)), []).append(name)
    return ", and ".join(f"{_and(group)} {clause}" for clause, group in clauses.items())


def _fate(setup: Setup, call: Call, spelling: Optional[str]) -> str:
    """What became of the boundaries that a stock function wants, as the rest of a clause about one or more of them."""
    if spelling is None:
        return "cannot be told boundaries"
    if spelling not in setup.pack.told:
        return f"must be told {spelling}, which the batch lacks (collator option {_OPTIONS[spelling]})"
    if _KEYWORDS[spelling] not in call.boundaries:
        return f"must be told {spelling}, which {setup.name} drops on the way"
    return f"did not heed {spelling}"


def _why_attention(setup: Setup, call: Call) -> str:
    attention, told = setup.attention, setup.pack.told
    if "attention_mask" in setup.pack.packed:
        return "the attention_mask in the batch goes before the boundaries and makes the row one sample"
    if attention in internals.MASK_ATTENTION and "position_ids" not in told:
        return f"{attention} attention cuts a pack by position_ids alone, which the batch lacks"
    if attention in internals.MASK_ATTENTION:
        return f"{setup.name} makes the mask of {attention} attention without position_ids"
    return f"{attention or 'its'} attention {_fate(setup, call, 'cu_seq_lens')}"


def _why_differs(setup: Setup, row: LayerResult) -> str:
    if row.kind == MASKS:
        return (
            f"{setup.attention} attention is handed no mask, so one by which tokens see both ways (those of an image "
            "or a prefix) is lost"
        )
    if setup.adapter:
        return setup.adapter
    table = internals.table_of_a_length(setup.model)
    if table and not setup.hooks.installed:
        return f"its rotary tables ({table}) are chosen by the longest sample of the pack, and the hooks are off"
    positions = setup.pack.packed.get("position_ids")
    if positions is None:
        return "the batch has no position_ids, so positions count through the row"
    first, own = int(positions.flatten()[0]), internals.first_position(setup.model)
    if first != own:
        return f"position_ids start at {first} and the model's own at {own} (collator option position_ids_start={own})"
    if internals.loaded() and not any(map(internals.takes_positions, setup.model.modules())):
        return f"{setup.name} takes no position_ids and counts positions through the row"
    return "from the same hidden states it computes other numbers in a packed row"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
