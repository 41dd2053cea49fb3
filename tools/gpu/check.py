"""The whole check of a GPU: jobs in processes of their own, one JSON file and one table. Called by tools/gpu_check.sh.

Correctness first, a job for each function and dtype, several at a time; then, with the GPU to itself, the speed. A job
that fails or ends early is a line of the report and never the end of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # tests/ and benchmarks/ are used here

import correctness  # noqa: E402
import speed  # noqa: E402
import variant as variants  # noqa: E402

# Processes at a time: each compiles its kernels on a core while others compute.
MOST_PROCESSES = 14
SPEED_SHARE = 0.3  # of the whole time, for the speed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder with the variants")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu_check", help="folder for gpu.json and gpu.txt"
    )
    parser.add_argument("--seconds", type=float, default=420, help="for everything (default 420)")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="a function, or speed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this program itself")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_job(job: str, kernel: Any, device: str, seconds: float) -> dict[str, Any]:
    """What one process finds: of ``function:dtype``, or of ``speed:case`` with the limits in the environment."""
    kind, _, detail = job.rpartition(":")
    if kind == "speed":
        make = next(make for make in speed.CASES if make.__name__ == detail)
        return {"rows": speed.measure(kernel, make, json.loads(os.environ["PACKFREE_GPU_LIMITS"]))}
    correctness.use(kernel)
    return dataclasses.asdict(correctness.check_function(kind, detail, device, seconds))


def start(job: str, options: argparse.Namespace, seconds: float, **environment: str) -> dict[str, Any]:
    """Run ``job`` in a process of its own and return what it found, or how it ended."""
    command = [sys.executable, str(Path(__file__)), "--job", job, "--build", str(options.build)]
    command += ["--device", options.device, "--seconds", str(seconds)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 90, env={**os.environ, **environment}
        )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
        ending = f"ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    except subprocess.TimeoutExpired:
        found, ending = None, f"took more than {seconds + 90:.0f} s and was stopped"
    found = {"failures": [f"{job}: {ending}"]} if found is None else found
    return {"job": job, **found, "seconds": round(time.monotonic() - began, 1)}


def check_all(options: argparse.Namespace) -> dict[str, Any]:
    """All jobs; the report."""
    began = time.monotonic()
    chosen = [name for name in correctness.functions() if not options.only or name in options.only]
    jobs = [f"{name}:{dtype}" for dtype in correctness.DTYPES for name in chosen]
    with_speed = options.device == "cuda" and (not options.only or "speed" in options.only)
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))
    waves = max(1, -(-len(jobs) // processes))
    each = options.seconds * (1 - SPEED_SHARE * with_speed) / waves
    report: dict[str, Any] = {"machine": machine(options.device), "jobs": [], "speed": []}
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(start, job, options, each) for job in jobs]
        for number, future in enumerate(concurrent.futures.as_completed(running), 1):
            report["jobs"].append(future.result())
            print(f"[{number}/{len(jobs)}] {line_of(report['jobs'][-1])}", flush=True)
    if with_speed:
        peaks = speed.limits()
        report["limits"] = peaks
        for make in speed.CASES:
            left = options.seconds - (time.monotonic() - began)
            if left <= 5:
                report["speed"].append({"job": f"speed:{make.__name__}", "failures": ["no time left"]})
                continue
            limits = json.dumps(peaks)
            report["speed"].append(start(f"speed:{make.__name__}", options, left, PACKFREE_GPU_LIMITS=limits))
            print(f"speed {make.__name__}: {report['speed'][-1]['seconds']} s", flush=True)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def machine(device: str) -> str:
    if device == "cpu":
        return f"CPU, torch {torch.__version__}"
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"


def line_of(job: dict[str, Any]) -> str:
    counts = f"{job.get('passed', 0):>4} right {len(job['failures']):>3} wrong {job.get('left', 0):>3} not run"
    return f"{job['job']:<60}{counts}{job['seconds']:>7.1f} s"


def table(report: dict[str, Any]) -> str:
    """The report in at most 110 columns."""
    lines = [report["machine"], f"{report['seconds']:.0f} s", "", "correctness"]
    lines += [f"  {line_of(job)}" for job in sorted(report["jobs"], key=lambda job: job["job"])]
    if report["speed"]:
        peaks = report["limits"]
        lines += [
            "",
            f"speed (bf16 {peaks['bf16'] / 1e12:.0f} TFLOP/s, copy {peaks['copy'] / 1e12:.2f} TB/s, measured)",
        ]
        lines += [f"  {'op':<37}{'shape':<26}{'direction':<18}{'by':<20}{'ms':>9}"]
        for row in (row for job in report["speed"] for row in job.get("rows", [])):
            if "error" in row:
                lines.append(f"  {row['op']:<37}{row['by']}: {row['error']}")
                continue
            lines.append(
                f"  {row['op']:<37}{row['shape']:<26}{row['direction']:<18}{row['by']:<20}{row['ms']:>9.3f}"
                f"{100 * row['share']:>5.0f}% of {row['limit']}"
            )
    failures = wrong(report)
    if failures:
        lines += ["", "wrong:", *(f"  {text}" for text in failures)]
    return "\n".join(lines)


def wrong(report: dict[str, Any]) -> list[str]:
    return [text for job in report["jobs"] + report["speed"] for text in job.get("failures", [])]


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_check: torch {torch.__version__} sees no CUDA device; nothing was run", file=sys.stderr)
        return 2
    try:
        folder = variants.fitting(options.build, options.device)
    except FileNotFoundError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if options.job:
        torch.set_num_threads(1)
        print(json.dumps(run_job(options.job, variants.load(folder), options.device, options.seconds)))
        return 0
    print(f"gpu_check: {folder.name} on {machine(options.device)}", flush=True)
    report = check_all(options)
    report["variant"] = folder.name
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "gpu.txt").write_text(table(report) + "\n")
    print(f"\n{table(report)}\n\nwritten: {options.out / 'gpu.json'}, {options.out / 'gpu.txt'}")
    if not any(job.get("passed") for job in report["jobs"]) and report["jobs"]:
        return 2
    return 1 if wrong(report) else 0


if __name__ == "__main__":
    sys.exit(main())
