"""The boundary conversions that read no value on the host: one text for GPU threads and for this CPU.

The ops run that text one thread after another here, and a C++ program runs it on threads with barriers. Truth is
packing.py's eager form, which is compact; the ops' form has one entry a token and one more, with empty sequences last.
"""

import subprocess

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import ROOT
from tests.harness.fake_cuda import read_no_values
from tests.harness.ops import EXACT
from tests.harness.packings import Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients

# The tile of one block of threads in kernel_src/common/boundaries.h; packs reach over its edges.
TILE = 2048
PACKS = catalogue(edge=8) + [
    Pack("around a tile's edge", (TILE - 1, 1, TILE, TILE + 1, 2)),
    Pack("a tile of one token sequences", (1,) * (TILE + 5)),
    Pack("many tiles", tuple(range(1, 150)), padding=17),
]


@pytest.fixture
def ops(kernel):
    return kernel._ops.ops


def static(offsets, tokens):
    """``offsets`` with its last entry repeated, as the ops give them; repeated entries inside are not starts."""
    compact = torch.unique_consecutive(offsets)
    return torch.cat([compact, compact[-1:].expand(tokens + 1 - compact.shape[0])]).to(torch.int32)


def eager(kernel, batch, length, **boundaries):
    return kernel.packing.resolve_packing("op", batch, length, torch.device("cpu"), **boundaries)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_labels_and_positions(kernel, ops, pack, dtype):
    expected = static(eager(kernel, 1, pack.tokens, seq_idx=pack.seq_idx).cu_seqlens, pack.tokens)
    assert torch.equal(ops.packing_from_labels(pack.seq_idx.to(dtype)), expected)
    if not pack.padding:
        assert torch.equal(ops.packing_from_positions(pack.position_ids.to(dtype), False), expected)


@pytest.mark.parametrize("only_falls", [False, True])
@pytest.mark.parametrize("length", [1, 7, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_random_positions_of_several_rows(kernel, ops, length, only_falls):
    """Steps of 0, 1 and 2 and falls, in every place; rows end sequences too."""
    positions = torch.randint(-1, 3, (2, length)).cumsum(1)
    given = torch.stack([positions] * 3) if only_falls else positions
    expected = static(eager(kernel, 2, length, position_ids=given).cu_seqlens, 2 * length)
    assert torch.equal(ops.packing_from_positions(positions, only_falls), expected)
    strided = positions.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(ops.packing_from_positions(strided, only_falls), expected)


def test_extreme_positions_do_not_overflow(ops):
    for dtype in (torch.int32, torch.int64):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        positions = torch.tensor([[high - 1, high, low, low + 1, high]], dtype=dtype)
        assert ops.packing_from_positions(positions, False).tolist()[:2] == [0, 4 if dtype == torch.int64 else 2]
        assert ops.packing_from_positions(positions, True).tolist() == [0, 2, 5, 5, 5, 5]


def test_padding_between_rows_is_a_sequence(kernel, ops):
    labels = torch.tensor([[0, 0, -1, -7], [5, 6, 6, -1]])
    expected = eager(kernel, 2, 4, seq_idx=labels)
    assert torch.equal(ops.packing_from_labels(labels), static(expected.cu_seqlens, 8))


def test_no_tokens(ops):
    empty = torch.zeros(1, 0, dtype=torch.int64)
    assert ops.packing_from_positions(empty, False).tolist() == [0]
    assert ops.packing_from_labels(empty).tolist() == [0]


def test_offsets_are_bounded_before_they_are_narrowed(ops):
    wide = torch.tensor([0, 3, 7, 2**32 + 4, -(2**40), 10])
    assert ops.packing_from_offsets(wide, 10).tolist() == [0, 3, 7, 10, 0, 10]
    assert ops.packing_from_offsets(torch.tensor([3, 5, 10]), 10).tolist() == [0, 5, 10]
    narrow = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    found = ops.packing_from_offsets(narrow, 10)
    assert found.tolist() == [0, 4, 9, 10] and found.dtype == torch.int32


def test_what_a_gpu_gets_is_what_a_cpu_gets(kernel, monkeypatch):
    """resolve_packing as on a GPU, where no value may be read: the same boundaries and the same live mask."""
    cases = [
        (1, dict(seq_idx=torch.tensor([[0, 0, 3, 3, 3, -1]]))),
        (2, dict(seq_idx=torch.tensor([[0, 0, 3, 3, 3, -1], [1, 2, 2, 2, 2, 2]]))),
        (1, dict(position_ids=torch.tensor([2, 3, 4, 2, 3, 2]))),
        (2, dict(position_ids=torch.tensor([[[0, 1, 1, 1, 0, 1]] * 2] * 3))),
        (2, dict(position_ids=torch.tensor([[[0, 1, 2, 0, 0, 1]] * 2] * 4))),
        (2, {}),
    ]
    seen = [eager(kernel, batch, 6, **boundaries) for batch, boundaries in cases]
    read_no_values(kernel, monkeypatch)
    for (batch, boundaries), expected in zip(cases, seen):
        found = eager(kernel, batch, 6, **boundaries)
        assert kernel.packing.same_boundaries(found.cu_seqlens, expected.cu_seqlens)
        assert found.cu_seqlens.dtype == torch.int32 and found.tokens == expected.tokens
        assert (found.live is None) == (expected.live is None)
        assert found.live is None or torch.equal(found.live, expected.live)


class Sizes(TorchDispatchMode):
    """The most numbers in any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


STATES = ("causal_conv1d_fn", "chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined", "selective_scan_fn")


@pytest.mark.parametrize("name", STATES)
def test_states_on_a_gpu_are_those_on_a_cpu(kernel, monkeypatch, name):
    """One for each sequence in every spelling, given and returned, and their gradients; no room for one a token."""
    op, pack = next(op for op in (make() for make in EXACT[name]) if "seq_idx" in op.spellings), Pack("", (3, 1, 5))
    inputs = op.make(pack, torch.float32)

    def results(spelling):
        return run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack, spelling)), inputs)

    expected = results("cu_seqlens")
    read_no_values(kernel, monkeypatch)
    with Sizes() as sizes:
        for spelling in ("seq_idx", "position_ids"):
            for key, value in results(spelling).items():
                assert_same_bits(f"{key} by {spelling}", value, expected[key])
    state = max(expected[key][0].numel() for key in expected if op.kind(key) == "states")
    assert sizes.largest < pack.tokens * state


def test_labels_between_rows_with_states_on_a_gpu(kernel, monkeypatch):
    """Padding that lies between sequences has a place among them and no state."""
    labels = torch.tensor([[0, 0, 3, 3, 3, -1], [1, 2, 2, 2, 2, 2]])
    expected = eager(kernel, 2, 6, seq_idx=labels)
    read_no_values(kernel, monkeypatch)
    found = eager(kernel, 2, 6, seq_idx=labels, has_states=True)
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens) and torch.equal(found.states, expected.states)
    assert torch.equal(found.live, expected.live) and found.num_states == 4


def test_opcheck(ops):
    labels = torch.tensor([[0, 0, 1, -1]])
    torch.library.opcheck(ops.packing_from_labels.default, (labels,))
    torch.library.opcheck(ops.packing_from_positions.default, (labels, True))
    torch.library.opcheck(ops.packing_from_offsets.default, (torch.tensor([0, 2, 4]), 4))


@pytest.mark.parametrize("values", [torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64)], ids=["float", "1d"])
def test_rejects(ops, values):
    with pytest.raises(RuntimeError, match="packing_from_labels: values must be"):
        ops.packing_from_labels(values)


@pytest.fixture(scope="module")
def on_threads(tmp_path_factory):
    """The offsets that a block's threads find together, under the thread sanitizer: what a GPU does, races included."""
    program = tmp_path_factory.mktemp("boundaries") / "test_boundaries"
    command = ["g++", "-std=gnu++20", "-O1", "-g", "-fsanitize=thread", "-pthread", "-I", str(ROOT / "kernel_src")]
    subprocess.run([*command, str(ROOT / "tests/cpp/test_boundaries.cpp"), "-o", str(program)], check=True)

    def offsets(rule, values):
        wide = int(values.dtype == torch.int64)
        numbers = " ".join(map(str, values.flatten().tolist()))
        done = subprocess.run(
            [str(program), *map(str, (rule, wide, *values.shape))], input=numbers, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return torch.tensor([int(word) for word in done.stdout.split()], dtype=torch.int32)

    return offsets


def test_threads_of_a_block_find_the_same(ops, on_threads):
    steps, falls, labelled = range(3)
    positions = torch.randint(-1, 3, (2, TILE // 2 + 9)).cumsum(1)
    labels = torch.randint(0, 2, (1, TILE + 77)).cumsum(1).to(torch.int32)
    labels[:, -50:] = -1
    assert torch.equal(on_threads(steps, positions), ops.packing_from_positions(positions, False))
    assert torch.equal(on_threads(falls, positions.int()), ops.packing_from_positions(positions, True))
    assert torch.equal(on_threads(labelled, labels), ops.packing_from_labels(labels))
