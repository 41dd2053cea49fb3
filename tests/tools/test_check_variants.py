"""tools/check_variants.py: its last lines say in which torch a variant ran, why it failed, or that it did not run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import load_tool


@pytest.fixture
def ended(monkeypatch, tmp_path, capsys):
    """Runs the tool where cu130 and cu132 are built and only cu132 loads; gives its last lines and its exit status."""
    tool = load_tool("check_variants")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    for name in ("cu130", "cu132"):
        variant = tmp_path / "build" / f"torch-stable-abi211-{name}-{tool.machine_here()}-linux"
        variant.mkdir(parents=True)
        (variant / "metadata.json").write_text("{}")

    def environment(compute):
        if compute == "cu126":
            raise subprocess.CalledProcessError(1, ["pip", "install", "torch"])
        return sys.executable

    def run(command, env):
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        return SimpleNamespace(returncode=0 if command[-1] == "cu132" else 1)

    monkeypatch.setattr(tool, "environment", environment)
    monkeypatch.setattr(tool.subprocess, "run", run)

    def end(*words):
        monkeypatch.setattr("sys.argv", ["check_variants.py", *words])
        with pytest.raises(SystemExit) as error:
            tool.main()
        return capsys.readouterr().out.splitlines(), error.value.code

    return end


def test_what_ran_and_what_did_not(ended, tmp_path):
    trained = "check_variants: cu132 in torch==2.15.0: ok: llama, qwen3_5_text, bamba trained"
    assert ended("cu132") == ([trained, "check_variants: cu126: not run", "check_variants: cu130: not run"], 0)
    failed = "check_variants: cu130 in torch==2.13.0: FAILED, see above"
    assert ended() == ([failed, trained, "check_variants: cu126: not run"], 1)
    lines, code = ended("cu126", "cu132")
    assert (lines[0], code) == ("check_variants: cu126 in torch==2.13.0: FAILED: not built, run make variants", 1)
    for variant in (tmp_path / "build").glob("*-cu130-*"):
        variant.rename(str(variant).replace("cu130", "cu126"))
    lines, code = ended("cu126")
    assert (lines[0], code) == ("check_variants: cu126 in torch==2.13.0: FAILED: no such torch, pip install failed", 1)


def test_a_variant_that_there_is_not(ended, capsys):
    assert ended("cu999")[1] == 2
