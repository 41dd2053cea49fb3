"""Measure every op against the stock functions on this machine; ``make bench`` runs it after ``make build``.

    python benchmarks/run.py                                 everything, some minutes
    python benchmarks/run.py --quick                         one length distribution
    python benchmarks/run.py --op causal_conv1d_fn           one op (may be repeated)

An op whose result differs from the truth is reported and not timed, and the exit status is then 1. A complete run
writes ``benchmarks/results/cpu.json`` (a list of measurements) and ``cpu.png``; a partial one only to ``--out``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

# The peers are the stock functions, so the kernel must leave transformers as it is.
os.environ["PACKFREE_HOOKS"] = "0"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from case import Case
from cases import OPS, plan
from kernels import get_local_kernel
from measure import WrongResult, check, cpu_name, machine_limits, time_case
from quiet import Machine
from report import Row, heading, line, worst_ratios, write_json, write_plot
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
ACQUAINTANCE_SECONDS = 5.0


def measure(case: Case, name: str, machine: Machine, limits: dict[str, float]) -> list[Row]:
    """One row a direction, after the check that the result is right.

    Raises:
        WrongResult: it is not.
    """
    error = check(case)
    rows = []
    for direction in case.directions:
        timings, quiet = time_case(case, direction, machine)
        ours, alone, pack = timings["ours"], timings["alone"], timings.get("stock_pack")
        work = case.forward_work if direction == "forward" else case.both_work
        rows.append(
            {
                "op": case.op,
                "dtype": case.dtype,
                "shape": case.shape,
                "lengths": list(case.lengths),
                "distribution": case.distribution,
                "direction": direction,
                "ours_ms": round(ours.median, 4),
                "alone_ms": round(alone.median, 4),
                "stock_pack_ms": round(pack.median, 4) if pack else None,
                "ratio": round(alone.median / ours.median, 3),
                "peak_share": round(work / (1e-3 * ours.median) / limits[case.limit], 4),
                "max_error": float(f"{error:.2e}"),
                "ours_range_ms": [round(ours.least, 4), round(ours.most, 4)],
                "alone_range_ms": [round(alone.least, 4), round(alone.most, 4)],
                "undisturbed": quiet,
                "machine": name,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the lengths of documents, one head size")
    parser.add_argument("--op", action="append", choices=OPS, help="only this op (repeatable)")
    parser.add_argument("--out", type=Path, help="folder for cpu.json and cpu.png")
    arguments = parser.parse_args()
    partial = arguments.quick or arguments.op
    out = arguments.out or (None if partial else ROOT / "benchmarks" / "results")

    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Each line when it is known, also into a file.
    sys.stdout.reconfigure(line_buffering=True)
    try:
        kernel = get_local_kernel(ROOT / "build")
    except FileNotFoundError:
        print("bench: no CPU variant in build/: run `make build` first", file=sys.stderr)
        return 1
    name = f"{cpu_name()}, {torch.get_num_threads()} threads, tier {kernel.cpu_tier()}, torch {torch.__version__}"
    print("looking at what this machine can do, some seconds ...")
    limits = machine_limits()
    machine = Machine()
    machine.get_acquainted(ACQUAINTANCE_SECONDS)
    print(name)
    print(
        f"limits measured now: fp32 {limits['fp32'] / 1e9:.0f} GFLOP/s, bf16 {limits['bf16'] / 1e9:.0f} GFLOP/s, "
        f"copy {limits['copy'] / 1e9:.0f} GB/s"
    )
    print("ratio: alone / ours, medians; lim: share of the limit that bounds the op")
    print("~: something else slowed the machine down meanwhile\n")

    rows: list[Row] = []
    wrong: list[str] = []
    shown = ""
    cases = plan(arguments.quick, arguments.op)
    bar = tqdm(total=len(cases), unit="case", ncols=79, leave=False, disable=None)
    for op, make in cases:
        if op != shown:
            shown = op
            bar.write(f"{op}\n{heading()}", file=sys.stdout)
        torch.manual_seed(SEED)
        try:
            measured = measure(make(kernel), name, machine, limits)
        except WrongResult as error:
            wrong.append(str(error))
            bar.write(f"  WRONG {error}", file=sys.stdout)
            measured = []
        for row in measured:
            bar.write(line(row), file=sys.stdout)
        rows += measured
        bar.update()
    bar.close()

    if rows:
        print("\nworst ratio of each op:")
        print("\n".join(worst_ratios(rows)))
    if out is not None and not wrong:
        write_json(rows, out / "cpu.json")
        write_plot(rows, name, out / "cpu.png")
        print(f"\nwritten: {out / 'cpu.json'}, {out / 'cpu.png'}")
    for text in wrong:
        print(f"bench: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
