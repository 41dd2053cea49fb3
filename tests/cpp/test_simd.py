"""The SIMD layer by itself: a C++ program that checks every verb in every tier, under the address sanitizer too."""

import re
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

SIMD = ROOT / "kernel_src" / "cpu" / "simd"


def compile_checks(compiler, flags, program):
    sources = [str(ROOT / "tests/cpp/test_simd.cpp"), str(SIMD / "tier.cpp")]
    includes = ["-I", str(ROOT / "kernel_src"), "-I", str(ROOT / "tests/cpp")]
    command = [compiler, "-std=gnu++20", "-ffp-contract=off", *flags, *includes, *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.parametrize("flags", [["-O3"], ["-O1", "-g", "-fsanitize=address,undefined"]], ids=["plain", "sanitized"])
def test_simd_verbs(tmp_path, flags):
    compiler = shutil.which("g++")
    assert compiler is not None, "the C++ tests need g++, as the build does"
    program = tmp_path / "test_simd"
    compile_checks(compiler, flags, program)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def aarch64_checks(tmp_path_factory):
    """The same program for aarch64, and the emulator that runs it on another machine."""
    compiler, emulator = (shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64"))
    if compiler is None or emulator is None:
        pytest.skip("needs Debian's packages g++-aarch64-linux-gnu and qemu-user")
    program = tmp_path_factory.mktemp("aarch64") / "test_simd"
    # Static: the emulator needs no libraries of that machine.
    compile_checks(compiler, ["-O3", "-static"], program)
    return emulator, program


@pytest.mark.parametrize("cpu, tier", [("neoverse-n1", "neon"), ("max", "neon_bf16")])
def test_simd_verbs_of_aarch64(aarch64_checks, cpu, tier):
    emulator, program = aarch64_checks
    done = subprocess.run([emulator, "-cpu", cpu, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"best tier {tier}, 0 failures" in done.stdout


def test_every_tier_is_compiled_checked_and_named():
    """A tier is a begin_<tier>.h, a name and a place in each_tier.h, which every op has, and among the checks above."""
    tiers = {path.stem[len("begin_") :] for path in SIMD.glob("begin_*.h")}
    named = re.findall(r"kNames\[\] = \{(.*)\};", (SIMD / "tier.cpp").read_text())
    assert {name.strip(' "') for line in named for name in line.split(",")} == tiers
    for path in (SIMD / "each_tier.h", ROOT / "tests/cpp/test_simd.cpp"):
        assert set(re.findall(r'#include "cpu/simd/begin_(\w+)\.h"', path.read_text())) == tiers, path
    for source in (ROOT / "kernel_src" / "cpu").glob("*/*.cpp"):
        assert source.parent == SIMD or '#include "cpu/simd/each_tier.h"' in source.read_text(), source
