"""The SIMD layer by itself: a C++ program that checks every verb in every tier, under the address sanitizer too."""

import shutil
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("flags", [["-O3"], ["-O1", "-g", "-fsanitize=address,undefined"]], ids=["plain", "sanitized"])
def test_simd_verbs(tmp_path, flags):
    compiler = shutil.which("g++")
    assert compiler is not None, "the C++ tests need g++, as the build does"
    program = tmp_path / "test_simd"
    sources = [str(ROOT / "tests/cpp/test_simd.cpp"), str(ROOT / "kernel_src/cpu/simd/tier.cpp")]
    includes = ["-I", str(ROOT / "kernel_src"), "-I", str(ROOT / "tests/cpp")]
    command = [compiler, "-std=gnu++20", "-ffp-contract=off", *flags, *includes, *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
