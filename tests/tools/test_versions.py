"""The table of versions that tools/versions.py made is whole, right, and what the package says of itself."""

import importlib
import json
from dataclasses import asdict

import pytest

from tests.conftest import ROOT, load_tool


@pytest.fixture(scope="module")
def versions():
    return load_tool("versions")


def test_every_combination_was_run(versions):
    found = versions.known_rows()
    assert list(found) == versions.combinations()
    for row in found.values():
        assert row.right, f"{row.combination}: {row.loads}; {row.models}; {row.packs}"


def test_the_page_is_made_of_the_table(versions):
    assert versions.PAGE.read_text() == versions.page(list(versions.known_rows().values()))


def test_the_hooks_name_the_releases_that_were_run(kernel, versions):
    internals = importlib.import_module(f"{kernel.__name__}.hooks.internals")
    ran = {row.combination.transformers for row in versions.known_rows().values() if not row.lacks}
    assert set(internals.CHECKED_TRANSFORMERS) == {internals.minor_release(release) for release in ran}


def test_a_difference_or_a_failure_is_not_right(versions):
    row = next(row for row in versions.known_rows().values() if not row.lacks)
    for changed in (dict(models="25 equal; differ: llama"), dict(packs="1 failed, 12 passed"), dict(loads="error: no")):
        assert not versions.Row(**{**asdict(row), "combination": row.combination, **changed}).right


def test_what_the_table_of_models_says_is_counted(versions):
    output = "\n".join(
        [
            "| model type | layers | packed | generate() |",
            "| --- | --- | --- | --- |",
            "| llama | attention | equal | equal |",
            "| bamba | Mamba-2 | **logits differ by 1e-1** | equal |",
            "| inkling | refused: a bias | equal, with eager | – |",
            "| rwkv | refused: a state | – | – |",
            "| zaya | not built: TypeError | – | – |",
        ]
    )
    text = "2 equal, 1 equal with eager, 1 refused, 1 not built; differ: bamba"
    assert versions.models_of(output) == text
    assert versions.models_of("Traceback\nKeyError: 'x'") == "error: KeyError: 'x'"


def test_the_table_is_one_line_a_combination():
    text = (ROOT / "tests" / "data" / "versions.json").read_text()
    assert len(text.splitlines()) == len(json.loads(text)) + 2
