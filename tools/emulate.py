"""Run the kernels for aarch64 on an x86_64 machine: qemu-user, Debian's Python for arm64, torch for aarch64.

    python tools/emulate.py                          the verbs, the kernels' own tests, models trained packed and alone
    python tools/emulate.py --cpu neoverse-n1        on another of qemu's CPUs; this one has no bf16 instructions
    python tools/emulate.py -- -m pytest tests/ops/test_kda.py -q        what the emulated Python is to run instead

Needs Debian's packages g++-aarch64-linux-gnu and qemu-user and says so where one is missing. Python and torch are
fetched once into .toolkits/aarch64/ and installed nowhere: 0.3 GB, or 3 GB where only PyPI's torch, a CUDA build, is
found. The kernels are built into build/machine-aarch64/. What is emulated computes what a real CPU does, much slower.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_variants import BESIDE_TORCH, REPO_ID, pinned, train_packed
from environment import CPU_INDEX
from fresh import KERNEL_TESTS
from toolkits import CACHE, ROOT, ToolkitMissing, cross_compiler, unpack_debian, wheel_options

MACHINE = "aarch64"
PLACE = CACHE / MACHINE
BUILD = ROOT / "build" / f"machine-{MACHINE}"
# A release of Debian and the Python that it has: the wheels must be for that one.
SUITE, PYTHON, PYTHON_VERSION = "bookworm main", Path("debian/usr/bin/python3.11"), "3.11"
DEBIAN_PACKAGES = ("libstdc++6", "libgomp1", "python3")
PACKAGES = ("torch", *BESIDE_TORCH, "pytest", "hypothesis", "expecttest")
# All that qemu emulates but SVE, which the kernels do not use and which makes torch slower here.
CPU = "max,sve=off,pauth-impdef=on"
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


def check_here() -> None:
    """What runs emulated: the loader's own choice of a variant, and models trained packed and alone."""
    import platform

    import torch
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=1)
    print(f"emulate: {platform.machine()}, torch {torch.__version__}, tier {kernel.cpu_tier()}", flush=True)
    train_packed(f"emulate: {Path(kernel.__file__).parent.name}")
    print(kernel.hooks_status())


def run(name: str, command: List[str], changed: Dict[str, str]) -> bool:
    print(f"emulate: {name} ...", flush=True)
    started = time.time()
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, **changed))
    print(f"emulate: {name} {'ok' if done.returncode == 0 else 'FAILED'}, {(time.time() - started) / 60:.1f} min")
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default=CPU, help=f"one of qemu's CPUs, with its options (default: {CPU})")
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
    if not run("build", [sys.executable, str(ROOT / "tools" / "build.py"), "--machine", MACHINE], {}):
        sys.exit(1)
    if options.arguments:
        steps = [("command", emulated(options.cpu, options.arguments), settings())]
    else:
        verbs = [sys.executable, "-m", "pytest", "-q", "tests/cpp/test_simd.py", "-k", MACHINE]
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS, "-m", "kernels_ci"]
        steps = [
            ("verbs", verbs, {}),
            ("tests of the kernels", emulated(options.cpu, tests), settings()),
            ("training", emulated(options.cpu, [__file__, "--inside"]), settings()),
        ]
    sys.exit(0 if all([run(*step) for step in steps]) else 1)


if __name__ == "__main__":
    main()
