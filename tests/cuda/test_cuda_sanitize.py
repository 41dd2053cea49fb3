"""The kernels in CUDA C++ on host threads, under sanitizers: no race, no access outside a tensor or a block's memory.

To the thread sanitizer every CUDA thread is a thread of its own, ordered by barriers only (not by exchanges between
lanes), in one block and between the blocks of a launch. The faults put in on purpose show that each watch finds what it
is for.
"""

import os
import subprocess

import pytest

from tests.harness.cuda import compile_host

# The engine has to tell the sanitizers of its stacks, each in its own way.
RACES = ("-fsanitize=thread", "-DCUDA_HOST_RACES")
BOUNDS = ("-fsanitize=address,undefined", "-DCUDA_HOST_BOUNDS")


# CUDA's words, and HIP's in waves of 64 lanes and of 32.
WAVES = [("cuda", "32"), ("hip", "64"), ("hip", "32")]


def sanitize(kind, *options, words="cuda", wave="32"):
    watch, flag = kind
    target = "sanitize" + watch[len("-fsanitize") :].split(",")[0].replace("=", "-")
    program = compile_host(target, "sanitize.cpp", [flag], watch=watch, words=words)
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    return subprocess.run([str(program), "--wave", wave, *options], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words, wave", WAVES)
def test_no_race(words, wave):
    done = sanitize(RACES, "--inputs", "4", words=words, wave=wave)
    assert done.returncode == 0 and done.stdout == "TRIED 4\n" and not done.stderr, done.stderr


@pytest.mark.parametrize(
    "barrier, where",
    [(0, "ConvBackwardKernel"), (1, "DescribeTokens"), (3, "ReadRow")],
    ids=["partial sums", "marks", "staged rows"],
)
def test_a_missing_barrier_is_found(barrier, where):
    """Every thread passes over its barrier number ``barrier``, as if a __syncthreads were not there."""
    done = sanitize(RACES, "--first", "1", "--skip-barrier", str(barrier))
    assert done.returncode != 0 and "data race" in done.stderr and where in done.stderr, done.stderr


@pytest.mark.parametrize("words, wave", WAVES)
def test_no_access_outside(words, wave):
    done = sanitize(BOUNDS, "--inputs", "10", words=words, wave=wave)
    assert done.returncode == 0 and done.stdout == "TRIED 10\n" and "ERROR" not in done.stderr, done.stderr


@pytest.mark.parametrize("fault", ["--short", "--short-shared"])
def test_an_access_one_element_too_far_is_found(fault):
    done = sanitize(BOUNDS, "--inputs", "10", fault)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr
