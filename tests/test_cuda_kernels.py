"""The kernels in CUDA C++, run on host threads through the public functions: the harness that the CPU kernels go through.

What only a GPU can show (speed, its own exponential) is not shown here.
"""

import pytest
import torch

from tests.harness import properties
from tests.harness.cuda import served_by_cuda
from tests.harness.packings import Pack, catalogue
from tests.ops import causal_conv1d as conv
from tests.ops import mamba1_scan as scan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = 64  # tokens of the scan's chunks
TILE = 128  # tokens of the convolution's tiles, channels last


@pytest.fixture(autouse=True)
def served(kernel):
    with served_by_cuda(kernel) as names:
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
    for pack in [*packs, AROUND_CHUNKS]:
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
