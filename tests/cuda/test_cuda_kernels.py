"""The kernels in CUDA C++, run on a host through the public functions: the harness that the CPU kernels go through.

Everything runs twice: in CUDA's words, and in HIP's with the waves of 64 lanes that gfx9 GPUs of AMD's have. What only
a GPU can show (speed, its own exponential) is not shown here.
"""

import pytest
import torch

from tests.harness import properties
from tests.harness.cuda import served_by_cuda
from tests.harness.ops import causal_conv1d as conv
from tests.harness.ops import mamba1_scan as scan
from tests.harness.packings import Pack, catalogue
from tests.ops import test_causal_conv1d, test_mamba1_scan, test_mamba2_update

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = 64  # tokens of the scan's chunks
TILE = 128  # tokens of the convolution's tiles, channels last


# HIP's waves of 32 lanes (gfx10 and later) are the warps of CUDA's; test_cuda_waves.py compares the bits of all three.
@pytest.fixture(autouse=True, params=[("cuda", 32), ("hip", 64)], ids=lambda param: f"{param[0]}{param[1]}")
def served(request, kernel):
    with served_by_cuda(kernel, *request.param) as names:
        yield names


def test_every_op_of_cuda_c_is_served(served):
    assert set(served) == {
        "causal_conv1d_bwd", "causal_conv1d_fwd", "causal_conv1d_update", "mamba1_scan_bwd", "mamba1_scan_fwd",
        "packing_from_labels", "packing_from_offsets", "packing_from_positions", "selective_state_update",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", conv.CASES, ids=str)
def test_conv_matches_reference(case, dtype):
    for pack in [*catalogue(edge=16), Pack("around tiles", (TILE - 1, 1, TILE + 1, 2 * TILE), padding=3)]:
        properties.check_against_reference(conv.op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", conv.CASES[:4], ids=str)
def test_conv_packing_properties(case, dtype):
    for pack in catalogue(edge=8):
        properties.check_all_properties(conv.op_under_test(case), pack, dtype)


AROUND_CHUNKS = Pack("around chunks", (CHUNK + 1, 1, 2 * CHUNK + 3, CHUNK), padding=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", scan.CASES, ids=str)
def test_scan_matches_reference(case, dtype):
    packs = catalogue(edge=16) if case in scan.CASES[:2] else catalogue(edge=16)[3:5]
    around = AROUND_CHUNKS if case.states < 16 else Pack("a chunk and a bit", (CHUNK + 2,))
    for pack in [*packs, around]:
        properties.check_against_reference(scan.op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", scan.CASES[:2] + scan.CASES[3:4], ids=str)
def test_scan_packing_properties(case, dtype):
    for pack in [*catalogue(edge=8), Pack("chunks", (CHUNK + 1, 2 * CHUNK + 3), padding=3)]:
        properties.check_all_properties(scan.op_under_test(case), pack, dtype)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("width", [2, 3, 5, 7])
def test_conv_sees_nothing_behind_its_filter(kernel, width, channels_last):
    """Widths share kernels: a value further back than W - 1 tokens does not count, even if it is not a number."""
    x = torch.randn(1, 40, 6)
    x[:, 10] = float("nan")
    x = x.transpose(1, 2) if channels_last else x.transpose(1, 2).contiguous()
    y = kernel.causal_conv1d_fn(x, torch.randn(6, width), activation="silu")
    expected = [10 <= t < 10 + width for t in range(40)]
    assert y.isnan().all(dim=1)[0].tolist() == expected and y.isnan().any(dim=1)[0].tolist() == expected


def test_conv_special_cases(kernel):
    """What else the CPU kernels must do: rows of a batch, empty and short sequences, states that carry over."""
    test_causal_conv1d.test_batch_rows_and_padding_between(kernel)
    test_causal_conv1d.test_c02_layouts_agree(kernel)
    test_causal_conv1d.test_c06_empty_segments(kernel)
    test_causal_conv1d.test_c18_short_segments(kernel)
    test_causal_conv1d.test_empty_inputs(kernel)
    test_causal_conv1d.test_state_carries_over(kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates(kernel, dtype):
    test_causal_conv1d.test_update_continues_a_sequence(kernel, dtype, None)
    for has_heads in (True, False):
        test_mamba2_update.test_update_matches_reference(kernel, dtype, has_heads, None)


def test_update_special_cases(kernel):
    test_causal_conv1d.test_update_after_any_number_of_tokens(kernel, None)
    test_mamba2_update.test_update_writes_into_any_layout(kernel)


def test_update_of_a_row_that_is_not_there(kernel):
    """No value may be looked at before a GPU uses it, so such a row touches nothing and gives NaN; -1 is padding."""
    slots = torch.tensor([1, 2, -1])
    x, weight, state = torch.randn(3, 5), torch.randn(5, 4), torch.randn(2, 5, 3)
    before = state.clone()
    y = kernel.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
    assert y[0].isfinite().all() and y[1].isnan().all() and torch.equal(state[0], before[0])
    properties.assert_same_bits("padding", y[2], torch.zeros(5))
    x, state, columns = torch.randn(3, 2, 4), torch.randn(2, 2, 4, 5), torch.randn(3, 1, 5)
    before = state.clone()
    y = kernel.selective_state_update(
        state, x, x.abs(), -torch.rand(2, 4, 5), columns, columns, state_batch_indices=slots
    )
    assert y[0].isfinite().all() and y[1].isnan().all() and torch.equal(state[0], before[0])
    properties.assert_same_bits("padding", y[2], torch.zeros(2, 4))


def test_scan_special_cases(kernel):
    test_mamba1_scan.test_batch_rows_and_padding_between(kernel)


@pytest.mark.parametrize("states", [17, 40])
def test_scan_of_many_states(states):
    """More than are staged at once."""
    op = scan.op_under_test(scan.Case("many states", channels=5, states=states))
    properties.check_against_reference(op, AROUND_CHUNKS, torch.float32)


def test_memory_forms():
    for op in (*map(conv.op_under_test, conv.CASES[:2]), *map(scan.op_under_test, scan.CASES[:2])):
        properties.check_memory_forms(op, Pack("ragged", (5, 9, 17, 3)), torch.bfloat16)


def test_malformed_offsets_stay_inside(kernel, served):
    """Offsets that decrease, start above 0 or leave the row, as a GPU might be given: no access outside, no hang."""
    ops = kernel._ops.ops
    x, weight = torch.randn(1, 90, 4), torch.randn(4, 4)
    u, A, B = torch.randn(1, 4, 90), -torch.rand(4, 2), torch.randn(1, 1, 2, 90)
    for offsets in ([5, 70], [0, 60, 20, 90], [0, -9, 400], [90, 0], [0, 90, 90, 200, 3]):
        cuts = torch.tensor(offsets, dtype=torch.int32)
        y, _ = ops.causal_conv1d_fwd(x, weight, None, cuts, None, True, True, True)
        ops.causal_conv1d_bwd(y, None, x, weight, None, cuts, None, True, True)
        y, _ = ops.mamba1_scan_fwd(u, u.abs(), A, B, B, None, None, None, cuts, None, False, False, True)
        ops.mamba1_scan_bwd(y, None, u, u.abs(), A, B, B, None, None, None, cuts, None, False, False)


def test_float64_is_refused(kernel):
    x, weight = torch.randn(1, 6, 8).double(), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"x must be float32, bfloat16 or float16 on a GPU, got float64; convert it"):
        kernel.causal_conv1d_fn(x, weight)
    with pytest.raises(RuntimeError, match="causal_conv1d_update: x must be float32"):
        kernel.causal_conv1d_update(x[:, :, 0], torch.zeros(1, 6, 3).double(), weight)
    coefficients = torch.randn(1, 2, 8).double()
    with pytest.raises(RuntimeError, match="mamba1_scan_fwd: u must be float32"):
        kernel.selective_scan_fn(x, x.abs(), -torch.rand(6, 2).double(), coefficients, coefficients)
    row, column = torch.randn(1, 2, 3).double(), torch.randn(1, 1, 4).double()
    with pytest.raises(RuntimeError, match="selective_state_update: x must be float32"):
        kernel.selective_state_update(
            torch.zeros(1, 2, 3, 4).double(), row, row, -torch.rand(2, 3, 4).double(), column, column
        )
