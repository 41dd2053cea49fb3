"""Boundaries: three spellings, one meaning, and an error for whatever has none."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx.experimental.proxy_tensor import make_fx

from tests.harness.ops import EXACT
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import run_with_gradients


@pytest.fixture(scope="module")
def packing(kernel):
    return kernel.packing


def resolve(packing, length, batch=1, **boundaries):
    return packing.resolve_packing("op", batch, length, torch.device("cpu"), **boundaries)


def offsets_of(result):
    return result.cu_seqlens.tolist()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("pack", catalogue(edge=8), ids=str)
def test_spellings_agree(packing, pack):
    explicit = resolve(packing, pack.tokens, cu_seqlens=pack.cu_seqlens)
    assert offsets_of(explicit) == pack.offsets and explicit.cu_seqlens.dtype == torch.int32
    labelled = resolve(packing, pack.tokens, seq_idx=pack.seq_idx)
    assert sorted(set(offsets_of(labelled))) == sorted(set(pack.offsets))
    both = resolve(packing, pack.tokens, cu_seqlens=pack.cu_seqlens, seq_idx=pack.seq_idx)
    assert offsets_of(both) == pack.offsets
    if not pack.padding:
        counted = resolve(packing, pack.tokens, position_ids=pack.position_ids)
        assert offsets_of(counted) == [0] + [x for x in sorted(set(pack.offsets)) if x > 0]
    labels = packing.seq_idx_from_cu_seqlens(pack.cu_seqlens, pack.tokens)
    assert labels.tolist() == pack.seq_idx.tolist()


def test_no_boundaries_means_rows(packing):
    assert offsets_of(resolve(packing, 5, batch=3)) == [0, 5, 10, 15]


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([[2, 3, 4, 2, 3, 2, 3, 4, 5]], [0, 3, 5, 9]),
        ([[0, 1, 2, 0, 0, 1]], [0, 3, 4, 6]),
        ([[0, 0, 0]], [0, 1, 2, 3]),
        ([0, 1, 2, 0, 1, 2], [0, 3, 6]),
        ([[list(range(8))]] * 3, [0, 8]),
        ([[[0, 1, 2, 3, 4, 0, 1, 2]]] + [[[9] * 8]] * 3, [0, 5, 8]),
        ([[[0, 1, 1, 1, 2, 3]], [[0, 1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1, 0]]], [0, 6]),
        ([[[0, 1, 1, 0, 0, 1]], [[0] * 6], [[0] * 6]], [0, 3, 6]),
    ],
    ids=["c13-from-2", "c16-one-token", "c16-all-one-token", "c15-1d", "c15-3-rows", "c15-4-rows", "c15-still", "fall"],
)
def test_position_ids(packing, ids, expected):
    ids = torch.tensor(ids)
    if ids.dim() == 4:
        ids = ids[:, 0]
    assert offsets_of(resolve(packing, ids.shape[-1], position_ids=ids)) == expected


def test_static_form_under_tracing(packing):
    """While torch.compile traces, offsets keep one shape; they cut the tokens alike."""
    for pack in (Pack("ragged", (5, 9, 17, 3)), Pack("ones", (1,) * 4)):

        @torch.compile(fullgraph=True, backend="eager", dynamic=False)
        def offsets(ids):
            return packing.cu_seqlens_from_position_ids(ids)

        static = offsets(pack.position_ids).tolist()
        assert len(static) == pack.tokens + 1
        assert sorted(set(static)) == pack.offsets and static == sorted(static)


VALUE_DEPENDENT = {"nonzero", "_local_scalar_dense", "item", "unique_consecutive", "_unique2", "masked_select"}


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_positions_are_cut_without_looking_at_them(packing, rows):
    """Traced with unknown length and values: one graph, static shapes, no operation whose shape depends on values."""

    def cut(ids):
        cu_seqlens = packing.cu_seqlens_from_position_ids(ids)
        return cu_seqlens, packing.seq_idx_from_cu_seqlens(cu_seqlens, ids.shape[-1])

    def ids_of(pack):
        return pack.position_ids if rows == 1 else pack.position_ids.expand(rows, 1, -1).contiguous()

    graph = make_fx(cut, tracing_mode="symbolic")(ids_of(SMALL))
    used = {node.target.__name__.split(".")[0] for node in graph.graph.nodes if node.op == "call_function"}
    assert used and not used & VALUE_DEPENDENT
    # Three rotary rows fall only behind a sample of two tokens or more.
    others = [SMALL, Pack("other", (9, 1, 1, 20)), Pack("one", (1,))]
    for pack in others if rows != 3 else [Pack("three rows", (9, 2, 20))]:
        cu_seqlens, labels = graph(ids_of(pack))
        assert cu_seqlens.shape == (pack.tokens + 1,) and sorted(set(cu_seqlens.tolist())) == pack.offsets
        assert labels.tolist() == pack.seq_idx.tolist()


@pytest.mark.parametrize("name", EXACT)
def test_no_function_branches_on_boundaries(name):
    """Fake tensors have no values: a function that looks at one, forward or backward, raises."""
    # States would need one entry a token: there the number of sequences is not known.
    op = next(op for op in (case() for case in EXACT[name]) if not {*op.states} & {*op.make(SMALL, torch.float32)})
    for spelling in op.spellings:
        with FakeTensorMode() as mode:
            inputs = {key: mode.from_tensor(value) for key, value in op.make(SMALL, torch.float32).items()}
            given = {key: mode.from_tensor(value) for key, value in op.boundaries(SMALL, spelling).items()}
            results = run_with_gradients(lambda leaves, given=given: op.run(leaves, **given), inputs)
        assert all(is_fake(value) for value in results.values())


def test_explicit_boundaries_win_over_positions(packing):
    result = resolve(packing, 6, cu_seqlens=[0, 4, 6], position_ids=torch.arange(6)[None])
    assert offsets_of(result) == [0, 4, 6]


def test_padding_between_rows(packing):
    labels = torch.tensor([[0, 0, -1, -1], [5, 6, 6, -1]])
    result = resolve(packing, 4, batch=2, seq_idx=labels)
    assert offsets_of(result) == [0, 2, 4, 5, 7, 8]
    assert result.live.tolist() == [True, True, False, False, True, True, True, False]
    assert result.states.tolist() == [0, 2, 3] and result.num_states == 3


@pytest.mark.parametrize(
    "boundaries, error, text",
    [
        (dict(cu_seqlens=[0, 3, 12]), ValueError, r"cu_seqlens must end at the number of tokens \(10\) .*, got 12"),
        (dict(cu_seqlens=[2, 10]), ValueError, "cu_seqlens must start at 0, got 2"),
        (dict(cu_seqlens=[0, 6, 4, 10]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
        (dict(cu_seqlens=[]), ValueError, r"cu_seqlens must have shape \[N \+ 1\], got \(0,\)"),
        (dict(cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)), ValueError, r"cu_seqlens must have shape"),
        (dict(cu_seqlens=[0, 2.5, 10]), TypeError, "cu_seqlens must be an integer tensor or a list of ints"),
        (dict(cu_seqlens="0,10"), TypeError, "cu_seqlens must be an integer tensor or a list of ints"),
        (dict(cu_seqlens=torch.tensor([0, 10]).float()), TypeError, "cu_seqlens must be .*, got float32"),
        (dict(cu_seqlens=torch.tensor([False, True])), TypeError, "cu_seqlens must be .*, got bool"),
        (dict(seq_idx=torch.zeros(1, 9, dtype=torch.int32)), ValueError, r"seq_idx must have shape \[B, T\]"),
        (dict(seq_idx=torch.zeros(1, 10)), TypeError, "seq_idx must be .*, got float32"),
        (dict(seq_idx=[[0] * 10]), TypeError, "seq_idx must be an int32 or int64 tensor, got"),
        (dict(seq_idx=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])), ValueError, "got 0 after 2 at row 0, token 3"),
        (dict(seq_idx=torch.tensor([[-1, -1] + [0] * 8])), ValueError, "negative ones only as tail padding"),
        (dict(seq_idx=torch.tensor([[0] * 4 + [-1] + [1] * 5])), ValueError, "negative ones only as tail padding"),
        (dict(cu_seqlens=[0, 4, 10], seq_idx=torch.tensor([[0] * 5 + [1] * 5])), ValueError, "seq_idx must cut"),
        (dict(position_ids=torch.arange(10.0)), TypeError, "position_ids must be .*, got float32"),
        (dict(position_ids=torch.zeros(2, 1, 10, dtype=torch.int64)), ValueError, "position_ids must have shape"),
        (dict(position_ids=torch.zeros(3, 1, 30, dtype=torch.int64)), ValueError, "position_ids must have shape"),
    ],
    ids=str,
)
def test_rejects(packing, boundaries, error, text):
    with pytest.raises(error, match=text):
        resolve(packing, 10, **boundaries)


def test_offsets_need_one_row(packing):
    with pytest.raises(ValueError, match="cu_seqlens must come with a batch of one packed row, got a batch of 2 rows"):
        resolve(packing, 5, batch=2, cu_seqlens=[0, 5])
