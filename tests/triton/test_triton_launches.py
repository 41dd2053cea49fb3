"""The committed table of how much a training call starts on a GPU."""

import json
from collections import Counter

import pytest
import torch

from tests.conftest import ROOT
from tools.maintainers import launches

TABLE = json.loads((ROOT / "benchmarks" / "results" / "launches.json").read_text())


@pytest.fixture(scope="module")
def today(kernel):
    return launches.table_of(kernel)


def test_no_call_starts_more_than_the_table_says(today):
    assert launches.grown(today, TABLE) == []
    assert TABLE.keys() == today.keys()


def test_a_call_starts_what_its_own_kernels_are(today):
    """With lists that other calls have made: forward no more than the peer's kernels do where one is known."""
    for passes in TABLE.values():
        assert passes["forward"]["again"] <= (passes["forward"]["peer"] or 6)
        for row in passes.values():
            assert row["again"] <= row["first"] <= row["before"]
            assert not {"_count_blocks", "_place_blocks", "sort", "cummax"} & row["kernels"].keys()


def test_a_launch_more_is_noticed():
    more = json.loads(json.dumps(TABLE))
    more["chunk_kda"]["backward"]["again"] += 1
    assert launches.grown(more, TABLE) == ["chunk_kda's backward pass starts 13 (again), and 12 by the table"]
    del more["chunk_kda"]
    assert launches.grown(TABLE, more) == ["the table has no chunk_kda"]


def test_the_count_is_of_what_is_computed(kernel):
    """Views and new memory are no launches, and what an operation is made of counts, not its name."""
    x = torch.arange(6.0)
    with launches.Launches(kernel) as counted:
        torch.diff(x.view(2, 3)[0].expand(2, 3).new_empty(4))
        (x + 1).reshape(3, 2).contiguous()
    assert counted.counts == Counter(sub=1, add=1) and not counted.of_integers
