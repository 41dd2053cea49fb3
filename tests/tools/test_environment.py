"""Set-up of .venv: what is missing is one line with the way out, and a torch that is there is used."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, load_tool


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """tools/environment.py with a .venv of its own, an empty folder."""
    tool = load_tool("environment")
    monkeypatch.setattr(tool, "VENV", str(tmp_path / "venv"))
    return tool


def test_this_machine_has_what_is_needed():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "environment.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def refusal(environment, **settings):
    with pytest.raises(environment.Missing) as error:
        environment.check_machine()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_old_python_is_one_line(environment, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    text = refusal(environment)
    assert text.startswith("needs Python 3.11 or newer, and ") and "is 3.9: give another one, as PYTHON=" in text


def test_a_missing_compiler_is_one_line(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert refusal(environment).endswith("clang++ 14 or newer: apt-get install g++ (or CXX=...)")
    monkeypatch.setenv("CXX", "g++-99")
    assert "CXX=g++-99 is not there" in refusal(environment)


def test_a_compiler_without_cpp20_is_one_line(environment, monkeypatch, tmp_path):
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho \"unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert refusal(environment).endswith("says: unrecognized option '-std=c++20'")


def test_missing_venv_or_headers_are_one_line(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert refusal(environment) == "needs Python's venv module: apt-get install python3-venv"
    monkeypatch.delitem(sys.modules, "ensurepip")
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert refusal(environment) == "needs Python's headers (/nowhere/Python.h): apt-get install python3-dev"


def test_make_says_that_there_is_no_python():
    done = subprocess.run(
        ["make", "-B", "build", "PYTHON=no-python", "READY=no-such-file"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and "needs Python 3.11 or newer" in done.stdout


def fake_python(folder, packages):
    """A Python that knows versions and folders of ``packages`` and nothing else."""
    answers = "".join(f'  {name}) echo "{version}"; echo "{where}";;\n' for name, (version, where) in packages.items())
    library = folder / "lib"
    library.mkdir(parents=True)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$3" in\n{answers}  "") echo "{library}";;\nesac\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version, used", [("2.13.0", True), ("2.15.0+cu132", True), ("2.10.1", False), (None, False)])
def test_a_torch_of_the_calling_python_is_used_if_it_serves(environment, monkeypatch, tmp_path, version, used):
    fake_python(tmp_path / "venv", {})
    outer = fake_python(tmp_path / "outer", {} if version is None else {"torch": (version, "/there")})
    monkeypatch.setattr(sys, "executable", str(outer))
    assert environment.torch_is_there() == (version if used else None)
    told = list((tmp_path / "venv" / "lib").glob("*.pth"))
    assert [path.read_text() for path in told] == (["/there\n"] if used else [])


@pytest.mark.parametrize("triton", [None, "3.9.0"])
def test_the_rest_is_asked_for_beside_that_torch(environment, tmp_path, triton):
    """No other torch, and no Triton beside the one that it brings."""
    fake_python(tmp_path / "venv", {} if triton is None else {"triton": (triton, "/there")})
    lines = environment.requirements("2.15.0").splitlines()
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.15.0"]
    assert any(line.startswith("triton==") for line in lines) is (triton is None)
    pinned = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    assert {line for line in pinned if not line.startswith(("torch==", "triton=="))} <= set(lines)


def test_pip_is_tried_again_and_then_says_how_to_go_on(environment, monkeypatch, capsys):
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: None)
    outcomes = [False, True]
    environment.with_retries("torch", lambda: outcomes.pop(0))
    assert outcomes == [] and "once more" in capsys.readouterr().out
    with pytest.raises(environment.Missing, match="goes on where it stopped"):
        environment.with_retries("torch", lambda: False)


def test_torch_comes_from_the_index_of_cpu_builds_or_else_as_pip_finds_it(environment, monkeypatch):
    asked = []

    def pip(*arguments):
        asked.append(arguments)
        return len(asked) == 2

    monkeypatch.setattr(environment, "pip", pip)
    environment.get_torch("torch==2.13.0")
    assert "--index-url" in asked[0] and asked[1] == ("torch==2.13.0",)


def test_fresh_lists_its_lanes_and_reads_what_commands_print():
    fresh = load_tool("fresh")
    log = "Downloading torch-2.whl (526.6 MB)\n  Using cached a.whl (2.0 kB)\n== 3 passed, 1 skipped in 2.0s ==\n"
    assert fresh.fetched(log) == pytest.approx(0.526602)
    assert fresh.counted(log) == "3 passed, 1 skipped"
    outcomes = [fresh.Outcome("pypi", "test", True, 12.3, 2.7, "3 passed")] * 2
    assert max(map(len, fresh.table(outcomes).splitlines())) <= 100
    assert fresh.main(["--list"]) == 0
    for name, lane in fresh.LANES.items():
        for _, command, _ in lane.steps(ROOT):
            target = command[1] if command[0] == "make" else None
            assert target is None or re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), name


def test_a_step_that_fails_ends_its_lane(tmp_path, monkeypatch):
    fresh = load_tool("fresh")
    lane = fresh.Lane("", lambda clone: [("one", ["sh", "-c", "exit 3"], {}), ("two", ["true"], {})])
    monkeypatch.setitem(fresh.LANES, "failing", lane)
    (outcome,) = fresh.run_lane("failing", tmp_path, keep=False)
    assert not outcome.ok and os.listdir(tmp_path) == ["failing-one.log"]
    monkeypatch.setitem(fresh.LANES, "lacking", lane._replace(needs={"no-such-program": "its-package"}))
    (outcome,) = fresh.run_lane("lacking", tmp_path, keep=False)
    assert not outcome.ok and outcome.command == "needs its-package"
