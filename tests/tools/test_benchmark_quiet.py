"""Which measurements count on a machine that a neighbour slows down (benchmarks/quiet.py)."""

import importlib.util
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks" / "quiet.py"


class World:
    """A clock that only moves when something is done, and a neighbour who comes and goes by it."""

    def __init__(self, disturbed):
        self.now, self.disturbed, self.runs = 0.0, disturbed, 0

    def work(self):
        self.now += 0.002 if self.disturbed(self.now) else 0.001

    def sleep(self, seconds):
        self.now += seconds

    def run(self):
        self.runs += 1
        started = self.now
        self.now += 1.0
        return started


@pytest.fixture
def acquainted():
    spec = importlib.util.spec_from_file_location("quiet_under_test", SOURCE)
    quiet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quiet)

    def make(disturbed):
        world = World(disturbed)
        machine = quiet.Machine([world.work], lambda: world.now, world.sleep)
        machine.get_acquainted(1.0)
        return world, machine

    return make


def test_quiet_machine_runs_once(acquainted):
    world, machine = acquainted(lambda now: False)
    started = world.now
    assert machine.undisturbed(world.run, deadline=100.0) == (pytest.approx(started, abs=0.1), True)
    assert world.runs == 1


def test_waits_while_disturbed(acquainted):
    world, machine = acquainted(lambda now: 2.0 < now < 7.0)
    world.now = 3.0
    started, undisturbed = machine.undisturbed(world.run, deadline=100.0)
    assert started >= 7.0 and undisturbed and world.runs == 1


def test_runs_again_if_disturbed_meanwhile(acquainted):
    world, machine = acquainted(lambda now: 3.5 < now < 7.0)
    world.now = 3.0
    started, undisturbed = machine.undisturbed(world.run, deadline=100.0)
    assert started >= 7.0 and undisturbed and world.runs == 2


def test_patience_ends(acquainted):
    world, machine = acquainted(lambda now: now > 2.0)
    world.now = 3.0
    started, undisturbed = machine.undisturbed(world.run, deadline=10.0)
    assert 10.0 <= started < 11.0 and not undisturbed and world.runs == 1


def test_one_slow_piece_of_work_disturbs(acquainted):
    """The share is that of the slowest piece: half of the matrix unit is lost while the rest is nearly whole."""
    world, machine = acquainted(lambda now: False)
    assert machine.is_quiet()
    world.disturbed = lambda now: True
    assert machine.share() == pytest.approx(0.5)
    assert not machine.is_quiet()


def test_a_slow_dtype_gets_a_smaller_product(monkeypatch):
    """A CPU without products of a dtype would spend minutes on each look at the machine."""
    spec = importlib.util.spec_from_file_location("quiet_of_products", SOURCE)
    quiet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quiet)
    now = [0.0]

    def slow_in_bfloat16(left, right):
        now[0] += left.shape[0] ** 3 * (1e-9 if left.dtype == torch.bfloat16 else 1e-12)
        return left

    monkeypatch.setattr(quiet.torch, "matmul", slow_in_bfloat16)
    monkeypatch.setattr(quiet.time, "perf_counter", lambda: now[0])
    assert quiet.product(torch.float32, 768, 0.03)[1] == 768
    assert quiet.product(torch.bfloat16, 768, 0.03)[1] == 192
    assert quiet.product(torch.bfloat16, 2048, 1e-9)[1] == 128
