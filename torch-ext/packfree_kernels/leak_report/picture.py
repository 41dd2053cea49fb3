"""The picture of a report: one bar a layer, on a log scale."""

import os
import textwrap
from typing import Any, Union

from .verdict import APART, DIFFERS, INHERITS, LEAKS

# Okabe and Ito's colours, told apart by colour-blind readers too.
_COLOURS = {LEAKS: "#d55e00", DIFFERS: "#cc79a7", INHERITS: "#e69f00", APART: "#0072b2"}
_MEANING = {
    LEAKS: "leaks",
    DIFFERS: "differs, no sample reaches another",
    INHERITS: "inherits from an earlier layer",
    APART: "keeps samples apart",
}


def draw(report: Any, path: Union[str, "os.PathLike[str]"]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("LeakReport.save: matplotlib is needed to draw a report; pip install matplotlib") from error
    rows = report.layers
    if not rows:
        raise ValueError(f"LeakReport.save: nothing to draw: {report.sentence}")
    # A figure of its own: nothing of pyplot's state or backend is touched.
    few = len(rows) <= 6
    figure = Figure(figsize=(max(8.0, 1.5 + 0.28 * len(rows)), 5.0 if few else 6.0), layout="constrained")
    axes = figure.add_subplot()
    # Zero has no place on a log scale: such a bar ends at the bottom.
    positive = [value for row in rows for value in (row.difference, row.rounding) if 0 < value < float("inf")]
    bottom, top = min(positive, default=1e-8) / 10, max(positive, default=1.0) * 10
    for index, row in enumerate(rows):
        height = min(max(row.difference, bottom), top)
        axes.bar(index, height - bottom, bottom=bottom, width=0.7, color=_COLOURS[row.verdict])
        axes.plot([index - 0.45, index + 0.45], [row.rounding] * 2, color="black", linewidth=1.2)
        if row.verdict == LEAKS:
            axes.plot(index, height * 1.7, marker="v", color=_COLOURS[LEAKS])
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.set_ylabel("largest difference")
    axes.spines[["top", "right"]].set_visible(False)
    names = [f"{row.layer}{chr(10) if few else '  '}{row.kind}".strip() for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=0 if few else 90, fontsize=9)
    _legend(axes, {row.verdict for row in rows})
    characters = int(12.5 * figure.get_figwidth())
    figure.suptitle(textwrap.fill(report.title, characters), x=0.01, ha="left", fontsize=10)
    figure.supxlabel(textwrap.fill(report.sentence, characters), x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=150)


def _legend(axes: Any, verdicts: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[name], label=meaning) for name, meaning in _MEANING.items() if name in verdicts]
    if LEAKS in verdicts:
        handles[0] = Line2D([], [], linestyle="", marker="v", color=_COLOURS[LEAKS], label=_MEANING[LEAKS])
    handles.append(Line2D([], [], color="black", linewidth=1.2, label="up to here rounding"))
    axes.legend(
        handles=handles, fontsize=9, frameon=False, ncols=len(handles), loc="lower left", bbox_to_anchor=(0.0, 1.0)
    )
