"""Measure whole training steps: packed with this package, stock padded, and stock sample by sample.

    python benchmarks/steps.py                                   every family, 4,096 and 16,384 tokens; an hour
    python benchmarks/steps.py --tokens 4096 --family llama      one (both may be repeated)

A step is forward and backward of a model of 4 layers of 512 (benchmarks/models.py) over samples with the lengths of
documents. Ours and stock run in processes of their own, so that stock is stock, and take turns, so that a slow spell of
the machine falls on both. A step whose loss or gradients differ from those of the samples alone is reported and not
timed, and the exit status is then 1. A complete run writes ``benchmarks/results/steps.json``; a partial one only to
``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from case import DTYPES, LENGTHS
from measure import best_seconds, cpu_name
from quiet import product

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "org/packfree-kernels"
FAMILIES = ("llama", "qwen3_5_text", "kimi_linear", "bamba", "mamba", "lfm2")
TOKENS = (4096, 16384)
WAYS = ("packed", "padded", "alone")
ROUNDS = 3
# Relative, of the loss and of the norm of all gradients; the way from packed to alone is the order of sums.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
# Of torch's speed in fp32: below it a step in bfloat16 takes minutes, on a CPU that has no products of it.
USABLE_BF16 = 0.2

Row = dict[str, Any]


class Worker:
    """A process that takes steps as it is told; ``ours``: with this package's hooks, else without."""

    def __init__(self, ours: bool) -> None:
        settings = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PACKFREE_HOOKS="1")
        settings.pop("LOCAL_KERNELS", None)
        if ours:
            settings["LOCAL_KERNELS"] = f"{KERNEL}={ROOT / 'build'}"
        command = [sys.executable, str(Path(__file__).with_name("step_worker.py")), *([KERNEL] if ours else [])]
        self._process = subprocess.Popen(
            command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks"
        )

    def ask(self, **request: object) -> Row:
        """The answer to a request, see step_worker.py. Raises RuntimeError where the process has ended."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"steps: the process that takes steps ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def measure(workers: dict[str, Worker], family: str, dtype: str, tokens: int) -> Row:
    """One row: milliseconds and peak memory of each way, and what our step's time goes to.

    Raises:
        ValueError: a way gives another loss or other gradients than the samples alone.
    """
    lengths = list(LENGTHS["documents"]) * (tokens // sum(LENGTHS["documents"]))
    for worker in set(workers.values()):
        worker.ask(do="model", family=family, dtype=dtype, lengths=lengths)
    first = {way: workers[way].ask(do="step", way=way) for way in WAYS}
    for way, answer in first.items():
        for quantity in ("loss", "gradient"):
            got, true = answer[quantity], first["alone"][quantity]
            if not abs(got - true) <= TOLERANCE[dtype] * abs(true):
                raise ValueError(f"{family} {dtype} {tokens} tokens: {quantity} {way} is {got}, alone {true}")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            seconds[way].append(workers[way].ask(do="step", way=way)["seconds"])
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    shares = workers["packed"].ask(do="profile", way="packed")
    return {
        "family": family,
        "dtype": dtype,
        "tokens": tokens,
        **{f"{way}_ms": round(1e3 * value, 1) for way, value in medians.items()},
        **{f"{way}_range_ms": [round(1e3 * min(seconds[way]), 1), round(1e3 * max(seconds[way]), 1)] for way in WAYS},
        "ratio_padded": round(medians["padded"] / medians["packed"], 3),
        "ratio_alone": round(medians["alone"] / medians["packed"], 3),
        **{f"share_{name}": round(value, 4) for name, value in shares.items()},
    }


def heading() -> str:
    columns = f"{'packed s':>9}{'padded s':>9}{'alone s':>8} padded alone   ours products other Python"
    return f"{'model, dtype, tokens':<26}{columns}"


def line(row: Row) -> str:
    """One row in at most 100 columns."""
    seconds = [row[f"{way}_ms"] / 1e3 for way in WAYS]
    label = f"{row['family']:<13}{row['dtype']:<5}{row['tokens']:>6,}"
    shares = [100 * row[f"share_{name}"] for name in ("ours", "products", "other", "python")]
    return (
        f"{label:<26}{seconds[0]:>9.2f}{seconds[1]:>9.2f}{seconds[2]:>8.2f}"
        f"{row['ratio_padded']:>6.1f}x{row['ratio_alone']:>5.1f}x"
        f"{shares[0]:>6.0f}%{shares[1]:>8.0f}%{shares[2]:>5.0f}%{shares[3]:>6.1f}%"
    )


def served_dtypes(asked: list[str] | None) -> list[str]:
    """The dtypes to measure: bfloat16 only where it is asked for or this CPU has products of it."""
    import torch

    if asked:
        return asked
    speeds = {}
    for name, dtype in DTYPES.items():
        run, size = product(dtype, 768, 0.1)
        speeds[name] = size**3 / best_seconds(run)
    if speeds["bf16"] >= USABLE_BF16 * speeds["fp32"]:
        return list(DTYPES)
    share = speeds["bf16"] / speeds["fp32"]
    print(f"bf16 is left out: torch's products in it have {share:.0%} of fp32's speed here, torch {torch.__version__}")
    return ["fp32"]


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one (repeatable)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this one (repeatable)")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="only so many (repeatable)")
    parser.add_argument("--out", type=Path, help="folder for steps.json")
    given = parser.parse_args()
    partial = given.family or given.dtype or given.tokens
    out = given.out or (None if partial else ROOT / "benchmarks" / "results")
    sys.stdout.reconfigure(line_buffering=True)
    if not (ROOT / "build").is_dir():
        print("steps: no build/: run `make build` first", file=sys.stderr)
        return 1

    dtypes = served_dtypes(given.dtype)
    ours, stock = Worker(ours=True), Worker(ours=False)
    workers = {"packed": ours, "padded": stock, "alone": stock}
    about = ours.ask(do="about")
    machine = f"{cpu_name()}, {about['threads']} threads, tier {about['tier']}, torch {about['torch']}"
    print(machine)
    print("padded, alone: times as fast as stock on the same samples, medians; then where the packed step's time goes")
    print(heading())
    cases = [(family, dtype, tokens) for tokens in given.tokens or TOKENS for dtype in dtypes
             for family in given.family or FAMILIES]  # fmt: skip
    rows: list[Row] = []
    wrong: list[str] = []
    bar = tqdm(cases, unit="model", ncols=79, leave=False, disable=None)
    for family, dtype, tokens in bar:
        bar.set_description(f"{family} {dtype} {tokens}")
        try:
            rows.append({**measure(workers, family, dtype, tokens), "machine": machine})
            bar.write(line(rows[-1]), file=sys.stdout)
        except ValueError as error:
            wrong.append(str(error))
            bar.write(f"WRONG {error}", file=sys.stdout)
    for worker in (ours, stock):
        worker.close()
    if out is not None and not wrong:
        out.mkdir(parents=True, exist_ok=True)
        (out / "steps.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        print(f"written: {out / 'steps.json'}")
    for text in wrong:
        print(f"steps: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
