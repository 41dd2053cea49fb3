"""The fuzzer of the kernels on guard pages: a short run is clean, and finds faults that are put in on purpose.

tools/sanitize.py runs it for longer, and under the sanitizers.
"""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def sanitize(*options):
    command = [sys.executable, str(ROOT / "tools" / "sanitize.py"), "guard", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_guard_pages_find_nothing():
    done = sanitize("--inputs", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +guard +(\d+)  clean$", done.stdout, re.MULTILINE)
    assert len(rows) == 8 and all(inputs == "25" for _, inputs in rows), done.stdout
    assert len(re.findall(r"^planted fault: \w+ +guard +\d+  found$", done.stdout, re.MULTILINE)) == 4, done.stdout
    assert "200 inputs tried, nothing found" in done.stdout


@pytest.mark.parametrize(
    "fault, says",
    [
        ("short", "which has"),
        ("unwritten", "an element was not written"),
        ("uninitialized", "an element was not written"),
        ("padding", "padding is not left as it must be"),
    ],
)
def test_the_command_fails_at_a_fault(fault, says):
    """The same faults in every op: the command ends with 1 and says what it saw where."""
    done = sanitize("--inputs", "25", "--plant", fault)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout and re.search(r"^INPUT \w+ \d+: tier", done.stdout, re.MULTILINE), done.stdout
    assert "SEE THE FINDINGS ABOVE" in done.stdout
