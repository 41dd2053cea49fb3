"""From measured changes to a verdict on each layer."""

from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .batch import Pack
from .compare import Comparison, Finding, Result
from .watch import Call, Run

LEAKS = "leaks"
DIFFERS = "differs"
INHERITS = "inherits"
APART = "apart"
OF_THE_ROW = "one result for the row"
ONE_RESULT = "one result a sample"
MASKS = "against eager attention"


@dataclass(frozen=True)
class LayerResult:
    """What a report says about one layer.

    Attributes:
        layer: its name in the model, or ``embeddings`` or ``output`` where those are at fault; or the name of a result
            that the model gives for each sample, for example ``logits`` of a classification head.
        kind: what mixes tokens in it, for example ``gated delta rule``.
        difference: largest difference between packed and alone of what the layer returns, in the plain forward.
        own_difference: the same where the layer gets the hidden states of the alone runs, so that it is its own doing.
        influence: largest change of a token where the layer gets other hidden states for other samples.
        scale: the largest number that the layer returns in the alone runs.
        rounding: up to which a difference counts as rounding.
        first_token: index in the pack of the first token that leaks, differs or inherits; None where none does.
        first_sample: ``(sample, token)``, the same token counted inside its sample.
        verdict: ``leaks``: another sample's hidden states change its output. ``differs``: none does, but from the same
            hidden states it computes something else than alone. ``inherits``: only what it got is wrong. ``apart``.
        culprit: the module in the layer that leaks or differs first, for example ``self_attn``.
    """

    layer: str
    kind: str
    difference: float
    own_difference: float
    influence: float
    scale: float
    rounding: float
    first_token: Optional[int]
    first_sample: Optional[Tuple[int, int]]
    verdict: str
    culprit: str = ""


# A call (None outside the layers) and what is known about its output.
Part = Tuple[Optional[Call], Finding]


class Culprit(NamedTuple):
    """The first place that is at fault; None for ``call`` outside the layers."""

    row: LayerResult
    call: Optional[Call]


class Verdicts(NamedTuple):
    """A row for each layer, and the first culprit that leaks, or if none does, the first that differs."""

    rows: List[LayerResult]
    first: Optional[Culprit]


def judge(pack: Pack, packed: Run, comparison: Comparison) -> Verdicts:
    """Judge the layers in the order of the forward; embeddings and output get a row only where they are at fault."""
    rows: List[LayerResult] = []
    culprits: List[Culprit] = []

    def add(name: str, kind: str, finding: Finding, parts: List[Part]) -> None:
        row, call = _judge_parts(pack, name, kind, finding, parts, inherits=bool(culprits))
        rows.append(row)
        if row.verdict in (LEAKS, DIFFERS):
            culprits.append(Culprit(row, call))

    if comparison.embeddings is not None:
        add("embeddings", "", comparison.embeddings, [(None, comparison.embeddings)])
    for index, call in enumerate(packed.calls):
        finding = comparison.calls[index]
        if call.layer is None and finding is not None:
            add(call.place.name, call.place.kind, finding, _parts(packed, comparison, index))
    for result in comparison.results:
        row = _result_row(pack, result, inherits=bool(culprits))
        rows.append(row)
        if row.verdict in (LEAKS, DIFFERS):
            culprits.append(Culprit(row, None))
    # A whole model may sum up rounding, so here only a change that another sample makes counts, and only the first.
    if comparison.output is not None and not culprits:
        output = comparison.output._replace(own=comparison.output.own * 0)
        add("output", "", output, [(None, output)])
    return Verdicts(
        [row for row in rows if row.layer not in ("embeddings", "output") or row.verdict != APART],
        next((found for found in culprits if found.row.verdict == LEAKS), culprits[0] if culprits else None),
    )


def _parts(packed: Run, comparison: Comparison, layer: int) -> List[Part]:
    """What a layer is judged by: its mixers, each before the next, then the layer as a whole.

    Where there are experts and known mixers, the mixers are all: rounding may send a token to another expert.
    """
    found = zip(packed.calls, comparison.calls)
    parts: List[Part] = [(call, finding) for call, finding in found if call.layer == layer and finding is not None]
    whole = comparison.calls[layer]
    call = packed.calls[layer]
    if whole is not None and not (call.place.routed and parts):
        parts.append((call, whole))
    return parts


def _judge_parts(
    pack: Pack, name: str, kind: str, finding: Finding, parts: List[Part], inherits: bool = False
) -> Tuple[LayerResult, Optional[Call]]:
    for verdict, marks in ((LEAKS, _influenced), (DIFFERS, _different)):
        for call, part in parts:
            if bool(marks(part).any()):
                culprit = "" if call is None or call.layer is None else call.place.name
                return _row(pack, name, kind, finding, verdict, marks(part), culprit), call
    wrong = (finding.total > finding.rounding) | (finding.reached > 0)
    if inherits and bool(wrong.any()):
        return _row(pack, name, kind, finding, INHERITS, wrong), None
    return _row(pack, name, kind, finding, APART, None), None


def judge_masks(pack: Pack, verdicts: Verdicts, finding: Optional[Finding]) -> Verdicts:
    """``verdicts`` and, where eager attention computes something else from the samples alone, a row that says so."""
    if finding is None or not bool(_different(finding).any()):
        return verdicts
    row = _row(pack, "output", MASKS, finding, DIFFERS, _different(finding))
    return Verdicts([*verdicts.rows, row], Culprit(row, None))


def _result_row(pack: Pack, result: Result, inherits: bool) -> LayerResult:
    """A row for what the model gives for each sample; a single one for all of them is a leak whatever its numbers."""
    reached, far = result.reached > 0, result.total > result.rounding
    verdict, marks = APART, None
    if result.of_the_row:
        verdict, marks = LEAKS, torch.ones(len(pack.bounds), dtype=torch.bool)
        marks[0] = False
    elif inherits and bool((reached | far).any()):
        verdict, marks = INHERITS, reached | far
    elif bool(reached.any()):
        verdict, marks = LEAKS, reached
    elif bool(far.any()):
        verdict, marks = DIFFERS, far
    index = None if marks is None else int(marks.nonzero()[0])
    token = None if index is None else pack.bounds[index][0]
    numbers = (float(result.total.max()), float(result.total.max()), float(result.reached.max()))
    kind = OF_THE_ROW if result.of_the_row else ONE_RESULT
    sample = None if index is None else (index, 0)
    return LayerResult(result.name, kind, *numbers, result.scale, result.rounding, token, sample, verdict)


def _influenced(part: Finding) -> Tensor:
    return part.influence > 0


def _different(part: Finding) -> Tensor:
    return part.own > part.rounding


def _row(
    pack: Pack, name: str, kind: str, finding: Finding, verdict: str, marks: Optional[Tensor], culprit: str = ""
) -> LayerResult:
    token = sample = None
    if marks is not None:
        live = int(marks.nonzero()[0])
        token, index = int(pack.live()[live]), int(pack.sample_of()[live])
        sample = (index, token - pack.bounds[index][0])
    largest = (float(part.max()) for part in (finding.total, finding.own, finding.influence))
    return LayerResult(name, kind, *largest, finding.scale, finding.rounding, token, sample, verdict, culprit)
