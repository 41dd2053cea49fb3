"""Random boundaries, mostly malformed: accepted exactly where they are well-formed, else refused by name.

What is well-formed is written here once more, in plain Python over lists, so that the checks and their test share
nothing. The table of named faults is in test_boundaries.py.
"""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.conftest import BUILD, ROOT, load_tool
from tests.packing.test_boundaries import ATTENTION, FUNCTIONS, ROW, TOKENS

SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
NAMES = st.sampled_from(sorted(FUNCTIONS))

_near = st.integers(-2, TOKENS + 2)
_far = st.sampled_from([-(2**63), -(2**32), -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + TOKENS, 2**63 - 1])
_offsets = st.one_of(
    st.lists(st.integers(0, TOKENS), max_size=6).map(lambda inner: [0, *sorted(inner)]),
    st.lists(_near, max_size=5),
    st.lists(st.one_of(_near, _far), max_size=5).map(lambda inner: [0, *inner]),
)
_labels = st.one_of(
    st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS).map(sorted),
    st.lists(st.integers(-1, 3), min_size=TOKENS, max_size=TOKENS).map(
        lambda row: sorted(row, key=lambda label: (label < 0, label))
    ),
    st.lists(st.one_of(st.integers(-2, 3), _far), min_size=TOKENS - 1, max_size=TOKENS + 1),
)
_integers = st.sampled_from([torch.int32, torch.int64])


def as_tensor(values, dtype):
    """int32 where asked for and possible."""
    fits = all(-(2**31) <= value < 2**31 for value in values)
    return torch.tensor(values, dtype=dtype if fits else torch.int64)


def offsets_are_well_formed(offsets):
    rises = all(left <= right for left, right in zip(offsets[:-1], offsets[1:]))
    return len(offsets) > 0 and offsets[0] == 0 and rises and offsets[-1] <= TOKENS


def labels_are_well_formed(labels):
    live = list(itertools.takewhile(lambda label: label >= 0, labels))
    return len(labels) == TOKENS and live == sorted(live) and all(label < 0 for label in labels[len(live) :])


def ends_of_labels(labels):
    """Where each run of equal labels ends, padding left out."""
    live = [label for label in labels if label >= 0]
    return [0, *itertools.accumulate(len(list(run)) for _, run in itertools.groupby(live))]


def same_cut(offsets, labels):
    return sorted(set(offsets)) == ends_of_labels(labels)


def refused_or_right(op, accepted, end, arguments, **boundaries):
    """Raises for one of ``arguments`` or, if ``accepted``, gives finite outputs that are 0 from token ``end`` on."""
    inputs = op.make(ROW, torch.float32)
    if not accepted:
        with pytest.raises((ValueError, TypeError), match=rf"^\w+: ({'|'.join(arguments)}) must "):
            op.run(inputs, **boundaries)
        return
    for name, value in op.run(inputs, **boundaries).items():
        if op.kind(name) == "tokens":
            assert torch.isfinite(value).all(), name
            assert not value.narrow(op.token_axis[name], end, TOKENS - end).any(), name


@SETTINGS
@example(name="causal_conv1d_fn", offsets=[0, 2**63 - 1, -(2**63)], dtype=torch.int64, form="tensor")
@example(name="causal_conv1d_fn", offsets=[0, 2**63], dtype=torch.int64, form="list")
@example(name="causal_conv1d_fn", offsets=[0, 4, 7], dtype=torch.int32, form="view")
@given(name=NAMES, offsets=_offsets, dtype=_integers, form=st.sampled_from(["tensor", "list", "view"]))
def test_offsets(name, offsets, dtype, form):
    given_offsets = offsets if form == "list" else as_tensor(offsets, dtype)
    if form == "view":
        given_offsets = torch.stack([given_offsets, given_offsets - 1], 1)[:, 0]
    good = offsets_are_well_formed(offsets)
    refused_or_right(FUNCTIONS[name], good, offsets[-1] if good else 0, ["cu_seqlens"], cu_seqlens=given_offsets)


@SETTINGS
@given(queries=_offsets, keys=_offsets, dtype=_integers)
def test_offsets_of_attention(queries, keys, dtype):
    good = offsets_are_well_formed(queries) and offsets_are_well_formed(keys) and len(queries) == len(keys)
    refused_or_right(
        ATTENTION,
        good,
        queries[-1] if good else 0,
        ["cu_seqlens_q", "cu_seqlens_k"],
        cu_seqlens_q=as_tensor(queries, dtype),
        cu_seqlens_k=as_tensor(keys, dtype),
    )


@SETTINGS
@given(name=NAMES, labels=_labels, dtype=_integers)
def test_labels(name, labels, dtype):
    good = labels_are_well_formed(labels)
    end = ends_of_labels(labels)[-1] if good else 0
    refused_or_right(FUNCTIONS[name], good, end, ["seq_idx"], seq_idx=as_tensor(labels, dtype)[None])


@SETTINGS
@given(name=NAMES, offsets=_offsets, labels=_labels, dtype=_integers)
def test_offsets_beside_labels(name, offsets, labels, dtype):
    good = offsets_are_well_formed(offsets) and labels_are_well_formed(labels) and same_cut(offsets, labels)
    given_labels = as_tensor(labels, dtype)[None]
    refused_or_right(
        FUNCTIONS[name],
        good,
        offsets[-1] if good else 0,
        ["cu_seqlens", "seq_idx"],
        cu_seqlens=as_tensor(offsets, dtype),
        seq_idx=given_labels,
    )


@SETTINGS
@given(name=NAMES, positions=st.lists(st.one_of(_near, _far), min_size=TOKENS, max_size=TOKENS), dtype=_integers)
def test_any_positions_are_boundaries(name, positions, dtype):
    """Each step that is not one more starts a sequence, whatever the numbers are."""
    starts = [0] + [t for t in range(1, TOKENS) if positions[t] != positions[t - 1] + 1] + [TOKENS]
    op = FUNCTIONS[name]
    inputs = op.make(ROW, torch.float32)
    expected = op.run(inputs, cu_seqlens=starts)
    for key, value in op.run(inputs, position_ids=as_tensor(positions, dtype)[None]).items():
        assert torch.equal(value, expected[key]), key


def test_the_ops_refuse_what_they_cannot_read():
    """The ops themselves, called with random faults past the Python functions; see tools/sanitize.py for longer."""
    library = next(BUILD.glob(f"*-cpu-{load_tool('toolkits').machine_here()}-linux/*.abi3.so"))
    command = [sys.executable, str(ROOT / "tests/fuzz/calls.py"), str(library), library.name.split(".")[0]]
    done = subprocess.run([*command, "--inputs", "300"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines()[-2:])
    assert int(counts["TRIED"]) == 300 and 100 < int(counts["REFUSED"]) < 250
