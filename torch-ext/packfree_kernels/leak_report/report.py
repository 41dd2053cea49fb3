"""The report: a record that prints as a table and saves as a picture."""

import os
import textwrap
from dataclasses import dataclass
from typing import List, Optional, Tuple, Union

from .verdict import APART, LEAKS, LayerResult

REFUSED = "refused"
_WIDTH = 100


@dataclass(frozen=True)
class LeakReport:
    """Packed against alone for one model and one batch; ``print`` it, :meth:`save` it.

    Attributes:
        title: model, attention implementation, state of the hooks, and the batch.
        verdict: ``leaks``: a sample reaches another. ``differs``: none does, but packed differs from alone. ``apart``:
            packed equals alone. ``refused``: the model raised an error on the batch, so nothing was compared.
        sentence: the verdict, where it begins and why, in one sentence.
        layers: a row for each call of a layer, in order; empty if refused.
        output_difference: largest difference between the model's packed and alone outputs; None if refused.
    """

    title: str
    verdict: str
    sentence: str
    layers: Tuple[LayerResult, ...]
    output_difference: Optional[float]

    @property
    def packed_equals_alone(self) -> bool:
        """Whether the model ran the pack and gave each sample what it gives it alone; what a test should assert."""
        return self.verdict == APART

    @property
    def leaks(self) -> bool:
        """Whether a sample reaches another. False does not say that a pack is right: it may differ, or be refused."""
        return self.verdict == LEAKS

    def __str__(self) -> str:
        parts = [_fill(self.title)]
        if self.layers:
            parts += ["", *_table(self.layers)]
        return "\n".join([*parts, "", _fill(self.sentence)])

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Draw the differences as bars on a log scale into ``path``; the ending says the format, for example ``.png``.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing to draw, because the model refused the batch.
        """
        from .picture import draw

        draw(self, path)


def _fill(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)


# Column -> its widest cell; with two spaces between them that makes the width of a page.
_COLUMNS = {"layer": 18, "kind": 24, "largest difference": 18, "first leaking token": 19, "verdict": 13}


def _table(layers: Tuple[LayerResult, ...]) -> List[str]:
    cells = [list(_COLUMNS)]
    for row in layers:
        token = "" if row.first_token is None else f"{row.first_token} (sample {row.first_sample[0]})"
        cells.append([row.layer, row.kind, f"{row.difference:.1e}", token, row.verdict])
    shown = [[_short(cell, most) for cell, most in zip(row, _COLUMNS.values())] for row in cells]
    widths = [max(map(len, column)) for column in zip(*shown)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."
