"""What is shown and kept: the terminal table, the JSON list and the plot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WIDTH = 100
NARROW = {"forward": "fwd", "forward+backward": "fwd+bwd"}


def heading() -> str:
    """Column names, in the widths of :func:`line`."""
    return f"{'':<50}{'ours ms':<18}{'alone ms':<18}pack ratio lim"


def line(row: Row) -> str:
    """One measurement in at most 100 columns: medians, with the range of the rounds in brackets."""
    label = f"  {row['dtype']:<5}{row['shape']:<24}{row['distribution']:<11}{NARROW[row['direction']]:<8}"
    ours, alone = _span(row["ours_ms"], row["ours_range_ms"]), _span(row["alone_ms"], row["alone_range_ms"])
    mark = "" if row["undisturbed"] else "~"
    return f"{label}{ours:<18}{alone:<18}{_pack(row):>4}{row['ratio']:>5.1f}x{100 * row['peak_share']:>3.0f}%{mark}"


def _number(value: float) -> str:
    """Three figures, never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _span(median: float, ends: list[float]) -> str:
    return f"{_number(median)} ({_number(ends[0])}-{_number(ends[1])})"


def _pack(row: Row) -> str:
    return "-" if row["stock_pack_ms"] is None else _number(row["stock_pack_ms"])


def worst_ratios(rows: Iterable[Row]) -> list[str]:
    """For each op and direction the least ratio and where it was met."""
    worst: dict[tuple[object, object], Row] = {}
    for row in rows:
        key = (row["op"], row["direction"])
        if key not in worst or row["ratio"] < worst[key]["ratio"]:
            worst[key] = row
    return [
        f"  {row['op']:<34}{NARROW[row['direction']]:<9}{row['ratio']:>6.1f}x"
        f"  {row['dtype']} {row['shape']}, {row['distribution']}"
        for row in worst.values()
    ]


def write_json(rows: list[Row], path: Path) -> None:
    """A list of objects, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def write_plot(rows: list[Row], machine: str, path: Path) -> None:
    """How many times as fast as "alone" each measurement is, as dots on a logarithmic axis, grouped by op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys((row["op"], row["dtype"], row["shape"], row["distribution"]) for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.19 * len(labels)), layout="constrained")
    places = {label: -index for index, label in enumerate(labels)}
    for direction, colour in (("forward", "#3b6fb6"), ("forward+backward", "#d1732f")):
        chosen = [row for row in rows if row["direction"] == direction]
        heights = [places[(row["op"], row["dtype"], row["shape"], row["distribution"])] for row in chosen]
        axes.scatter([row["ratio"] for row in chosen], heights, s=18, color=colour, label=direction, zorder=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if tick <= 1.5 * max(row["ratio"] for row in rows)]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(list(places.values()), [_plot_label(label) for label in labels], fontsize=7)
    axes.set_ylim(-len(labels), 1)
    axes.grid(axis="x", color="#dddddd")
    axes.set_title("Times as fast as the stock function, sample by sample", fontsize=10)
    axes.set_xlabel(machine, fontsize=8)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_label(label: tuple[object, ...]) -> str:
    op, dtype, shape, distribution = label
    return f"{op}  {dtype}  {shape}  {distribution}"
