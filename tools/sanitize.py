"""Fuzz the kernels and their bindings where a bad access, a race or undefined behaviour ends the program.

    python tools/sanitize.py                      everything, some minutes after the first build
    python tools/sanitize.py guard thread         only these kinds of watch
    python tools/sanitize.py --inputs 5000        longer; --first N starts at another input
    python tools/sanitize.py --plant short        with a fault on purpose: must fail

Kinds of watch:
    guard    the objects of the variant itself, every tensor and all scratch between pages that cannot be accessed. The
             only kind that sees masked vector instructions and the matrix unit.
    address  address and undefined-behaviour sanitizers: the kernels, the SIMD layer, and the ops called with malformed
             arguments (tests/fuzz/calls.py)
    thread   thread sanitizer: the kernels on up to four threads

In all of them results must not depend on unwritten memory, alignment or the number of threads (tests/fuzz/main.cpp).
Before the inputs, faults are planted to show that each kind finds what it is for. Ends with a table, and with 1 if
anything was found or a planted fault was not.
"""

import argparse
import concurrent.futures
import fcntl
import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from build import load_build_toml, variant_of

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "_work"
SANITIZERS = {"guard": "", "address": "address,undefined", "thread": "thread"}
# What each kind must find: a fault (tests/fuzz/trial.h), and what is then said of it.
PLANTS = {
    "guard": [
        ("short", "behind it"),
        ("unwritten", "not written"),
        ("uninitialized", "NaN"),
        ("padding", "padding is not left"),
    ],
    "address": [("short", "heap-buffer-overflow"), ("overflow", "signed integer overflow")],
    "thread": [("race", "data race")],
}
PLANT_OP = "flash_attn_varlen"
# For each op. An input is run twice; the calls of ops are single and small.
INPUTS = {"guard": 1000, "address": 300, "thread": 100, "calls": 3000}
SECONDS = 30


class Job(NamedTuple):
    what: str
    kind: str
    command: List[str]
    environment: Dict[str, str]
    must_say: str = ""  # of a fault that was planted


class Outcome(NamedTuple):
    inputs: Optional[int]  # None: a program without inputs
    failed: bool
    log: str


# ---- building -----------------------------------------------------------------------------------------------------


def build(kind: str) -> Path:
    """The folder with the programs of one kind."""
    import torch

    config = load_build_toml()
    major, minor = (int(part) for part in variant_of(config).abi.split("."))
    folder = WORK / f"fuzz-{kind}"
    objects = sorted((WORK / "plain").glob("CMakeFiles/common.dir/**/kernel_src/cpu/**/*.o"))
    print(f"sanitize: building {kind} (the sanitizers' builds take minutes the first time)", flush=True)
    environment = dict(os.environ, PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    configure = [
        "cmake", "-S", str(ROOT / "tests" / "fuzz"), "-B", str(folder), "-G", "Ninja", f"-DROOT={ROOT}",
        f"-DSANITIZE={SANITIZERS[kind]}", f"-DSTABLE_ABI_HEX={hex(major << 56 | minor << 48)}",
        f"-DTORCH_DIR={Path(torch.__file__).parent}", f"-DKERNEL_OBJECTS={';'.join(map(str, objects))}",
        f"-DGENERATED_DIR={WORK / 'plain' / 'generated'}", f"-DPYTHON_INCLUDE={sysconfig.get_paths()['include']}",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # for the same reason as in build.py
        fcntl.flock(lock, fcntl.LOCK_EX)
        configured = subprocess.run(configure, env=environment, capture_output=True, text=True)
        if configured.returncode != 0:
            sys.exit(f"sanitize: cmake failed\n{configured.stdout}{configured.stderr}")
        if subprocess.run(["cmake", "--build", str(folder)], env=environment).returncode != 0:
            sys.exit("sanitize: compilation failed, see above")
    return folder


# ---- running ------------------------------------------------------------------------------------------------------


def jobs_of(kind: str, folder: Path, arguments: argparse.Namespace) -> List[Job]:
    inputs = str(arguments.inputs or INPUTS[kind])
    environment = dict(
        os.environ,
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    fuzz = str(folder / "fuzz")
    options = ["--first", str(arguments.first), "--seconds", str(arguments.seconds)]
    options += ["--guard-pages"] if kind == "guard" else []
    jobs = []
    if not arguments.plant:
        for plant, says in PLANTS[kind]:
            # Not every input has room for the fault.
            command = [fuzz, PLANT_OP, *options, "--inputs", "100", "--plant", plant]
            jobs.append(Job(f"planted fault: {plant}", kind, command, environment, says))
    ops = subprocess.run([fuzz], capture_output=True, text=True, check=True).stdout.split()
    planted = ["--plant", arguments.plant] if arguments.plant else []
    for op in ops:
        jobs.append(Job(op, kind, [fuzz, op, "--inputs", inputs, *options, *planted], environment))
    if kind == "guard":
        return jobs
    jobs.append(Job("SIMD layer", kind, [str(folder / "test_simd")], environment))
    if kind == "address":
        jobs.append(calls_job(folder, arguments, environment))
    return jobs


def calls_job(folder: Path, arguments: argparse.Namespace, environment: Dict[str, str]) -> Job:
    """Python needs the sanitizers' runtimes before it starts, and it and torch never free some memory."""
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = dict(environment, LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0")
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "calls.py"), str(folder / "ops.so"), "packfree_fuzz"]
    command += ["--inputs", str(arguments.inputs or INPUTS["calls"]), "--first", str(arguments.first)]
    command += ["--seconds", str(arguments.seconds)]
    return Job("ops, malformed calls", "address", command, environment)


class Progress:
    """One line that counts inputs, on a terminal; elsewhere a line for each finished job."""

    def __init__(self, jobs: int):
        self.jobs, self.done, self.inputs = jobs, 0, 0
        self.lock = threading.Lock()
        self.started = time.monotonic()

    def count(self) -> None:
        with self.lock:
            self.inputs += 1
            if sys.stdout.isatty() and self.inputs % 50 == 0:
                print(f"\r{self.text()}", end="", flush=True)

    def finish(self, job: Job) -> None:
        with self.lock:
            self.done += 1
            if sys.stdout.isatty():
                print(f"\r{self.text()}", end="", flush=True)
            else:
                print(f"{self.text()} ({job.kind}: {job.what})", flush=True)

    def text(self) -> str:
        seconds = time.monotonic() - self.started
        return f"sanitize: {self.done} of {self.jobs} jobs, {self.inputs} inputs, {seconds:.0f} s"


def run(job: Job, progress: Progress) -> Outcome:
    process = subprocess.Popen(
        job.command, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    inputs, tried, last, log = 0, None, "", []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("INPUT "):
            inputs, last = inputs + 1, line
            progress.count()
        elif line.startswith("TRIED "):
            tried = int(line.split()[1])
        else:
            log.append(line)
    failed = process.wait() != 0
    if not failed and inputs and tried != inputs:
        failed, log = True, [*log, f"{inputs} inputs began, {tried} were reported as tried\n"]
    progress.finish(job)
    reproduce = " ".join(job.command)
    if last:  # INPUT op number: ...
        reproduce += f" --first {last.split()[2].rstrip(':')} --inputs 1"
    return Outcome(inputs or None, failed, f"{last}{''.join(log[:60])}again: {reproduce}\n")


# ---- the report ---------------------------------------------------------------------------------------------------


def verdict(job: Job, outcome: Outcome) -> str:
    if job.must_say:
        return "found" if outcome.failed and job.must_say in outcome.log else "NOT FOUND"
    return "FINDING" if outcome.failed else "clean"


def report(jobs: List[Job], outcomes: List[Outcome]) -> bool:
    """Prints the table; whether all is well."""
    good = True
    for job, outcome in zip(jobs, outcomes):
        word = verdict(job, outcome)
        if word in ("FINDING", "NOT FOUND"):
            good = False
            print(f"\n==== {job.what} under {job.kind}: {word}\n{outcome.log}")
    print(f"\n{'what':28} {'watch':8} {'inputs':>7}  result")
    for job, outcome in zip(jobs, outcomes):
        count = "" if outcome.inputs is None else str(outcome.inputs)
        print(f"{job.what:28} {job.kind:8} {count:>7}  {verdict(job, outcome)}")
    total = sum(outcome.inputs or 0 for job, outcome in zip(jobs, outcomes) if not job.must_say)
    print(f"sanitize: {total} inputs tried, {'nothing found' if good else 'SEE THE FINDINGS ABOVE'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(SANITIZERS)}; default: all")
    parser.add_argument("--inputs", type=int, help="inputs for each op and kind, default: by the kind")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="stop each op and kind after this, default: 30")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--plant", default="", help="a fault to put into every op (tests/fuzz/trial.h)")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        if kind not in SANITIZERS:
            parser.error(f"KIND must be one of {', '.join(SANITIZERS)}, got {kind}")

    # The variant itself is what the guard pages watch, and its build makes a header that the ops need.
    subprocess.run([sys.executable, str(ROOT / "tools" / "build.py")], check=True)
    jobs = []
    for kind in arguments.kinds or SANITIZERS:
        jobs += jobs_of(kind, build(kind), arguments)
    progress = Progress(len(jobs))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda job: run(job, progress), jobs))
    sys.exit(0 if report(jobs, outcomes) else 1)


if __name__ == "__main__":
    main()
