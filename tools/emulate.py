"""Run the kernels for aarch64 on an x86_64 machine: qemu-user, Debian's Python for arm64, torch for aarch64.

    python tools/emulate.py                          all checks, on a CPU with bf16 instructions and on one without
    python tools/emulate.py --cpu neoverse-n1        on one of qemu's CPUs
    python tools/emulate.py -- -m pytest tests/ops/test_kda.py -q      what the emulated Python is to run instead

The checks: the verbs; models trained packed and alone; the short set of each op's tests. Each test is a line as it
runs, and at the end a table tells what passed on which CPU, in which tier. Needs Debian's packages
g++-aarch64-linux-gnu and qemu-user and says so where one is missing. Python and torch are fetched once into
.toolkits/aarch64/ and installed nowhere: 0.3 GB, or 3 GB where only PyPI's torch, a CUDA build, is found. The kernels
are built into build/machine-aarch64/. What is emulated computes what a real CPU does, much slower.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

from check_variants import BESIDE_TORCH, REPO_ID, pinned, train_packed
from environment import CPU_INDEX
from fresh import KERNEL_TESTS, counted
from toolkits import CACHE, ROOT, ToolkitMissing, cross_compiler, unpack_debian, wheel_options

MACHINE = "aarch64"
PLACE = CACHE / MACHINE
BUILD = ROOT / "build" / f"machine-{MACHINE}"
# A release of Debian and the Python that it has: the wheels must be for that one.
SUITE, PYTHON, PYTHON_VERSION = "bookworm main", Path("debian/usr/bin/python3.11"), "3.11"
DEBIAN_PACKAGES = ("libstdc++6", "libgomp1", "python3")
PACKAGES = ("torch", *BESIDE_TORCH, "pytest", "hypothesis", "expecttest")
# qemu's CPUs, and the tier that the kernels are to pick on each: all that qemu emulates but SVE, which the kernels do
# not use and which makes torch slower here; and one without bf16 instructions.
CPUS = {"max,sve=off,pauth-impdef=on": "neon_bf16", "neoverse-n1": "neon"}
# What torch's libraries read about the CPU. qemu looks for files here first; of this machine's they make nothing and
# crash. One core like a Neoverse N1 is described, whatever is emulated: our kernels ask the emulator, not these.
CPU_FILES = {
    "proc/cpuinfo": "processor : 0\nFeatures : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid "
    "asimdrdm lrcpc dcpop asimddp\nCPU implementer : 0x41\nCPU architecture: 8\nCPU variant : 0x3\nCPU part : 0xd0c\n"
    "CPU revision : 1\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
}


def emulator() -> str:
    """Path of qemu. Raises ToolkitMissing for the first thing that this machine lacks."""
    cross_compiler(MACHINE)
    found = shutil.which(f"qemu-{MACHINE}")
    if found is None:
        raise ToolkitMissing(f"needs qemu-{MACHINE}: apt-get install qemu-user")
    return found


def pip(command: str, *arguments: str) -> bool:
    """Whether pip succeeded with wheels for the emulated Python."""
    options = ["-q", "--disable-pip-version-check", "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    words = [sys.executable, "-m", "pip", command, *options, *wheel_options(MACHINE), *arguments]
    return subprocess.run(words).returncode == 0


def complete_environment() -> None:
    """Python and packages into PLACE, made whole or not at all, and again for others; raises ToolkitMissing."""
    wanted = "\n".join([SUITE, *DEBIAN_PACKAGES, *pinned(PACKAGES)])
    made_of = PLACE / "made_of"
    if made_of.exists() and made_of.read_text() == wanted:
        return
    print(f"emulate: making {PLACE}, 0.3 GB to download, or 3 GB where torch is PyPI's", flush=True)
    staging = PLACE.with_name(f"{PLACE.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    download = ["install", "-y", "--no-install-recommends", "--download-only"]
    unpack_debian(staging, SUITE, "arm64", [*download, *DEBIAN_PACKAGES])
    for name, text in CPU_FILES.items():
        path = staging / "debian" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wheels = str(staging / "wheels")
    if CPU_INDEX:
        # A CPU build ranks above PyPI's. Where that index does not answer, PyPI's is taken.
        once = ["--retries=1", "--timeout=15", "--index-url", CPU_INDEX]
        pip("download", "--no-deps", "--dest", wheels, *once, *pinned(["torch"]))
    if not pip("install", "--target", str(staging / "site"), "--find-links", wheels, *pinned(PACKAGES)):
        raise ToolkitMissing("pip could not install packages for the emulated Python, see above")
    shutil.rmtree(wheels, ignore_errors=True)
    (staging / made_of.name).write_text(wanted)
    shutil.rmtree(PLACE, ignore_errors=True)
    staging.rename(PLACE)


def emulated(cpu: str, arguments: List[str]) -> List[str]:
    """The command that runs the emulated Python with these arguments."""
    return [emulator(), "-cpu", cpu, "-L", str(PLACE / "debian"), str(PLACE / PYTHON), *arguments]


def settings() -> Dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(PLACE / "site"), str(ROOT)]),
        "PACKFREE_BUILD": str(BUILD),
        "LOCAL_KERNELS": f"{REPO_ID}={BUILD}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


class Step(NamedTuple):
    """One command; the emulated CPU it runs on, if on one; the tier it is to report; the files it is to test."""

    name: str
    command: List[str]
    settings: Dict[str, str] = {}
    cpu: str = ""
    tier: str = ""
    files: Sequence[str] = ()


class Outcome(NamedTuple):
    """What became of a step, by what it printed: tier, pytest's closing line or models trained, tests of each file."""

    step: Step
    ok: bool
    minutes: float
    core_minutes: float
    tier: str = ""
    result: str = ""
    by_file: Dict[str, Counter] = {}

    def rows(self) -> List[str]:
        where = f"{self.step.cpu.split(',')[0]:<14}{self.tier:<11}"
        took = f"{self.minutes:>5.1f}{self.core_minutes:>8.1f}"
        rows = [f"{where}{self.step.name:<19}{'ok' if self.ok else 'FAILED':<8}{took}  {self.result}"]
        return rows + [f"{where}  {Path(path).stem:<38}{told(counts)}" for path, counts in self.by_file.items()]


def tests_by_file(text: str, files: Sequence[str]) -> Dict[str, Counter]:
    """What ``pytest -vv`` says became of the tests of each file; nothing for a file without any."""
    found = {path: Counter() for path in files}
    for path, became in re.findall(r"^(\S+\.py)::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", text, re.MULTILINE):
        found.setdefault(path, Counter())[became.lower()] += 1
    return found


def told(counts: Counter) -> str:
    return ", ".join(f"{number} {became}" for became, number in sorted(counts.items()))


def check_here() -> None:
    """What runs emulated: the loader's own choice of a variant, and models trained packed and alone."""
    import platform

    import torch
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=1)
    print(f"emulate: {platform.machine()}, torch {torch.__version__}, tier {kernel.cpu_tier()}", flush=True)
    train_packed(f"emulate: {Path(kernel.__file__).parent.name}")
    print(kernel.hooks_status())


def core_seconds() -> float:
    """What the programs that were started and have ended took of a core: minutes beside other work tell little."""
    times = os.times()
    return times.children_user + times.children_system


def run(step: Step) -> Outcome:
    """Run a step and show its output as it comes. Another tier than it was to run in is a failure."""
    print(f"emulate: {step.name}{' on ' if step.cpu else ''}{step.cpu} ...", flush=True)
    started, used, lines = time.time(), core_seconds(), []
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **step.settings)
    running = subprocess.Popen(
        step.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in running.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    ok, text = running.wait() == 0, "".join(lines)
    minutes, core_minutes = (time.time() - started) / 60, (core_seconds() - used) / 60
    # What runs on this machine, as pytest for the verbs, reports a tier of this machine.
    found = re.findall(r"^(?:emulate|packfree): .*\btier (\w+)", text, re.MULTILINE) if step.cpu else []
    tier = ", ".join(sorted(set(found)))
    by_file = tests_by_file(text, step.files)
    ok = ok and step.tier in ("", tier) and all(counts["passed"] for counts in by_file.values())
    result = counted(text) or ", ".join(re.findall(r" (\w+) packed equals alone", text))
    outcome = Outcome(step, ok, minutes, core_minutes, tier, result, by_file)
    print(f"emulate: {' '.join(outcome.rows()[0].split())}", flush=True)
    return outcome


def checks(cpu: str) -> List[Step]:
    """What runs on an emulated CPU: training, and the ops' tests, which share the minutes that imports take there."""
    # -vv: pytest.ini has a -q.
    tests = ["-m", "pytest", "-vv", "-p", "no:cacheprovider", "-m", "kernels_ci", *KERNEL_TESTS]
    tier = CPUS.get(cpu, "")
    return [
        Step("training", emulated(cpu, [__file__, "--inside"]), settings(), cpu, tier),
        Step("tests of the ops", emulated(cpu, tests), settings(), cpu, tier, KERNEL_TESTS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", help=f"one of qemu's CPUs, with its options (default: {' and '.join(CPUS)})")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="what the emulated Python is to run (default: the checks)")
    options = parser.parse_args()
    if options.inside:
        check_here()
        return
    try:
        emulator()
        complete_environment()
    except ToolkitMissing as missing:
        sys.exit(f"emulate: {missing}")
    cpus = [options.cpu] if options.cpu else list(CPUS)
    build = Step("build", [sys.executable, str(ROOT / "tools" / "build.py"), "--machine", MACHINE])
    if options.arguments:
        steps = [Step("command", emulated(cpus[0], options.arguments), settings(), cpus[0])]
    else:
        verbs = [sys.executable, "-m", "pytest", "-vv", "tests/cpp/test_simd.py", "-k", MACHINE]
        steps = [Step("verbs", verbs), *(step for cpu in cpus for step in checks(cpu))]
    outcomes = [run(build)]
    if outcomes[0].ok:
        outcomes += [run(step) for step in steps]
    print(f"\n{'emulated CPU':<14}{'tier':<11}{'':<27}{'min':>5}{'of core':>8}")
    print("\n".join(row for outcome in outcomes for row in outcome.rows()))
    failed = sum(not outcome.ok for outcome in outcomes)
    total = sum((counts for outcome in outcomes for counts in outcome.by_file.values()), Counter())
    print(f"emulate: {told(total) or 'no test ran'}; steps failed: {failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
