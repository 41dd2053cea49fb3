"""The forwards that a report is made from, and what they say about each call of a layer."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, nn

from .._dtypes import accumulation_dtype
from ..hooks import internals
from .batch import Pack
from .layers import is_routed
from .watch import Call, Feed, Run, Watch

# What counts as rounding between two computations of the same numbers, relative to the largest of them. Results are
# rounded to the model's dtype, a few in a row in one layer (seen on tiny models of each kind: 6 eps of bfloat16), and
# sums of float32 products depend on their order (seen: 6 eps of float32; more in a large model). A wrong position or
# boundary is far above either.
_ROUNDED = 16
_SUMMED = 1024 * torch.finfo(torch.float32).eps
# A result is judged behind all layers, which add up their rounding.
_THROUGH_LAYERS = 8


class Finding(NamedTuple):
    """What is known about the hidden states at one point. Vectors are float64 ``[L]``, one entry for each live token.

    Attributes:
        total: packed against alone: largest difference of each token.
        own: the same where each layer got the hidden states of the alone runs, so that nothing comes from earlier ones.
        reached: largest change of each token when the token ids of other samples were drawn again; 0 where the bits
            may change without that.
        influence: largest change of each token when the layer got other hidden states for other samples; 0 where it is
            rounding.
        scale: the largest number in the alone runs.
        rounding: what difference counts as rounding.
    """

    total: Tensor
    own: Tensor
    reached: Tensor
    influence: Tensor
    scale: float
    rounding: float


class Comparison(NamedTuple):
    """Findings in the order of the forward: what goes into the first layer, each call's output, the model's output.

    An entry is None where no tensor has a row for each token.
    """

    embeddings: Optional[Finding]
    calls: List[Optional[Finding]]
    output: Optional[Finding]
    results: List["Result"]


class Result(NamedTuple):
    """What is known about a result that the model gives for each sample, for example of a classification head.

    Attributes:
        name: its name in the model's output.
        of_the_row: there is not one for each sample.
        total: float64 ``[N]``, packed against alone: largest difference of each sample.
        reached: float64 ``[N]``, largest change of each when the token ids of other samples were drawn again.
        scale: the largest number in the alone runs.
        rounding: what difference counts as rounding.
    """

    name: str
    of_the_row: bool
    total: Tensor
    reached: Tensor
    scale: float
    rounding: float


Points = List[Optional[Tensor]]


class Comparer:
    """Runs ``model`` on a pack and on its samples, under ``watch``."""

    def __init__(self, model: nn.Module, pack: Pack, watch: Watch) -> None:
        self._model = model
        self._pack = pack
        self._watch = watch
        self._live = pack.live()
        sample = pack.sample_of()
        # By the bits of its number each sample is left alone in a draw that redraws any given other one.
        bits = range((len(pack.bounds) - 1).bit_length())
        self._draws = [sample >> bit & 1 == value for bit in bits for value in (0, 1)]

    def alone(self) -> Run:
        """The samples' own forwards, laid one after the other; raises what the model raises."""
        runs = []
        for inputs, (bos, eos) in zip(self._pack.alone, self._pack.bounds):
            # Transformers' dynamic rotary tables would carry the length of a longer sample into this one.
            internals.forget_lengths(self._model)
            runs.append(self._watch.run(lambda inputs=inputs: self._model(**inputs), eos - bos))
        joined = []
        for calls in zip(*(run.calls for run in runs)):
            call = Call(calls[0].place, calls[0].layer, _joined([call.given for call in calls]), ())
            call.output = _joined([call.output for call in calls])
            joined.append(call)
        for run in runs:
            _check_same_calls(run.calls, joined)
        results = {name: torch.cat([run.results[name].reshape(1, -1) for run in runs]) for name in _common(runs)}
        return Run(joined, _joined([run.output for run in runs]), results)

    def packed(self, inputs: Optional[Dict[str, Any]] = None, feed: Optional[Feed] = None) -> Run:
        """A packed forward, by default of the batch as it is; raises what the model raises."""
        given = self._pack.packed if inputs is None else inputs
        return self._watch.run(lambda: self._model(**given), self._pack.tokens, feed)

    def compare(self, alone: Run, packed: Run) -> Comparison:
        """More packed forwards: as it is and with token ids drawn again, then each layer judged by itself."""
        _check_same_calls(packed.calls, alone.calls)
        truth = [_first_given(alone), *(call.output for call in alone.calls), alone.output]
        usual = self._points(packed)
        total = self._gaps(usual, truth)
        drawn: List[Dict[str, Tensor]] = []

        def redraw(mask: Tensor) -> Run:
            run = self.packed(self._pack.redrawn(mask))
            drawn.append(run.results)
            return run

        reached = self._moved(usual, redraw)
        repeats = self._gaps(self._points(self.packed()), usual)
        del usual
        by_itself = self._points(self.packed(feed=self._feed(alone)))
        own = self._gaps(by_itself, truth)
        influence = self._moved(by_itself, lambda mask: self.packed(feed=self._feed(alone, mask)))
        repeats_by_itself = self._gaps(self._points(self.packed(feed=self._feed(alone))), by_itself)

        def finding(point: int, routed: bool, whole: bool = False) -> Optional[Finding]:
            if truth[point] is None or total[point] is None:
                return None
            scale = float(truth[point].abs().max())
            rounding = (_ROUNDED * self._eps(truth[point]) + _SUMMED) * scale
            # What is the same in every run needs no tolerance: a single bit that another sample changes is a leak.
            far = reached[point] * (not routed and not bool(repeats[point].any()))
            near = influence[point]
            if routed or bool(repeats_by_itself[point].any()):
                near = near.masked_fill(near <= rounding, 0)
            parts = (total[point], total[point], far, far) if whole else (total[point], own[point], far, near)
            return Finding(*parts, scale, rounding)

        return Comparison(
            finding(0, routed=False, whole=True),
            [finding(index + 1, call.place.routed) for index, call in enumerate(alone.calls)],
            finding(-1, is_routed(self._model), whole=True),
            [
                self._result(name, alone.results[name], packed.results[name], drawn)
                for name in self._names(packed, alone)
            ],
        )

    def against(self, got: Run, expected: Run) -> Optional[Finding]:
        """Two alone runs: how far the model's output of one is from that of the other; None where it has no tokens."""
        if got.output is None or expected.output is None or is_routed(self._model):
            return None
        scale = float(expected.output.abs().max())
        rounding = _THROUGH_LAYERS * (_ROUNDED * self._eps(expected.output) + _SUMMED) * scale
        total = _gap(got.output, expected.output)
        return Finding(total, total, total * 0, total * 0, scale, rounding)

    def _names(self, packed: Run, alone: Run) -> List[str]:
        """Results that are no rows of tokens."""
        tokens = (self._pack.tokens, self._pack.tokens + self._pack.virtual)
        return [
            name
            for name, value in packed.results.items()
            if name in alone.results and not {value.shape[0], value.shape[-1]} & set(tokens)
        ]

    def _result(self, name: str, truth: Tensor, packed: Tensor, drawn: List[Dict[str, Tensor]]) -> Result:
        count = len(self._pack.bounds)
        packed = packed.reshape(packed.shape[0], -1)
        scale = float(truth.abs().max())
        rounding = _THROUGH_LAYERS * (_ROUNDED * self._eps(truth) + _SUMMED) * scale
        if packed.shape != truth.shape:
            first = packed.reshape(-1)[: truth.shape[1]].expand_as(truth) if packed.numel() >= truth.shape[1] else truth
            return Result(name, True, _gap(first, truth), torch.zeros(count).double(), scale, rounding)
        sample = torch.arange(count)
        # The order of the draws: each bit of a sample's number, 0 and 1.
        masks = [sample >> bit & 1 == value for bit in range((count - 1).bit_length()) for value in (0, 1)]
        moved = [
            _gap(results[name].reshape(packed.shape), packed).masked_fill(mask, 0)
            for mask, results in zip(masks, drawn)
        ]
        reached = torch.stack(moved).amax(0)
        if is_routed(self._model):
            reached = reached.masked_fill(reached <= rounding, 0)
        return Result(name, False, _gap(packed, truth), reached, scale, rounding)

    def _points(self, run: Run) -> Points:
        """Live rows of what goes into the first layer, of each call's output, and of the model's output."""
        points = [_first_given(run), *(call.output for call in run.calls), run.output]
        return [None if point is None else point[self._live.to(point.device)] for point in points]

    def _gaps(self, left: Points, right: Points) -> List[Optional[Tensor]]:
        return [None if a is None or b is None else _gap(a, b) for a, b in zip(left, right)]

    def _moved(self, before: Points, run: Callable[[Tensor], Run]) -> List[Optional[Tensor]]:
        """The largest change of each token over the draws of other samples."""
        moved = []
        for mask in self._draws:
            gaps = self._gaps(self._points(run(mask)), before)
            moved.append([None if gap is None else gap.masked_fill(mask, 0) for gap in gaps])
        return [None if gaps[0] is None else torch.stack(gaps).amax(0) for gaps in zip(*moved)]

    def _feed(self, alone: Run, mask: Optional[Tensor] = None) -> Feed:
        """Gives each layer its hidden states of the alone runs, and where ``mask`` ``[L]`` is true others like them."""

        def feed(index: int, given: Tensor) -> Tensor:
            hidden = alone.calls[index].given
            if hidden is None:
                return given
            if mask is not None:
                hidden = torch.where(mask.to(hidden.device).view(-1, *[1] * (hidden.dim() - 1)), _like(hidden), hidden)
            return given.index_copy(0, self._live.to(given.device), hidden.to(given))

        return feed

    def _eps(self, point: Tensor) -> float:
        """Of the coarsest dtype in use: a layer's sum may be float32 while its matmuls are not."""
        dtypes = {parameter.dtype for parameter in self._model.parameters() if parameter.is_floating_point()}
        if torch.is_autocast_enabled(point.device.type):
            dtypes.add(torch.get_autocast_dtype(point.device.type))
        return max(torch.finfo(dtype).eps for dtype in {*dtypes, point.dtype} if dtype.itemsize > 1)


def _check_same_calls(got: Sequence[Call], expected: Sequence[Call]) -> None:
    """Raises RuntimeError: layers are compared call by call, which needs the same calls in every forward."""
    if [call.place.module for call in got] != [call.place.module for call in expected]:
        raise RuntimeError(
            "leak_report: the model calls its layers in another number or order on another row of tokens "
            f"({len(got)} calls against {len(expected)})"
        )


def _common(runs: Sequence[Run]) -> List[str]:
    """Names of the results that each of the alone runs gives once."""
    names = set.intersection(*(set(run.results) for run in runs))
    return [name for name in runs[0].results if name in names and len({r.results[name].numel() for r in runs}) == 1]


def _first_given(run: Run) -> Optional[Tensor]:
    return next((call.given for call in run.calls if call.given is not None), None)


def _joined(parts: Sequence[Optional[Tensor]]) -> Optional[Tensor]:
    return None if any(part is None for part in parts) else torch.cat(list(parts))


def _like(hidden: Tensor) -> Tensor:
    """Other hidden states of the same size, the same for the same ones."""
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.device)
    spread = hidden.float().std()
    return hidden + (noise * torch.where(spread > 0, spread, 1)).to(hidden.dtype)


def _gap(left: Tensor, right: Tensor) -> Tensor:
    """Largest difference in each row, float64 ``[L]``: inf where one is NaN, 0 where both are or are equal."""
    wide = accumulation_dtype(left, right)
    left, right = left.to(wide).flatten(1), right.to(wide).flatten(1)
    inf = float("inf")
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0, (left - right).abs()).nan_to_num(nan=inf, posinf=inf).amax(-1).double().cpu()
