"""The kernels in CUDA C++ in waves of 64 lanes, as AMD's gfx9 GPUs have, and of 32: bits, and what is found there.

A warp of the kernels is 32 lanes in either. What takes a wave for a warp is right in waves of 32 and wrong in those of
64; the mistakes made on purpose show that it is found.
"""

import functools
import math
import shutil
import subprocess

import pytest
import torch

from tests.conftest import ROOT
from tests.harness import properties
from tests.harness.cuda import HOST, compile_host, served_by_cuda
from tests.harness.ops import causal_conv1d as conv
from tests.harness.ops import mamba1_scan as scan
from tests.harness.ops.steps import Step
from tests.harness.packings import Pack

WAVES = [("cuda", 32), ("hip", 64), ("hip", 32)]
PACK = Pack("around tiles and chunks", (65, 1, 130, 32, 7), padding=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_do_not_depend_on_the_wave(kernel, dtype):
    """Nor on whose words the kernels are compiled in: outputs, states and every gradient."""
    found = []
    for words, wave in WAVES:
        with served_by_cuda(kernel, words, wave):
            found.append(everything(kernel, dtype))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name in other:
            properties.assert_same_bits(name, other[name], found[0][name])


def everything(kernel, dtype):
    """Every result of every op by name, for the same random inputs each time."""
    found = {}
    for case in (*conv.CASES, *scan.CASES):
        op = (conv if isinstance(case, conv.Case) else scan).op_under_test(case)
        run = functools.partial(op.run, **op.boundaries(PACK))
        torch.manual_seed(0)
        results = properties.run_with_gradients(run, op.make(PACK, dtype))
        found.update({f"{op.name}, {case}: {name}": value for name, value in results.items()})
    for name in ("causal_conv1d_update", "selective_state_update"):
        torch.manual_seed(0)
        y, updated = Step(kernel, name, batch=7)()
        found.update({f"{name} {place}": value for place, value in enumerate((y, *updated))})
    return found


SOURCES = [HOST, "tools/maintainers/hip", "kernel_src/common", "kernel_src/cuda/common", "kernel_src/cuda/mamba2_scan"]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """``copies(old, new)``: the sources of waves.cpp in a folder, with one text changed that stands in them once."""

    def copy(old="", new=""):
        root = tmp_path_factory.mktemp("sources")
        for folder in SOURCES:
            shutil.copytree(ROOT / folder, root / folder)
        texts = {path: path.read_text() for path in root.rglob("*.*") if HOST not in path.as_posix() and path.is_file()}
        if old:
            assert sum(text.count(old) for text in texts.values()) == 1
            for path, text in texts.items():
                path.write_text(text.replace(old, new))
        return root

    return copy


def waves(root, words, wave, what):
    program = compile_host("waves", "waves.cpp", words=words, root=root)
    return subprocess.run([str(program), str(wave), what], capture_output=True, text=True)


def numbers(root, words, wave, what):
    done = waves(root, words, wave, what)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.splitlines()]


NEIGHBOURS = [32 * half + (lane + 1) % 32 for half in range(2) for lane in range(32)]
UPDATE = [0.5 * sum(range(70))] * 5


@pytest.mark.parametrize("words, wave", WAVES)
def test_lanes_of_a_wave(copies, words, wave):
    root = copies()
    assert numbers(root, words, wave, "width") == [wave] * 64
    assert numbers(root, words, wave, "halves") == NEIGHBOURS
    assert numbers(root, words, wave, "update") == UPDATE


@pytest.mark.parametrize("wave", [64, 32])
def test_a_lane_that_is_not_there(copies, wave):
    """HIP leaves open what one reads of it. CUDA asks for every lane of the mask."""
    root = copies()
    read = numbers(root, "hip", wave, "left")
    for lane, value in enumerate(read):
        expected = 0 if lane % 32 >= 30 else math.nan if lane % 32 == 29 else lane + 1
        assert value == expected or (math.isnan(value) and math.isnan(expected))
    assert [lane for lane, value in enumerate(numbers(root, "hip", wave, "outside")) if math.isnan(value)] == [31, 63]
    done = waves(root, "cuda", 32, "left")
    assert done.returncode != 0 and "lanes of a warp are missing in an exchange" in done.stderr


@pytest.mark.parametrize("words, wave", WAVES)
def test_a_barrier_that_is_another(copies, words, wave):
    done = waves(copies(), words, wave, "barriers")
    assert done.returncode != 0 and "wait at different barriers" in done.stderr


MISTAKES = {
    "an exchange without a width": ("__shfl(value, source, 32)", "__shfl(value, source)", "halves", NEIGHBOURS),
    "a sum over a wave": ("int reach = 16;", "int reach = warpSize / 2;", "update", UPDATE),
    "a lane of a wave": ("threadIdx.x % 32;", "threadIdx.x % warpSize;", "update", UPDATE),
    "a row for each wave": (
        "{blockIdx.x} * kWarps + threadIdx.x / 32;", "{blockIdx.x} * kWarps + threadIdx.x / warpSize;", "update", UPDATE
    ),
    "a store by the first lane of a wave": ("if (lane != 0) continue;", "if (threadIdx.x % warpSize != 0) continue;",
                                            "update", UPDATE),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_that_takes_a_wave_for_its_warp_is_found(copies, mistake):
    """Right in waves of 32 lanes, where nothing else would show it."""
    old, new, what, expected = MISTAKES[mistake]
    root = copies(old, new)
    assert numbers(root, "hip", 32, what) == expected
    assert numbers(root, "hip", 64, what) != expected
