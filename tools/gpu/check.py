"""The whole check of a GPU: jobs in processes of their own, one JSON file and one table. Called by tools/gpu_check.sh.

Stages, the most telling facts first, because a machine may be taken away at any time:

    first    versions, and one call of each function at a model's size in bf16 against its reference in fp64
    sizes    every size in bf16: two runs for the same bits, packed against alone; the sanitizer where it is installed
    models   a hooked model of each family, while a wait for the device is an error
    speed    with the GPU to itself: 4, 15 and 60 documents and one, 4,096 and 65,536 tokens, every path
    odd      odd shapes in every dtype

The files are written after every job. A job that fails or ends early is a line of the report and never the end of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
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
import models  # noqa: E402
import sizes  # noqa: E402
import speed  # noqa: E402
import variant as variants  # noqa: E402

# Processes at a time: each compiles its kernels on a core while others compute.
MOST_PROCESSES = 14
# Of the whole time, where a stage needs so much.
SHARES = {"first": 0.25, "sizes": 0.2, "models": 0.15, "speed": 0.35, "odd": 1.0}
_GRACE = 90  # seconds beyond a job's own time until it is stopped


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder with the variants")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu_check", help="folder for gpu.json and gpu.txt"
    )
    parser.add_argument("--seconds", type=float, default=420, help="for everything (default 420)")
    parser.add_argument("--only", nargs="+", metavar="JOB", help=f"a job, a function, a model, or {', '.join(SHARES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this program itself")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def jobs_of(stage: str, device: str) -> list[str]:
    """What a stage is made of: ``stage:detail``, or ``function:dtype`` of the odd shapes."""
    if stage == "odd":
        return [f"{name}:{dtype}" for dtype in ("bf16", "fp32", "fp16") for name in correctness.functions()]
    details = {
        "first": sizes.functions, "sizes": sizes.functions, "models": lambda: list(models.FAMILIES),
        "speed": lambda: speed.jobs(device),
    }[stage]()  # fmt: skip
    jobs = [f"{stage}:{detail}" for detail in details]
    return jobs + [f"sanitizer:{detail}" for detail in details] if stage == "sizes" else jobs


def run_job(job: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one process finds."""
    kind, _, detail = job.rpartition(":")
    if kind == "models":
        return dataclasses.asdict(models.check(detail, options.build, options.device))
    if kind == "sanitizer":
        return dataclasses.asdict(sizes.sanitized(detail, options.build, options.seconds))
    kernel = variants.load(variants.fitting(options.build, options.device))
    correctness.use(kernel)
    if kind == "speed":
        limits = json.loads(os.environ["PACKFREE_GPU_LIMITS"])
        return speed.measure(kernel, detail, limits, options.device, options.seconds)
    if kind == "first":
        return dataclasses.asdict(sizes.first(detail, options.device))
    if kind == "small":
        return dataclasses.asdict(sizes.small(detail, options.device))
    if kind == "sizes":
        return dataclasses.asdict(sizes.full(detail, options.device, options.seconds))
    return dataclasses.asdict(correctness.check_function(kernel, kind, detail, options.device, options.seconds))


def start(job: str, options: argparse.Namespace, seconds: float, **environment: str) -> dict[str, Any]:
    """Run ``job`` in a process of its own and return what it found, or how it ended."""
    command = [sys.executable, str(Path(__file__)), "--job", job, "--build", str(options.build)]
    command += ["--device", options.device, "--seconds", str(seconds)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + _GRACE, env={**os.environ, **environment}
        )
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
        ending = f"ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    except subprocess.TimeoutExpired:
        found, ending = None, f"took more than {seconds + _GRACE:.0f} s and was stopped"
    found = {"failures": [f"{job}: {ending}"]} if found is None else found
    return {"job": job, **found, "seconds": round(time.monotonic() - began, 1)}


class Run:
    """All jobs, in the order of stages, and the report of those that are done."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.began = options, time.monotonic()
        self.report: dict[str, Any] = {
            "machine": machine(options.device), "variant": folder.name, "versions": versions(), "jobs": [], "speed": []
        }  # fmt: skip

    @property
    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def everything(self) -> dict[str, Any]:
        self.write()
        for stage, share in SHARES.items():
            jobs = [job for job in jobs_of(stage, self.options.device) if self.wanted(stage, job)]
            if not jobs or (stage == "speed" and self.options.device != "cuda" and not self.options.only):
                continue
            seconds = min(self.left, share * self.options.seconds)
            if stage == "speed":
                self.measure(jobs, seconds)
            else:
                self.check(stage, jobs, seconds)
        return self.report

    def wanted(self, stage: str, job: str) -> bool:
        only = self.options.only
        return not only or stage in only or job in only or bool(set(job.split(":")) & set(only))

    def check(self, stage: str, jobs: list[str], seconds: float) -> None:
        processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))
        each = seconds / max(1, -(-len(jobs) // processes))
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            running = [pool.submit(self.one, job, each) for job in jobs]
            for number, future in enumerate(concurrent.futures.as_completed(running), 1):
                self.report["jobs"].append(future.result())
                print(f"{stage} [{number}/{len(jobs)}] {line_of(self.report['jobs'][-1])}", flush=True)
                self.write()

    def one(self, job: str, seconds: float) -> dict[str, Any]:
        if self.left <= 0:
            return {"job": job, "left": 1, "failures": [], "notes": ["no time left"], "seconds": 0.0}
        return start(job, self.options, min(seconds, self.left))

    def measure(self, jobs: list[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        self.report["limits"] = peaks = speed.limits(self.options.device)
        for job in jobs:
            left = min(end - time.monotonic(), self.left)
            if left <= 5:
                found = {"job": job, "left": 1, "failures": [], "notes": ["no time left"], "seconds": 0.0}
            else:
                found = start(job, self.options, left / 2, PACKFREE_GPU_LIMITS=json.dumps(peaks))
            self.report["speed"].append(found)
            print(f"speed {job}: {found['seconds']} s", flush=True)
            self.write()

    def write(self) -> None:
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        for name, text in (("gpu.json", json.dumps(self.report, indent=1)), ("gpu.txt", table(self.report))):
            # Whoever reads it, or takes the machine away, finds a whole file.
            (out / f".{name}").write_text(text + "\n")
            (out / f".{name}").replace(out / name)


def machine(device: str) -> str:
    if device == "cpu":
        return f"CPU, torch {torch.__version__}"
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"


def versions() -> dict[str, str]:
    """Of what decides how a kernel comes out, and of what is measured beside it; absent ones are left out."""
    from importlib import metadata

    names = ("triton", "transformers", "kernels", "flash-attn", "flash-linear-attention", "mamba-ssm", "causal-conv1d")
    found = {}
    for name in names:
        if importlib.util.find_spec(name.replace("-", "_").replace("flash_linear_attention", "fla")) is not None:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "there"
    return found


def line_of(job: dict[str, Any]) -> str:
    counts = f"{job.get('passed', 0):>4} right {len(job['failures']):>3} wrong {job.get('left', 0):>3} not run"
    return f"{job['job']:<60}{counts}{job['seconds']:>7.1f} s"


def row_of(row: dict[str, Any]) -> str:
    """One measurement: milliseconds of the GPU and of the host."""
    start = f"  {row['op']:<26}{row['tokens']:>7} /{row['documents']:>3} {row.get('direction', ''):<8} {row['by']:<20}"
    if "error" in row:
        return (start + row["error"])[:110]
    return f"{start}{row['ms']:>10.3f}{row['host_ms']:>9.3f}{100 * row['share']:>5.0f}% of {row['limit']}"


def table(report: dict[str, Any]) -> str:
    """The report in at most 110 columns."""
    known = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [report["machine"], known[:110], f"{report['variant']}, {report['seconds']:.0f} s", "", "correctness"]
    for job in report["jobs"]:
        lines.append(f"  {line_of(job)}")
        if job.get("notes"):
            lines.append(f"      {', '.join(job['notes'])}"[:110])
    if report["speed"]:
        peaks = report["limits"]
        lines += [
            "",
            f"speed (bf16 {peaks['bf16'] / 1e12:.0f} TFLOP/s, copy {peaks['copy'] / 1e12:.2f} TB/s, measured)",
            f"  {'op':<26}{'tokens / docs':>12} {'':<8} {'by':<20}{'GPU ms':>10}{'host ms':>9}",
        ]
        lines += [row_of(row) for job in report["speed"] for row in job.get("rows", [])]
        lines += [f"  {job['job']}: {', '.join(job['notes'])}" for job in report["speed"] if job.get("notes")]
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
        found = run_job(options.job, options)
        print(json.dumps(found))
        # The sanitizer's own status says what happened to a small call, unless that itself failed.
        return 1 if options.job.startswith("small:") and found["failures"] else 0
    print(f"gpu_check: {folder.name} on {machine(options.device)}", flush=True)
    report = Run(options, folder).everything()
    print(f"\n{table(report)}\n\nwritten: {options.out / 'gpu.json'}, {options.out / 'gpu.txt'}")
    if not any(job.get("passed") for job in report["jobs"]) and report["jobs"]:
        return 2
    return 1 if wrong(report) else 0


if __name__ == "__main__":
    sys.exit(main())
