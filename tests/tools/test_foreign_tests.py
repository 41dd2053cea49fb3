"""foreign_tests of tools/maintainers on a made-up folder of tests: what the hooks break is reported, nothing else."""

import json
import subprocess
import sys

from tests.conftest import BUILD, ROOT

TOOL = [sys.executable, "-m", "tools.maintainers.foreign_tests"]

# One test passes in every mode, one in none, one only without the hooks, one only with sdpa as the default.
PLANTED = """
import sys
import pytest
import torch
from .. import test_modeling_common


class TestTiny:
    def test_right(self):
        assert test_modeling_common.ids(3) == [0, 1, 2]

    def test_wrong_everywhere(self):
        raise AssertionError

    def test_skipped(self):
        pytest.skip("as it is")

    def test_breaks_under_hooks(self):
        assert not any("packfree" in name for name in sys.modules), "something is loaded beside transformers"

    def test_wants_sdpa(self):
        if not any("packfree" in name for name in sys.modules):
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
        model(input_ids=torch.tensor([[3, 4, 5]]))
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("error", ["a mask that shows one to another", "another error"])
    def test_custom_4d_attention_mask(self, error):
        if any("packfree" in name for name in sys.modules):
            raise ValueError(error)

    def test_hangs_and_is_left_out_by_k(self):
        import time
        time.sleep(10_000)
"""


def made_up_folder(tmp_path):
    folder = tmp_path / "their_tests"
    (folder / "models").mkdir(parents=True)
    for package in (folder, folder / "models"):
        (package / "__init__.py").touch()
    (folder / "test_modeling_common.py").write_text("def ids(n):\n    return list(range(n))\n")
    (folder / "models" / "test_modeling_tiny.py").write_text(PLANTED)
    (folder / "models" / "test_modeling_other.py").write_text("def test_other():\n    pass\n")
    return folder


def test_only_what_breaks_with_us_is_reported(tmp_path):
    folder, report = made_up_folder(tmp_path), tmp_path / "report.json"
    command = [*TOOL, str(folder), "--report", str(report), "-k", "not hangs"]
    done = subprocess.run([*command, "--build", str(BUILD)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    faults = json.loads(report.read_text())["broken"]
    names = {mode: [test.rpartition("::")[2] for test in tests] for mode, tests in faults.items()}
    errors = ("a mask that shows one to another", "another error")
    branches = [f"test_custom_4d_attention_mask[{error}]" for error in errors]
    always = ["test_breaks_under_hooks", *branches]
    assert {mode: sorted(tests) for mode, tests in names.items()} == {
        "hooks": sorted(always), "attention": sorted([*always, "test_wants_sdpa"])
    }  # fmt: skip
    assert done.stdout.count("BROKEN (hooks)") == 2 and done.stdout.count("refused (hooks)") == 1
    assert "refused (hooks): their_tests/models/test_modeling_tiny.py::TestTiny::" + branches[0] in done.stdout
    assert "BROKEN (hooks): their_tests/models/test_modeling_tiny.py::TestTiny::test_breaks_under_hooks" in done.stdout
    assert "something is loaded beside transformers" in done.stdout
    lines = done.stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("type "))
    assert [line.split() for line in lines[head : head + 4]] == [
        ["type", "tests", "without", "hooks", "attention", "broken"],
        ["other", "1", "1", "1", "1", "0"],
        ["tiny", "7", "5", "2", "1", "7"],
        ["all", "8", "6", "3", "2", "7"],
    ]
    assert all(len(line) <= 80 for line in lines[: head + 4])


def test_a_test_that_hangs_fails_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKFREE_FOREIGN_SECONDS", "1")
    folder, report = made_up_folder(tmp_path), tmp_path / "report.json"
    command = [*TOOL, str(folder), "--report", str(report), "--modes", "hooks"]
    done = subprocess.run([*command, "-k", "left_out_by_k or test_right"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(report.read_text())["runs"]["hooks"]
    errors = {result["test"].rpartition("::")[2]: result["error"] for result in results}
    assert errors["test_right"] == ""
    assert "more than 1 s" in errors["test_hangs_and_is_left_out_by_k"]


def test_a_type_that_the_folder_lacks_is_an_error(tmp_path):
    command = [*TOOL, str(made_up_folder(tmp_path)), "--types", "tiny", "absent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "for absent" in done.stderr
