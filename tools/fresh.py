"""The commands of the README as a newcomer gets them: fresh clones of HEAD, fresh environments, other machines.

    python3 tools/fresh.py                       every lane
    python3 tools/fresh.py pypi cpus             these lanes
    python3 tools/fresh.py --list

A lane is a clone with an environment of its own and some commands. At the end a table tells minutes, what pip fetched
(from its own lines, files that it had kept included), disk, and what pytest counted; each command's output lies in the
work folder. Emulated CPUs and other compilers need Debian's packages qemu-user, g++-11, g++-12, clang and
g++-aarch64-linux-gnu; a lane says so where one is missing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
# Pip as it is for somebody who never set anything.
PLAIN_PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": ""}
SHORT = ["make", "test", "PYTEST=-m kernels_ci"]
# The short set again, as other CPUs and settings make torch, oneDNN and our kernels behave.
CAPABILITIES: Dict[str, Dict[str, str]] = {
    "baseline": dict(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", PACKFREE_CPU_TIER="scalar"),
    "avx2": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", PACKFREE_CPU_TIER="avx2"),
    "avx512": dict(ATEN_CPU_CAPABILITY="avx512", ONEDNN_MAX_CPU_ISA="AVX512_CORE", PACKFREE_CPU_TIER="avx512"),
    "other-tiers": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="SSE41"),
}
# CPUs of qemu-user: AVX2 and no more; no AVX.
EMULATED = ("Haswell", "Nehalem")
# Kernels against their references, packed against alone, in whatever tiers the CPU has. The verbs' test is not among
# them: what an emulated program starts, here a compiler and its program, runs on the real CPU.
KERNEL_TESTS = [
    f"tests/ops/test_{name}.py"
    for name in ("causal_conv1d", "flash_attn_varlen", "gated_delta_rule", "kda", "mamba1_scan", "mamba2_scan")
]

Step = Tuple[str, List[str], Dict[str, str]]


class Lane(NamedTuple):
    """What a lane shows, what it runs after the clone, and the programs it needs with the packages that bring them."""

    shows: str
    steps: Callable[[Path], List[Step]]
    needs: Dict[str, str] = {}


class Outcome(NamedTuple):
    lane: str
    command: str
    ok: bool
    minutes: float
    fetched_gb: float
    tests: str


def _newcomer(settings: Dict[str, str]) -> Callable[[Path], List[Step]]:
    return lambda clone: [("demo", ["make", "demo"], settings), ("test", ["make", "test"], settings)]


def _torch_already(clone: Path) -> List[Step]:
    """A virtual environment with a torch of the user's, and make with its Python."""
    own = clone.parent / "own-environment"
    python = f"PYTHON={own / 'bin' / 'python'}"
    return [
        ("environment", [sys.executable, "-m", "venv", str(own)], {}),
        ("torch", [str(own / "bin" / "pip"), "install", "torch==2.13.0"], {}),
        ("demo", ["make", "demo", python], PLAIN_PIP),
        ("short tests", [*SHORT, python], PLAIN_PIP),
    ]


def _other_cpus(clone: Path) -> List[Step]:
    """One build; less of this CPU, numbers of threads, and emulated CPUs, where the kernels' own tests are run."""
    steps: List[Step] = [("build", ["make", "build"], {})]
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    steps += [(name, SHORT, settings) for name, settings in CAPABILITIES.items() if has_avx512 or name != "avx512"]
    for threads in "1234":
        # No workers: those of pytest-xdist take one thread each.
        steps.append((f"{threads} threads", [*SHORT[:-1], f"{SHORT[-1]} -n 0"], {"OMP_NUM_THREADS": threads}))
    python = str(clone / ".venv" / "bin" / "python")
    tests = [python, "-m", "pytest", *KERNEL_TESTS, "-m", "kernels_ci", "-p", "no:xdist"]
    for model in EMULATED:
        steps.append((f"emulated {model}", ["qemu-x86_64", "-cpu", model, *tests], {"OMP_NUM_THREADS": "1"}))
    return steps


def _aarch64(clone: Path) -> List[Step]:
    """The variant of another machine, cross-compiled and run by an emulator: its checks."""
    return [("build", ["make", "build"], {}), ("emulated", ["make", "emulate"], {})]


def _compiled_by(compiler: str) -> Lane:
    settings = {"CXX": compiler}
    return Lane(
        f"built by {compiler}",
        lambda clone: [("build", ["make", "build"], settings), ("short tests", SHORT, settings)],
        {compiler: compiler.replace("clang++", "clang")},
    )


LANES: Dict[str, Lane] = {
    "pypi": Lane("pip with PyPI alone: a CUDA build of torch", _newcomer(PLAIN_PIP)),
    "wheel": Lane("pip as it is set up here", _newcomer({})),
    "torch": Lane("torch already in the environment", _torch_already),
    "cpus": Lane("other CPUs and 1 to 4 threads", _other_cpus, {"qemu-x86_64": "qemu-user"}),
    "aarch64": Lane(
        "the aarch64 variant, emulated",
        _aarch64,
        {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"},
    ),
    "gcc11": _compiled_by("g++-11"),
    "gcc12": _compiled_by("g++-12"),
    "clang": _compiled_by("clang++"),
}


def fetched(log: str) -> float:
    """GB of the files that pip took, by its own lines."""
    factors = {"kB": 1e-6, "MB": 1e-3, "GB": 1.0}
    found = re.findall(r"(?:Downloading|Using cached) \S+ \(([\d.]+) (kB|MB|GB)\)", log)
    return sum(float(size) * factors[unit] for size, unit in found)


def counted(log: str) -> str:
    """pytest's closing line, or that of the demo."""
    lines = [line for line in log.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    if lines:
        return re.sub(r" in [\d.]+s.*|=+ ?", "", lines[-1]).strip()
    demo = re.search(r'^DEMO .*"variant": "([^"]+)".*"speedup": ([\d.]+)', log, re.MULTILINE)
    return f"{demo[1]}, {demo[2]}x padded" if demo else ""


def run_step(lane: str, clone: Path, step: Step, work: Path) -> Outcome:
    name, command, settings = step
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PACKFREE_", "MAKE", "MFLAGS"))
    }
    environment.update(settings)
    log = work / f"{lane}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
    print(f"fresh: {lane}: {name} ... (output in {log})", flush=True)
    started = time.time()
    with open(log, "w") as file:
        done = subprocess.run(command, cwd=clone, env=environment, stdout=file, stderr=subprocess.STDOUT)
    text = log.read_text(errors="replace")
    minutes = (time.time() - started) / 60
    outcome = Outcome(lane, name, done.returncode == 0, minutes, fetched(text), counted(text))
    print(f"fresh: {lane}: {name} {'ok' if outcome.ok else 'FAILED'}, {minutes:.1f} min {outcome.tests}", flush=True)
    return outcome


def run_lane(name: str, work: Path, keep: bool) -> List[Outcome]:
    """All steps of a lane, up to the first that fails."""
    lane = LANES[name]
    missing = [package for program, package in lane.needs.items() if shutil.which(program) is None]
    if missing:
        return [Outcome(name, f"needs {', '.join(missing)}", False, 0, 0, "not run")]
    clone = work / name / "packfree-kernels"
    shutil.rmtree(clone.parent, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    outcomes: List[Outcome] = []
    for step in lane.steps(clone):
        outcomes.append(run_step(name, clone, step, work))
        if not outcomes[-1].ok:
            break
    disk = sum(path.lstat().st_size for path in clone.parent.rglob("*") if path.is_file()) / 1e9
    print(f"fresh: {name}: {disk:.1f} GB on disk", flush=True)
    if not keep:
        shutil.rmtree(clone.parent)
    return outcomes


def table(outcomes: List[Outcome]) -> str:
    lines = [f"{'lane':<13}{'command':<26}{'':<7}{'min':>6}{'GB':>6}  tests"]
    for outcome in outcomes:
        ok = "ok" if outcome.ok else "FAILED"
        size = f"{outcome.fetched_gb:.1f}" if outcome.fetched_gb else ""
        lines.append(f"{outcome.lane:<13}{outcome.command:<26}{ok:<7}{outcome.minutes:>6.1f}{size:>6}  {outcome.tests}")
    return "\n".join(lines)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"of {', '.join(LANES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="what each lane shows")
    parser.add_argument("--work", type=Path, help="folder for clones and logs (default: a new temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave the clones there")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:<13}{lane.shows}" for name, lane in LANES.items()))
        return 0
    unknown = [name for name in options.lanes if name not in LANES]
    if unknown:
        parser.error(f"no lane {', '.join(unknown)}; there are {', '.join(LANES)}")
    work = (options.work or Path(tempfile.mkdtemp(prefix="packfree-fresh-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    outcomes: List[Outcome] = []
    for name in options.lanes or LANES:
        outcomes += run_lane(name, work, options.keep)
        (work / "fresh.json").write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=2) + "\n")
    print("\n" + table(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
