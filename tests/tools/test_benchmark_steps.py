"""What the benchmarks of whole steps and of growth print and compare (benchmarks/steps.py, growth.py)."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
STEP = {"seconds": 2.0, "loss": 3.0, "gradient": 1.0}
SHARES = {"ours": 0.1, "products": 0.7, "other": 0.18, "python": 0.02}


class Answers:
    """A process that answers at once; ``changes`` are what some way answers otherwise."""

    def __init__(self, **changes):
        self.changes, self.asked = changes, []

    def ask(self, do, **request):
        self.asked.append((do, request.get("way")))
        if do == "profile":
            return SHARES
        return {} if do == "model" else {**STEP, **self.changes.get(request["way"], {})}


def imported(monkeypatch, name):
    """A benchmark, whose modules know each other by bare names; they are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PACKFREE_HOOKS", "1")  # growth.py sets it
    yield importlib.import_module(name)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture
def steps(monkeypatch):
    yield from imported(monkeypatch, "steps")


@pytest.fixture
def growth(monkeypatch):
    yield from imported(monkeypatch, "growth")


def ways(steps, **changes):
    ours, stock = Answers(**changes), Answers(**changes)
    return {"packed": ours, "padded": stock, "alone": stock}


def test_ways_take_turns_and_give_ratios(steps):
    workers = ways(steps, padded={"seconds": 8.0}, alone={"seconds": 3.0})
    row = steps.measure(workers, "llama", "fp32", 16384)
    assert (row["ratio_padded"], row["ratio_alone"]) == (4.0, 1.5)
    turns = [way for do, way in workers["alone"].asked if do == "step"]
    assert turns == ["padded", "alone"] * (1 + steps.ROUNDS)
    assert len(steps.line(row)) <= 100 and len(steps.heading()) <= 100


@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_a_step_that_is_not_alone_is_no_measurement(steps, quantity):
    with pytest.raises(ValueError, match=f"llama fp32 4096 tokens: {quantity} packed is"):
        steps.measure(ways(steps, packed={quantity: 3.001}), "llama", "fp32", 4096)


def test_goals_that_are_not_met_are_marked(growth):
    sizes = {f"ns_{name}": 10.0 for name in ("1k", "4k", "16k", "64k")}
    row = {"op": "causal_conv1d_fn, channel-last", "dtype": "fp32", "direction": "forward", **sizes}
    good = growth.line({**row, "growth": 1.1, "tiny": 1.4, "threads": 1.9})
    bad = growth.line({**row, "growth": 1.2, "tiny": 1.6, "threads": 1.7})
    assert "!" not in good and bad.count("!") == 3
    assert max(map(len, (good, bad, growth.heading()))) <= 100
