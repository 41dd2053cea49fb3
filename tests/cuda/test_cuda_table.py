"""The committed table of what CUDA kernels take of a GPU: whole, and without spills. Compiling anew takes minutes, so
only the smallest source is compiled here; ``cuda_table --check`` of tools/maintainers compares them all."""

import json
import re
import shutil

import pytest

from tests.conftest import ROOT, load_tool

ROWS = json.loads((ROOT / "kernel_src" / "cuda" / "REGISTERS.json").read_text())


def test_no_kernel_spills():
    assert [row for row in ROWS if row["spilled"]] == []


def test_shared_memory_fits_without_being_asked_for():
    assert all(row["shared"] <= 48 * 1024 for row in ROWS)


def test_every_kernel_is_there_in_every_architecture():
    tool = load_tool("maintainers.cuda_table")
    written = set()
    for path in (ROOT / "kernel_src" / "cuda").rglob("*.cu*"):
        written |= set(re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\))?\s*(\w+)\(", path.read_text()))
    listed = {re.sub("<.*", "", row["kernel"]) for row in ROWS}
    assert len(written) > 10 and listed == written
    assert {row["file"] for row in ROWS} == {
        path.relative_to(ROOT / "kernel_src").as_posix() for path in tool.sources()
    }
    kernels = {(row["file"], row["kernel"]) for row in ROWS}
    archs = {f"sm_{arch}" for arch in tool.ARCHS}
    assert len(ROWS) == len(kernels) * len(archs) and {row["arch"] for row in ROWS} == archs


def test_the_log_of_the_compiler_is_read():
    """A spill in it reaches the table."""
    log = (
        "ptxas info    : Compiling entry function '_ZN8packfree4KeptIfEEvi' for 'sm_90'\n"
        "ptxas info    : Function properties for _ZN8packfree4KeptIfEEvi\n"
        "    24 bytes stack frame, 40 bytes spill stores, 56 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 24 bytes cumulative stack size, 9216 bytes smem, "
        "400 bytes cmem[0]\n"
    )
    (row,) = load_tool("maintainers.cuda_table").rows_of(ROOT / "kernel_src/cuda/x.cu", log)
    assert row == {
        "file": "cuda/x.cu", "kernel": "Kept<float>", "arch": "sm_90", "registers": 128, "spilled": 96, "stack": 24,
        "shared": 9216, "constant": 400,
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiles with nvcc, which is not on PATH")
def test_the_tool_compiles(monkeypatch):
    tool = load_tool("maintainers.cuda_table")
    source = ROOT / "kernel_src" / "cuda" / "packing" / "packing.cu"
    monkeypatch.setattr(tool, "sources", lambda: [source])
    monkeypatch.setattr(tool, "ARCHS", ("90",))
    found = tool.compiled()
    listed = [row for row in ROWS if row["file"] == "cuda/packing/packing.cu" and row["arch"] == "sm_90"]
    assert [row["kernel"] for row in found] == [row["kernel"] for row in listed]
    assert all(row["registers"] > 0 and not row["spilled"] for row in found)


def test_hip_has_every_name_of_cuda_that_the_kernels_use():
    """hip_check compiles them for AMD's GPUs, through headers that give CUDA's names; none has run there."""
    names = re.compile(r"\b(?:cuda[A-Z]\w+|__shfl\w+|__nv_\w+|__bfloat\w+|__float2bfloat\w+)\b")
    kernels = (ROOT / "kernel_src" / "cuda").rglob("*.cu*")
    used = {name for path in kernels for name in names.findall(path.read_text())}
    headers = (ROOT / "tools" / "maintainers" / "hip").glob("*.h")
    given = {name for path in headers for name in names.findall(path.read_text())}
    assert used and used <= given


@pytest.mark.parametrize("arch, wave", [("gfx942", 64), ("gfx1030", 32)])
@pytest.mark.parametrize("name", sorted({row["file"] for row in ROWS}))
def test_hip_compiles_every_kernel_without_a_spill(name, arch, wave):
    """Where the toolkit of tools/maintainers/hip_check.py was fetched."""
    tool = load_tool("maintainers.hip_check")
    if not tool.has_toolkit():
        pytest.skip("no clang for amdgcn with HIP here: python -m tools.maintainers.hip_check fetches one (60 MB)")
    source = ROOT / "kernel_src" / name
    assert tool.compiled(source, "host", arch)
    kernels = tool.kernels_of(tool.compiled(source, "device", arch))
    assert {kernel for kernel, _ in kernels} >= {row["kernel"] for row in ROWS if row["file"] == name}
    for kernel, numbers in kernels:
        assert numbers["wavefront_size"] == wave and numbers["vgpr_spill_count"] == 0, kernel
        assert numbers["private_segment_fixed_size"] == 0 and numbers["group_segment_fixed_size"] <= 64 * 1024, kernel
