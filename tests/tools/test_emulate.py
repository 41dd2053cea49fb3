"""tools/emulate.py: what it runs, what counts as a failure, and that its table says what a step itself reported."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_tool

OPS = ["causal_conv1d", "flash_attn_varlen", "gated_delta_rule", "kda", "mamba1_scan", "mamba2_scan"]


@pytest.fixture
def emulate(monkeypatch):
    """The tool where qemu and the emulated Python are there."""
    tool = load_tool("emulate")
    monkeypatch.setattr(tool, "emulator", lambda: "qemu-aarch64")
    monkeypatch.setattr(tool, "complete_environment", lambda: None)
    return tool


def ran_by(emulate, monkeypatch, *words, failing=()):
    """(name, CPU) of the steps that ran, and the exit status."""
    ran = []

    def run(step):
        ran.append((step.name, step.cpu.split(",")[0]))
        return emulate.Outcome(step, step.name not in failing, 0.0, 0.0)

    monkeypatch.setattr(emulate, "run", run)
    monkeypatch.setattr("sys.argv", ["emulate.py", *words])
    with pytest.raises(SystemExit) as ended:
        emulate.main()
    return ran, ended.value.code


CHECKS = ("training", "tests of the ops")


def test_every_op_and_training_on_a_cpu_of_each_tier(emulate, monkeypatch):
    on_each = [(name, cpu) for cpu in ("max", "neoverse-n1") for name in CHECKS]
    assert ran_by(emulate, monkeypatch) == ([("build", ""), ("verbs", ""), *on_each], 0)
    assert set(emulate.CPUS.values()) == {"neon", "neon_bf16"}
    for cpu, tier in emulate.CPUS.items():
        training, tests = emulate.checks(cpu)
        assert {training.tier, tests.tier} == {tier}
        assert [Path(path).stem for path in tests.files] == [f"test_{op}" for op in OPS]
        assert all((ROOT / path).exists() and path in tests.command for path in tests.files)
    ran, _ = ran_by(emulate, monkeypatch, "--cpu", "cortex-a72")
    assert ran == [("build", ""), ("verbs", ""), *((name, "cortex-a72") for name in CHECKS)]


def test_a_command_of_ones_own_runs_alone(emulate, monkeypatch):
    assert ran_by(emulate, monkeypatch, "--", "-c", "pass") == ([("build", ""), ("command", "max")], 0)


def test_nothing_is_emulated_after_a_build_that_failed(emulate, monkeypatch):
    assert ran_by(emulate, monkeypatch, failing=["build"]) == ([("build", "")], 1)


def test_what_fails_is_followed_by_the_rest_and_fails_the_whole(emulate, monkeypatch):
    ran, code = ran_by(emulate, monkeypatch, failing=["verbs"])
    assert (len(ran), code) == (2 + 2 * len(CHECKS), 1)


HEADER = "packfree: torch-stable-abi211-cpu-aarch64-linux, tier neon"


@pytest.mark.parametrize(
    "printed, code, tier, ok, result",
    [
        (f"{HEADER}\n== 3 passed, 1 skipped, 2 deselected in 5.1s ==", 0, "neon", True, "3 passed, 1 skipped"),
        (f"{HEADER}\n== 3 passed in 5.1s ==", 0, "neon_bf16", False, "3 passed"),
        (f"{HEADER}\n== 1 failed, 3 passed in 5.1s ==", 1, "neon", False, "1 failed, 3 passed"),
        ("emulate: aarch64, tier neon\nemulate: v: llama packed equals alone; loss", 0, "neon", True, "llama"),
        ("nothing", 0, "neon", False, ""),
        (HEADER, 0, "", True, ""),
    ],
    ids=["passed", "another tier", "failed", "trained", "no tier reported", "no tier asked for"],
)
def test_a_row_is_what_the_step_reported(emulate, printed, code, tier, ok, result, capfd):
    command = [sys.executable, "-c", f"print({printed!r}); raise SystemExit({code})"]
    outcome = emulate.run(emulate.Step("tests", command, {}, "neoverse-n1", tier))
    assert outcome.ok is ok
    assert outcome.result.startswith(result) and bool(outcome.result) is bool(result)
    assert outcome.tier == ("neon" if "tier" in printed else "")
    assert printed in capfd.readouterr().out
    (row,) = outcome.rows()
    assert [word in row for word in ("neoverse-n1", "FAILED")] == [True, not ok]


def test_what_runs_here_reports_no_tier(emulate):
    """The verbs' programs are emulated, pytest around them is not."""
    outcome = emulate.run(emulate.Step("verbs", [sys.executable, "-c", f"print({HEADER!r})"]))
    assert (outcome.ok, outcome.tier) == (True, "")


@pytest.mark.parametrize(
    "became, ok, counts",
    [
        (("PASSED", "PASSED"), True, {"tests/test_a.py": {"passed": 1}, "tests/test_b.py": {"passed": 1}}),
        (("PASSED", "SKIPPED"), False, {"tests/test_a.py": {"passed": 1}, "tests/test_b.py": {"skipped": 1}}),
        (("PASSED",), False, {"tests/test_a.py": {"passed": 1}, "tests/test_b.py": {}}),
    ],
    ids=["both", "one skipped", "one without tests"],
)
def test_a_file_of_which_no_test_passed_is_a_failure(emulate, became, ok, counts):
    lines = [f"tests/test_{name}.py::test_x[a b] {word}  [ 50%]" for name, word in zip("ab", became)]
    command = [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]
    outcome = emulate.run(emulate.Step("tests", command, files=list(counts)))
    assert (outcome.ok, outcome.by_file) == (ok, counts)
    assert [row.split()[0] for row in outcome.rows()[1:]] == ["test_a", "test_b"]


def test_the_last_line_sums_what_passed(emulate, monkeypatch, capsys):
    """The table of tools/fresh.py takes it for its own."""
    outcome = emulate.Outcome(emulate.Step("x", []), True, 0.0, 0.0, by_file={"a.py": Counter(passed=3, skipped=1)})
    monkeypatch.setattr(emulate, "run", lambda step: outcome)
    monkeypatch.setattr("sys.argv", ["emulate.py", "--cpu", "max"])
    with pytest.raises(SystemExit):
        emulate.main()
    assert emulate.counted(capsys.readouterr().out) == "emulate: 12 passed, 4 skipped; steps failed: 0"
