"""The committed table of what the Triton kernels take of each kind of GPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import BUILD, ROOT

TABLE = ROOT / "benchmarks" / "results" / "triton_targets.json"


def check(root=ROOT):
    """Run the tool's check in a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(root / "tools" / "triton_table.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_table_is_of_todays_kernels_which_fit_and_do_not_spill():
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    targets = {row["target"] for row in json.loads(TABLE.read_text())["rows"]}
    assert targets == {"sm_80", "sm_90", "sm_100", "gfx942"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tool, the package it looks at and the table, to be spoiled."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "tools", root / "tools")
    (root / "build").symlink_to(BUILD)
    (root / "benchmarks" / "results").mkdir(parents=True)
    return root


def test_check_notices_what_is_wrong(copy):
    """A launch that is not in the table, one that nothing makes, one that spills and one that does not fit."""
    table = json.loads(TABLE.read_text())
    table["rows"][0]["launch"] = "another"
    table["rows"][1]["spilled"] = 8
    table["rows"][2]["shared"] = 2**20
    (copy / "benchmarks" / "results" / TABLE.name).write_text(json.dumps(table))
    done = check(copy)
    assert done.returncode != 0
    for text in ("has no row of", "that nothing launches", "spills 8 bytes a thread", "wants 1048576 bytes"):
        assert text in done.stderr
