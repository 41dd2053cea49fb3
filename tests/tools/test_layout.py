"""The repository's form: format rules, one place for each thing, and what may include what."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

OPS = re.findall(r"^PACKFREE_OP\((\w+)\)", (ROOT / "torch-ext" / "op_list.h").read_text(), re.MULTILINE)


def run_tool(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.kernels_ci
def test_build_toml_lists_every_source():
    done = run_tool(ROOT / "tools" / "sync_build.py", "--check")
    assert done.returncode == 0, done.stderr


def test_sync_build_notices_a_new_file(tmp_path):
    """The check fails where a source is missing from the lists."""
    for name in ("kernel_src", "torch-ext", "tools"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "tools" else (tmp_path / name).mkdir()
    (tmp_path / "tools" / "sync_build.py").write_text((ROOT / "tools" / "sync_build.py").read_text())
    text = (ROOT / "build.toml").read_text()
    (tmp_path / "build.toml").write_text(text.replace('  "kernel_src/cpu/simd/tier.h",\n', ""))
    done = run_tool(tmp_path / "tools" / "sync_build.py", "--check")
    assert done.returncode != 0 and "out of step" in done.stderr


@pytest.mark.kernels_ci
def test_format_rules():
    done = run_tool(ROOT / "tools" / "check.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_whole(op):
    """A newcomer finds the parts of an op by its name."""
    for path in (
        f"torch-ext/packfree_kernels/{op}/api.py",
        f"torch-ext/packfree_kernels/{op}/autograd.py",
        f"torch-ext/packfree_kernels/{op}/reference.py",
        f"torch-ext/packfree_kernels/{op}/README.md",
        f"torch-ext/bindings/{op}.cpp",
        f"kernel_src/cpu/{op}/{op}.h",
        f"kernel_src/cpu/{op}/{op}.cpp",
        f"tests/ops/test_{op}.py",
        f"tests/harness/ops/{op}.py",
        f"benchmarks/benchmark_{op}.py",
    ):
        assert (ROOT / path).is_file(), f"{op} has no {path}"
    test = (ROOT / f"tests/ops/test_{op}.py").read_text()
    assert "@pytest.mark.kernels_ci" in test and "opcheck(" in test and "check_all_properties" in test


def test_every_test_lies_in_a_room_and_every_room_says_what_it_is_for():
    """No test lies flat; names of files are unique, so that a report's short name is one file."""
    tests = ROOT / "tests"
    assert not list(tests.glob("test_*"))
    plan = (tests / "README.md").read_text()
    for room in (path for path in tests.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert (room / "README.md").is_file() and f"]({room.name}/README.md)" in plan, room.name
        if any(room.glob("test_*.py")):
            assert (room / "__init__.py").is_file(), f"{room.name} is no package: its tests import from others"
    names = [path.name for path in tests.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def includes(path: Path):
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_kernels_include_only_what_lies_below_them():
    """common/ uses nothing of ours beside itself, an op nothing of another op, and no kernel sees a tensor."""
    for path in (ROOT / "kernel_src").rglob("*"):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        name = path.relative_to(ROOT / "kernel_src").as_posix()
        for included in includes(path):
            where = f"{name} includes {included}"
            if name.startswith("common/"):
                assert included.startswith("common/"), where
            for device, other in (("cpu/", "cuda/"), ("cuda/", "cpu/")):
                assert not (name.startswith(device) and included.startswith(other)), where
            parts = included.split("/")
            if len(parts) > 2 and parts[1] in OPS:
                assert name.startswith(f"{parts[0]}/{parts[1]}/"), where
            assert not included.startswith(("bindings/", "torch_binding")), where
        torch_headers = re.findall(r"#include <(torch/[^>]+)>", path.read_text())
        assert not torch_headers or name == "cpu/parallel.h", f"{name} includes {torch_headers}"


def test_intrinsics_stay_in_the_simd_layer():
    for path in (ROOT / "kernel_src").rglob("*"):
        name = path.relative_to(ROOT / "kernel_src").as_posix()
        if path.is_file() and not name.startswith("cpu/simd/"):
            x86, arm = r"\b_mm\d*_\w+|\b__m\d+\w*", r"\bv[a-z]\w*_[fsu](16|32|64)\b|\b\w+\dx\d_t\b"
            found = re.search(f"{x86}|{arm}", path.read_text())
            assert found is None, f"{name} uses {found.group()}"
