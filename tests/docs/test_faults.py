"""The list of faults with ids, tests/faults.md: every id that the tests use is in it, and its tests exist."""

import re

import pytest

from tests.conftest import ROOT

TESTS = ROOT / "tests"
ROWS = re.findall(r"^\| (C\d\d) \| (.+) \| (.+) \|$", (TESTS / "faults.md").read_text(), re.MULTILINE)
# In names of tests, in comments, and as the name of a case.
USE = re.compile(r"def test_(?:\w+_)?c(\d\d)(?=_|\()|\bC(\d\d)\b|\"c(\d\d)[-\"]")


def ids_in(text: str):
    return {"C" + "".join(found) for found in USE.findall(text)}


def test_an_id_is_seen_wherever_it_is_used():
    uses = ["def test_c06_x():", "def test_x_c13(kernel):", '"""C47: x."""', "(C68)", 'Case("c20")', '"c16-one"']
    assert [ids_in(use) for use in uses] == [{"C06"}, {"C13"}, {"C47"}, {"C68"}, {"C20"}, {"C16"}]
    assert not ids_in("namespace c10 { } // c10::Device")


def test_every_id_in_the_tests_is_in_the_list():
    listed = [row[0] for row in ROWS]
    assert listed == sorted(set(listed))
    used = set().union(*(ids_in(path.read_text()) for path in TESTS.rglob("*.py") if path.name != "test_faults.py"))
    assert used == set(listed)


@pytest.mark.parametrize("fault, tests", [(row[0], row[2]) for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_tests_of_the_list_exist(fault, tests):
    """Each is a test or a file of tests, and all that a name gives this id are there."""
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests)
    assert named and ", ".join(f"`{path}::{name}`" if name else f"`{path}`" for path, name in named) == tests
    for path, name in named:
        text = (TESTS / path).read_text()
        assert f"def {name}(" in text if name else fault.lower() in text.lower(), path
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(rf"^def (test_(?:\w+_)?{fault.lower()}(?:_\w+)?)\(", path.read_text(), re.MULTILINE):
            place = path.relative_to(TESTS).as_posix()
            assert (place, name) in named or (place, "") in named, f"{name} is not in the row of {fault}"
