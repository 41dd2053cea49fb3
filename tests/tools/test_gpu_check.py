"""The script that checks a GPU, as far as it goes without one: it says so, and its machinery runs on the CPU."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import BUILD, ROOT

SCRIPT = [sys.executable, str(ROOT / "tools" / "gpu" / "check.py"), "--build", str(BUILD)]


def run(*options, cuda_devices=""):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": cuda_devices}
    environment.pop("TRITON_INTERPRET")
    return subprocess.run([*SCRIPT, *options], capture_output=True, text=True, env=environment, timeout=900)


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = run("--out", str(tmp_path))
    assert done.returncode == 2 and "sees no CUDA device; nothing was run" in done.stderr
    assert not list(tmp_path.iterdir())


def test_jobs_and_table_on_the_cpu(tmp_path):
    done = run("--device", "cpu", "--only", "mamba_inner_fn", "--seconds", "900", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {job["job"] for job in report["jobs"]} == {f"mamba_inner_fn:{dtype}" for dtype in ("fp32", "bf16", "fp16")}
    assert all(job["passed"] > 0 and not job["left"] and not job["failures"] for job in report["jobs"])
    text = (tmp_path / "gpu.txt").read_text()
    assert "mamba_inner_fn:bf16" in text and max(map(len, text.splitlines())) <= 110


STAGES = ("first:selective_scan_fn", "sizes:causal_conv1d_fn", "sanitizer:causal_conv1d_fn", "models:lfm2",
          "speed:convolution-64", "speed:attention-64")  # fmt: skip


def test_stages_on_the_cpu(tmp_path):
    """In their order; what a machine lacks is said and claims nothing."""
    done = run("--device", "cpu", "--only", *STAGES, "--seconds", "900", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    found = {job["job"]: job for job in report["jobs"]}
    assert sorted(found) == sorted(STAGES[:4]) and [job["job"] for job in report["speed"]] == sorted(STAGES[4:])
    assert not any(job["failures"] for job in (*report["jobs"], *report["speed"]))
    assert found["first:selective_scan_fn"]["notes"] and found["models:lfm2"]["passed"] == 1
    assert found["sanitizer:causal_conv1d_fn"]["notes"] == ["compute-sanitizer is not installed"]
    rows = [row for job in report["speed"] for row in job["rows"]]
    assert {row["documents"] for row in rows} == {1, 4, 15, 60}
    assert {row["by"] for row in rows if "error" not in row} >= {"ours", "ours, Triton"}
    text = (tmp_path / "gpu.txt").read_text()
    assert "selective_scan_fn" in text and max(map(len, text.splitlines())) <= 110


def test_what_is_done_is_written_at_once(kernel, monkeypatch, tmp_path):
    """A machine that is taken away leaves every job behind that has ended."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import check

    options = check.parse(["--device", "cpu", "--only", "first", "--out", str(tmp_path)])
    seen = []

    def written():
        return len(json.loads((tmp_path / "gpu.json").read_text())["jobs"])

    def start(job, *_, **__):
        # The file is written in another thread than this one.
        deadline = time.monotonic() + 20
        while written() < len(seen) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(written())
        return {"job": job, "passed": 1, "failures": [], "seconds": 0.0}

    monkeypatch.setattr(check, "start", start)
    monkeypatch.setattr(check.os, "cpu_count", lambda: 1)
    report = check.Run(options, BUILD).everything()
    assert len(report["jobs"]) == 6 and seen == list(range(6))


@pytest.fixture
def correctness(kernel, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import correctness

    yield correctness
    del sys.modules["correctness"]


def test_what_is_wrong_is_reported_and_ends_nothing(kernel, correctness, monkeypatch):
    """An op that is wrong by a hair fails its comparisons; what does not compare with it still passes."""
    stock = kernel.causal_conv1d_fn

    def off(*arguments, **keywords):
        result = stock(*arguments, **keywords)
        return (result[0] * 1.001, result[1]) if isinstance(result, tuple) else result * 1.001

    monkeypatch.setattr(kernel, "causal_conv1d_fn", off)
    outcome = correctness.check_function(kernel, "causal_conv1d_fn", "fp32", "cpu", seconds=20)
    assert outcome.failures and all("reference: AssertionError" in text for text in outcome.failures)
    assert outcome.passed > 0


def test_checks_that_find_no_time_are_counted(kernel, correctness):
    outcome = correctness.check_function(kernel, "causal_conv1d_fn", "fp32", "cpu", seconds=-1)
    assert outcome.passed == 0 and outcome.left > 10 and not outcome.failures


def test_the_variant_for_a_torch(monkeypatch, tmp_path):
    """As the Hub's loader chooses: the same major CUDA version, and the newest minor one that is not newer."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import variant

    for name in ("cpu", "cu126", "cu130", "cu132"):
        folder = tmp_path / f"torch-stable-abi211-{name}-x86_64-linux"
        folder.mkdir()
        backend = "cpu" if name == "cpu" else "cuda"
        (folder / "metadata.json").write_text(json.dumps({"backend": {"type": backend}}))
    expected = {"12.8": "cu126", "13.0": "cu130", "13.4": "cu132", "13.2": "cu132"}
    for version, name in expected.items():
        monkeypatch.setattr(torch.version, "cuda", version)
        assert f"-{name}-" in variant.fitting(tmp_path, "cuda").name
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    with pytest.raises(FileNotFoundError, match="no variant for CUDA 11.8"):
        variant.fitting(tmp_path, "cuda")
    assert "-cpu-" in variant.fitting(tmp_path, "cpu").name
