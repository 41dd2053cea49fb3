"""Random packs: packed equals alone to the bit for every op, whatever lies in the pack.

Each example draws a pack (lengths 0, 1, small, and around the edges of tiles and chunks; few sequences or many; padding
behind), one of the op's cases, a dtype and an instruction-set tier, and checks that

- outputs, per-token gradients and states of each sequence are the same bits packed and alone, and padding is 0;
- NaN and infinity in one sequence change no bit of another;
- one, two and three threads give the same bits, parameter gradients included.

Whole layers with projections are held to the same with products of one order of summation in place of PyTorch's, whose
rounding is its BLAS's; with PyTorch's own products and norms, samples stay apart all the same.

As part of the suite the examples are the same in every run. A long run draws new ones; to try 20,000 packs an op:

    PACKFREE_PACKS=20000 .venv/bin/python -m pytest tests/ops/test_random_packs.py
"""

import math
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.harness import properties
from tests.harness.kernel import available_tiers
from tests.harness.ops import EXACT, WITH_PROJECTIONS, WITHOUT_NORMS
from tests.harness.packings import Pack
from tests.harness.products import fixed_order_products

SHORT_RUN = 200
PACKS = int(os.environ.get("PACKFREE_PACKS", SHORT_RUN))
SETTINGS = settings(
    max_examples=PACKS,
    deadline=None,
    derandomize=PACKS == SHORT_RUN,
    database=None,
    print_blob=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

TIERS = available_tiers()
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Lengths at which some op begins a new tile, block or chunk.
EDGES = (16, 32, 64, 128)
MOST_TOKENS = 300

_tiny = st.integers(0, 3)
_edge = st.sampled_from([edge + step for edge in EDGES for step in (-1, 0, 1)])
_lengths = st.one_of(
    st.lists(st.one_of(_tiny, st.integers(4, 20), _edge), min_size=1, max_size=5),
    st.lists(st.one_of(_edge, _edge, _tiny), min_size=2, max_size=4),
    st.lists(_tiny, min_size=6, max_size=18),
)


@dataclass(frozen=True)
class Example:
    """One draw: the pack, and under what it runs."""

    pack: Pack
    case: int
    dtype: torch.dtype
    tier: str
    victim: int


def _pack(lengths, padding) -> Pack:
    while sum(lengths) > MOST_TOKENS:
        lengths = lengths[1:]
    return Pack("random", tuple(lengths), padding)


def _examples(cases: int) -> st.SearchStrategy:
    return st.builds(
        Example,
        pack=st.builds(_pack, _lengths, st.one_of(st.just(0), st.integers(1, 9))),
        case=st.integers(0, cases - 1),
        dtype=st.sampled_from(DTYPES),
        # Half of the packs in the tier that users of this machine get.
        tier=st.one_of(st.just(TIERS[-1]), st.sampled_from(TIERS)),
        victim=st.integers(0, 17),
    )


@pytest.fixture(autouse=True)
def _one_thread():
    """Packs are small, so threads cost more than they save; check_repeatable compares one thread with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _try(cases, check):
    """Run ``check(op, example)`` on as many random packs as asked for; returns the examples."""
    seen = []

    @SETTINGS
    @given(_examples(len(cases)))
    def one(example):
        seen.append(example)
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PACKFREE_CPU_TIER", example.tier)
            check(cases[example.case](), example)

    one()
    assert len(seen) >= PACKS
    return seen


def _check_isolation(op, example, poisons):
    properties.check_isolation(op, example.pack, example.dtype, poisons, [example.victim % len(example.pack.lengths)])


def _check_exact(op, example):
    properties.check_packed_equals_alone(op, example.pack, example.dtype)
    _check_isolation(op, example, (math.nan, math.inf))
    properties.check_repeatable(op, example.pack, example.dtype)


def _check_exact_but_products(op, example):
    with fixed_order_products():
        _check_exact(op, example)


def _check_apart(op, example):
    # No NaN here: torch's bfloat16 product on AMX lets it cross to another row where a row is no multiple of 32 long.
    _check_isolation(op, example, (7.0, -7.0))


@pytest.mark.parametrize("name", EXACT)
def test_packed_equals_alone(name):
    seen = _try(EXACT[name], _check_exact)
    if PACKS < SHORT_RUN:
        return
    # What was drawn is worth the name random: every dtype, most cases and tiers, every kind of length.
    assert {example.dtype for example in seen} == set(DTYPES)
    assert 2 * len({example.tier for example in seen}) > len(TIERS)
    assert 2 * len({example.case for example in seen}) > len(EXACT[name])
    lengths = {length for example in seen for length in example.pack.lengths}
    assert {0, 1} <= lengths and all(lengths & {edge - 1, edge, edge + 1} for edge in EDGES)
    assert any(example.pack.padding for example in seen)
    assert max(len(example.pack.lengths) for example in seen) > 12


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_layers_equal_alone_but_for_torchs_products(name):
    _try(WITHOUT_NORMS[name], _check_exact_but_products)


@pytest.mark.parametrize("name", WITH_PROJECTIONS)
def test_layers_keep_samples_apart(name):
    _try(WITH_PROJECTIONS[name], _check_apart)
