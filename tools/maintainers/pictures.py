"""Draw the pictures of docs/: what packing does, how fast the functions are, and the way of a packed call.

    python -m tools.maintainers.pictures                 all, as SVG, into docs/
    python -m tools.maintainers.pictures --png FOLDER    the same as PNG, to look at

The speeds are those of benchmarks/results/cpu.json and steps.json. A picture holds the digest of what it was drawn
from, by which tests/docs/test_docs.py notices that it is old. Letters are drawn as shapes, so it looks the same
everywhere.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
SPEEDS, STEPS = RESULTS / "cpu.json", RESULTS / "steps.json"
# What a picture is drawn from beside this file.
SOURCES = {"speed": SPEEDS, "steps": STEPS}

SAMPLES = ("#3b6fb6", "#d1732f", "#3f8f5b")
EMPTY, INK, PALE, RED = "#e7e7e7", "#222222", "#6b6b6b", "#b3261e"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw PNG files there instead")
    png = parser.parse_args().png
    # Without a date and with fixed names inside, the same input gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "packfree", "svg.fonttype": "path", "font.size": 10})
    for name, draw in PICTURES.items():
        figure = draw()
        if png:
            figure.savefig(png / f"{name}.png", dpi=110, facecolor="white")
        else:
            about = {"Date": None, "Creator": "tools/maintainers/pictures.py", "Description": source_digest(name)}
            figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata=about)
        pyplot.close(figure)


def source_digest(name: str) -> str:
    """Digest of what the picture ``name`` is drawn from: this file, and numbers where it shows some."""
    content = Path(__file__).read_bytes() + (SOURCES[name].read_bytes() if name in SOURCES else b"")
    return hashlib.sha256(content).hexdigest()


def canvas(width: float, height: float) -> Tuple[Figure, Axes]:
    """An empty sheet of ``width`` x ``height`` inches, measured in hundredths of an inch from its lower left corner."""
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100 * width), ylim=(0, 100 * height))
    axes.axis("off")
    return figure, axes


# ---- what packing does ----


def packing() -> Figure:
    lengths = (9, 4, 6)
    figure, axes = canvas(8.2, 4.5)
    heading(axes, 422, "padded", "one row a sample; pale cells are computed for nothing")
    for row, length in enumerate(lengths):
        cells(axes, 380 - 26 * row, [SAMPLES[row]] * length + [EMPTY] * (max(lengths) - length))
    heading(
        axes, 284, "packed,\nstock layers", "attention cuts where positions start again; convolutions and states run on"
    )
    packed_row(axes, 234, lengths)
    for place in ends(lengths):
        hop(axes, LEFT + 26 * place, 248, RED, 2.0)
        axes.text(LEFT + 26 * place - 2, 208, "leaks", ha="center", va="center", color=RED, fontweight="bold")
    heading(axes, 166, "packed,\npackfree-kernels", "every layer ends with each sample, forward and backward")
    packed_row(axes, 116, lengths)
    for place in ends(lengths):
        axes.plot([LEFT + 26 * place - 1.5] * 2, [98, 146], color=INK, linewidth=2.2)
    axes.text(20, 78, "told by position_ids", va="center", color=PALE)
    positions = [token for length in lengths for token in range(length)]
    for place, position in enumerate(positions):
        axes.text(LEFT + 26 * place + 12, 78, str(position), ha="center", va="center", color=PALE)
    axes.text(20, 52, "or by cu_seq_lens_q", va="center", color=PALE)
    axes.text(LEFT, 52, str([0, *ends(lengths), sum(lengths)]), va="center", color=PALE)
    axes.text(20, 26, "or by seq_idx", va="center", color=PALE)
    labels = [index for index, length in enumerate(lengths) for _ in range(length)]
    for place, label in enumerate(labels):
        axes.text(LEFT + 26 * place + 12, 26, str(label), ha="center", va="center", color=PALE)
    return figure


# Where the cells begin.
LEFT = 205


def ends(lengths: Tuple[int, ...]) -> List[int]:
    return [sum(lengths[: index + 1]) for index in range(len(lengths) - 1)]


def heading(axes: Axes, y: float, title: str, text: str) -> None:
    axes.text(20, y + 8, title, fontsize=12, fontweight="bold", va="top", color=INK, linespacing=1.35)
    axes.text(LEFT, y, text, va="center", color=PALE)


def cells(axes: Axes, y: float, colours: List[str]) -> None:
    for index, colour in enumerate(colours):
        axes.add_patch(Rectangle((LEFT + 26 * index, y - 12), 23, 23, facecolor=colour, edgecolor="none"))


def packed_row(axes: Axes, y: float, lengths: Tuple[int, ...]) -> None:
    """The samples side by side, and what a layer with a state hands from token to token inside each."""
    cells(axes, y, [colour for colour, length in zip(SAMPLES, lengths) for _ in range(length)])
    for place in range(1, sum(lengths)):
        if place not in ends(lengths):
            hop(axes, LEFT + 26 * place, y + 14, INK, 0.9)


def hop(axes: Axes, x: float, y: float, colour: str, width: float) -> None:
    """An arrow from the middle of the cell left of ``x`` to that of the one right of it."""
    style = "arc3,rad=-0.55"
    patch = FancyArrowPatch((x - 13, y), (x + 10, y), connectionstyle=style, arrowstyle="-|>", mutation_scale=7)
    patch.set(color=colour, linewidth=width)
    axes.add_patch(patch)


# ---- how fast ----

# Rows of the picture: what is shown, the op, its shape, in the pack "documents".
SHOWN = (
    ("attention", "flash_attn_varlen_func", "8/2 heads x 64"),
    ("gated delta rule", "chunk_gated_delta_rule", "4/8 heads x 128"),
    ("KDA", "chunk_kda", "4 heads x 128"),
    ("Mamba-2", "mamba_chunk_scan_combined", "16 heads x 64, state 128"),
    ("Mamba-1", "selective_scan_fn", "1024 x 16 states"),
    ("short convolution", "causal_conv1d_fn", "2048 x 4, channel-last"),
)
DIRECTIONS = (("forward", "#7fa3d4"), ("forward+backward", "#3b6fb6"))


def speed() -> Figure:
    rows = json.loads(SPEEDS.read_text())
    figure, axes = pyplot.subplots(figsize=(8.2, 4.6), layout="constrained")
    for place, (_, op, shape) in enumerate(SHOWN):
        for offset, (direction, colour) in zip((0.2, -0.2), DIRECTIONS):
            ratios = [ratio_of(rows, op, shape, dtype, direction) for dtype in ("fp32", "bf16")]
            low, high = min(ratios), max(ratios)
            axes.barh(-place + offset, low, height=0.36, color=colour, label=direction if place == 0 else None)
            text = f"{short(low)}x" if short(low) == short(high) else f"{short(low)}x to {short(high)}x"
            axes.text(low * 1.05, -place + offset, text, va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=0.9)
    axes.set(xscale="log", xlim=(0.9, 300))
    axes.set_xticks((1, 2, 5, 10, 20, 50, 100), ["1x", "2x", "5x", "10x", "20x", "50x", "100x"])
    axes.minorticks_off()
    axes.set_yticks([-place for place in range(len(SHOWN))], [f"{title}\n{shape}" for title, _, shape in SHOWN])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(
        "Times as fast as a loop of the stock function over the samples (bar: the lower of fp32 and bf16)", fontsize=10
    )
    about = "15 documents of 38 to 913 tokens; an eighth of these for KDA, a sixteenth for Mamba-1"
    axes.set_xlabel(f"{about}\n{rows[0]['machine']}", fontsize=9, color=PALE)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def ratio_of(rows: List[Dict], op: str, shape: str, dtype: str, direction: str) -> float:
    wanted = dict(op=op, shape=shape, dtype=dtype, direction=direction, distribution="documents")
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row["ratio"]


def short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


# ---- whole steps ----

WAYS = (("padded", "padded", "#d1732f"), ("alone", "sample by sample", "#e3b48f"), ("packed", "packed", "#3b6fb6"))
STEP_TOKENS = 4096


def steps() -> Figure:
    rows = [row for row in json.loads(STEPS.read_text()) if row["tokens"] == STEP_TOKENS and row["dtype"] == "fp32"]
    figure, axes = pyplot.subplots(figsize=(8.2, 4.9), layout="constrained")
    for place, row in enumerate(rows):
        for offset, (way, title, colour) in zip((0.27, 0, -0.27), WAYS):
            ratio = row[f"{way}_ms"] / row["packed_ms"]
            axes.barh(-place + offset, ratio, height=0.24, color=colour, label=title if place == 0 else None)
            seconds = f"{row[f'{way}_ms'] / 1e3:.1f} s"
            text = seconds if way == "packed" else f"{seconds}, {short(ratio)} times as long"
            axes.text(ratio * 1.03, -place + offset, text, va="center", fontsize=8.5, color=INK)
    widest = max(max(row["ratio_padded"], row["ratio_alone"]) for row in rows)
    axes.set(xscale="log", xlim=(0.6, 3.2 * widest))
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50) if tick <= 1.5 * widest]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks([-place for place in range(len(rows))], [row["family"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Time of a whole training step on the same samples, beside packed with this package", fontsize=10)
    about = "4 layers of 512, fp32; 15 documents of 38 to 913 tokens, 4,096 in all"
    axes.set_xlabel(f"{about}\n{rows[0]['machine']}", fontsize=9, color=PALE)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


# ---- the way of a packed call ----

# Lower edge of the first boxes.
TOP = 560


def architecture() -> Figure:
    figure, axes = canvas(9.4, 6.9)
    stages = (
        ("hooks/", "spellings of a batch: position_ids, seq_idx,\ncu_seq_lens_q, numbers in attention_mask", "#eaf0f9"),
        ("<op>/api.py", "public function: checks, one Packing\n(int32 offsets over all tokens)", "#eaf0f9"),
        ("bindings/", "<op>_fwd of torch's dispatcher:\nschema, checks, outputs", "#fbeee4"),
        ("kernel_src/<device>/<op>/", "work items: a sequence and a head,\ncounted from its first token", "#e8f3ec"),
        ("cpu/simd/", "one tier: scalar, avx2, avx512, bf16, amx;\nneon, neon with bf16", "#e8f3ec"),
        ("cpu/chunked/, tiles", "chunks of 64 tokens in scratch memory:\nload, multiply, solve, store", "#e8f3ec"),
    )
    for index, (title, text, colour) in enumerate(stages):
        y = TOP - 106 * index
        box(axes, 20, y, 390, 80, title, text, colour)
        if index:
            arrow(axes, (215, y + 106), (215, y + 80), INK)
    backward = (
        (0, "loss.backward()", "each layer's gradients; a checkpointed layer\nis run again with its own boundaries"),
        (2, "<op>_bwd", "another operator: gradients by the names\nof the inputs; second ones are refused"),
        (3, "the same work items", "each owns what it writes; parameters are\nsummed over items in a fixed order"),
        (5, "states once more", "forward again, segment by segment,\nthen back through the chunks"),
    )
    for index, title, text in backward:
        box(axes, 535, TOP - 106 * index, 385, 80, title, text, "#f6f6f6")
    for upper, lower in ((0, 2), (2, 3), (3, 5)):
        arrow(axes, (727, TOP - 106 * upper), (727, TOP + 80 - 106 * lower), INK)
    arrow(axes, (410, TOP - 66), (535, TOP - 172), PALE)
    axes.text(488, TOP - 106, "saved: the inputs", color=PALE, fontsize=9)
    for x, title in ((20, "forward"), (535, "backward")):
        axes.text(x, TOP + 100, title, fontsize=13, fontweight="bold", va="center", color=INK)
    return figure


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str) -> None:
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=8", facecolor=colour)
    patch.set(edgecolor="#b5b5b5", linewidth=0.8)
    axes.add_patch(patch)
    axes.text(x + 14, y + height - 17, title, fontsize=11, fontweight="bold", va="center", color=INK)
    axes.text(x + 14, y + 29, text, fontsize=10, va="center", color=INK, linespacing=1.3)


def arrow(axes: Axes, start: Tuple[float, float], end: Tuple[float, float], colour: str) -> None:
    patch = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, shrinkA=2, shrinkB=2)
    patch.set(color=colour, linewidth=1.2)
    axes.add_patch(patch)


PICTURES: Dict[str, Callable[[], Figure]] = {
    "packing": packing,
    "speed": speed,
    "steps": steps,
    "architecture": architecture,
}


if __name__ == "__main__":
    main()
