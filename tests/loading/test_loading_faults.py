"""What a user sees where a load cannot be as wished: another system, damaged files, a lock, a fallback, a benchmark."""

import dataclasses
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BUILD, REPO_ID, ROOT
from tests.harness.hub import UNREACHABLE, child_environment, cpu_variant, hub_published_twice, run


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    yield from hub_published_twice(tmp_path_factory.mktemp("hub"))


def test_a_wrong_torch_and_a_missing_variant_are_named(hub, tmp_path):
    code = f"""
import platform
torch.version.cuda = None  # torch-cuda, for CUDA builds of torch, is taken whatever the release and the machine
real, machine = torch.__version__, platform.machine
torch.__version__ = "2.10.0"
refusals = [error_of(get_kernel, "{REPO_ID}", version=1)]
torch.__version__, platform.machine = real, lambda: "riscv64"
refusals.append(error_of(get_kernel, "{REPO_ID}", version=1))
platform.machine = machine
refusals.append(error_of(get_kernel, "{REPO_ID}", version=2))
refusals.append(error_of(get_kernel, "{REPO_ID}", version=1, backend="cuda"))
print(json.dumps(refusals))
"""
    torch_version, machine, version, backend = run(code, tmp_path, hub.endpoint)
    assert (
        torch_version.startswith("FileNotFoundError")
        and "too new for environment Torch version (2.10)" in torch_version
    )
    assert machine.startswith("FileNotFoundError") and "does not match system CPU (riscv64)" in machine
    assert version.startswith("ValueError") and "Version 2 not found" in version
    assert backend.startswith("ValueError") and "cuda" in backend


def test_a_damaged_download_is_refused_until_it_is_gone(hub, tmp_path):
    """A flipped byte in the shared object: the error names the file, and deleting that file mends the cache."""
    load = f'kernel = get_kernel("{REPO_ID}", version=1)\n'
    folder = run(load + "print(json.dumps(where(kernel)))", tmp_path, hub.endpoint)
    (shared_object,) = Path(folder).glob("*.so")
    content = bytearray(shared_object.read_bytes())
    content[len(content) // 2] ^= 1
    shared_object.resolve().write_bytes(content)
    refusal = run(f'print(json.dumps(error_of(get_kernel, "{REPO_ID}", version=1)))', tmp_path, hub.endpoint)
    assert refusal.startswith("ImportError") and "is damaged" in refusal and str(shared_object.resolve()) in refusal
    shared_object.resolve().unlink()
    assert run(load + "print(json.dumps(works(kernel)))", tmp_path, hub.endpoint) is True


def test_a_missing_shared_object_is_named(tmp_path):
    copy = tmp_path / cpu_variant().name
    shutil.copytree(cpu_variant(), copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = f'from pathlib import Path\nprint(json.dumps(error_of(get_local_kernel, Path("{copy}"))))'
    assert ".so is missing" in run(code, tmp_path / "home")


def test_a_lost_connection_is_an_error_and_the_next_load_goes_on(hub, tmp_path):
    hub.lost = r"GET .*\.so$"
    try:
        refusal = run(f'print(json.dumps(error_of(get_kernel, "{REPO_ID}", version=1)))', tmp_path, hub.endpoint)
    finally:
        hub.lost = None
    assert refusal and "Error" in refusal.split(":")[0]
    assert run(f'print(json.dumps(works(get_kernel("{REPO_ID}", version=1))))', tmp_path, hub.endpoint) is True
    # That load fetched one variant, which huggingface_hub 2.4 does not hand out offline; see docs/loading.md.
    code = f'print(json.dumps(error_of(get_kernel, "{REPO_ID}", version=1)))'
    refusal = run(code, tmp_path, HF_HUB_OFFLINE="1")
    assert refusal.startswith("ValueError") and "not available in the local cache" in refusal


def run_kernels_command(*arguments, home, endpoint=UNREACHABLE):
    """The command line program of kernels in a process of its own; returns what it printed."""
    # In a CUDA build of torch the benchmark would insist on a GPU.
    code = "import sys, torch; torch.version.cuda = None; from kernels.cli import main; sys.argv[0] = 'kernels'; main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=child_environment(home, endpoint), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_lock_file_pins_the_commit(hub, tmp_path):
    """``load_kernel`` never fetches, and huggingface_hub 2.4 gives it a snapshot only if the whole branch is there."""
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    run_kernels_command("lock", str(project), home=home, endpoint=hub.endpoint)
    commit = hub.history(REPO_ID, "v1")[-1]
    assert commit in (project / "kernels.lock").read_text()
    code = f"""
from pathlib import Path
from huggingface_hub import snapshot_download
from kernels import get_locked_kernel
kernel = get_locked_kernel("{REPO_ID}", lockfile=Path("{project}/kernels.lock"))
snapshot_download("{REPO_ID}", repo_type="kernel", revision="{commit}")
print(json.dumps([works(kernel), where(kernel)]))
"""
    right, folder = run(code, home, hub.endpoint)
    assert right and commit in folder
    code = f"""
from pathlib import Path
from kernels import load_kernel
kernel = load_kernel("{REPO_ID}", lockfile=Path("{project}/kernels.lock"))
print(json.dumps([works(kernel), where(kernel)]))
"""
    right, folder = run(code, home, HF_HUB_OFFLINE="1")
    assert right and commit in folder


def test_kernels_benchmark_runs_on_the_built_folder(tmp_path):
    """One of the files, on the build as it lies here, with the runner's own check of the results."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "benchmark_causal_conv1d.py", tmp_path / "benchmarks")
    (tmp_path / "build").symlink_to(BUILD)
    shown = run_kernels_command(
        "benchmark", str(tmp_path), "--iterations", "1", "--warmup", "0", home=tmp_path / "home"
    )
    for workload in ("forward_fp32", "forward_bf16", "forward_backward_fp32"):
        (row,) = [line for line in shown.splitlines() if f"│ {workload} " in line]
        assert row.rstrip(" │").endswith("✓"), row


IMPORT_WITH_WARNINGS = """
import warnings
from pathlib import Path
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {before}
    kernel = get_local_kernel(Path("{variant}"), backend="cpu")
    {after}
said = [str(warning.message) for warning in caught if "packfree-kernels:" in str(warning.message)]
print(json.dumps([said, str(kernel.hooks_status())]))
"""


@pytest.mark.parametrize(
    "before, after, settings, expected",
    [
        ("pass", "import transformers.modeling_utils", {}, None),
        ("pass", "pass", {"PACKFREE_CPU_TIER": "scalar"}, "PACKFREE_CPU_TIER=scalar decides the CPU tier"),
        (
            "import transformers; transformers.__version__ = '5.99.0'",
            "import transformers.modeling_utils",
            {},
            "the hooks were not checked against transformers 5.99.0",
        ),
    ],
    ids=["none", "tier", "transformers later"],
)
def test_c50_a_load_that_fell_back_says_so_in_one_line(tmp_path, before, after, settings, expected):
    code = IMPORT_WITH_WARNINGS.format(before=before, after=after, variant=cpu_variant())
    said, status = run(code, tmp_path, **settings)
    if expected is None:
        assert said == [] and "fallback" not in status
        return
    (line,) = said
    assert expected in line and "\n" not in line
    for known in (cpu_variant().name, "CPU tier ", "hooks "):
        assert known in line
    assert f"fallback       {expected}" in status


def test_c50_what_counts_as_a_fallback(kernel, monkeypatch):
    import torch

    monkeypatch.delenv("PACKFREE_CPU_TIER", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    status = dataclasses.replace(kernel.hooks_status(), cpu_tier="avx2", transformers=None, reason="")
    assert status.fallbacks == ()
    assert "slow scalar tier" in dataclasses.replace(status, cpu_tier="scalar").fallbacks[0]
    assert "not checked against transformers 4.0" in dataclasses.replace(status, transformers="4.0").fallbacks[0]
    held = dataclasses.replace(status, installed=False, reason="the hooks of another build are in place (x)")
    assert held.fallbacks == (held.reason,) and held.state == f"not installed: {held.reason}"
    assert dataclasses.replace(status, installed=False, reason="PACKFREE_HOOKS=0").fallbacks == ()
    # Without a GPU the CPU kernels alone are all that a CUDA build of torch can use.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert status.fallbacks == ()
    monkeypatch.setattr(importlib.import_module(f"{kernel.__name__}.hooks.status"), "has_nvidia_driver", lambda: True)
    assert "CPU kernels alone, in a CUDA build" in status.fallbacks[0]
    assert dataclasses.replace(status, cuda={"causal_conv1d_fwd": "CUDA C++"}).fallbacks == ()
