"""Lists of work that Triton kernels share, made on the device from any boundaries."""

import importlib

import pytest
import torch

from tests.harness.packings import Pack, catalogue

BLOCK = 16
# More sequences than one tile of the kernels that make the list, and than two.
PACKS = catalogue(BLOCK) + [
    Pack("no sequences", (), padding=3),
    Pack("no tokens", (0, 0)),
    Pack("many sequences", tuple(n % 37 for n in range(2500))),
    Pack("static form", (5, 40, 1) + (0,) * 43),
]


@pytest.fixture(scope="module")
def work(kernel):
    return importlib.import_module(f"{kernel.__name__}._triton.work")


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_blocks_start_at_each_sequence(work, pack):
    blocks = work.cut_into_blocks(pack.cu_seqlens, pack.tokens, BLOCK)
    expected = [[n, i] for n, length in enumerate(pack.lengths) for i in range(-(-length // BLOCK))]
    assert int(blocks.count) == len(expected) <= blocks.most
    assert blocks.items[: len(expected)].tolist() == expected
    ends = torch.tensor([-(-length // BLOCK) for length in pack.lengths]).cumsum(0)
    assert blocks.ends.tolist() == ends.tolist()


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_longest_first(work, pack):
    order, count = work.longest_first(pack.cu_seqlens)
    lengths = [pack.lengths[n] for n in order.tolist()]
    assert sorted(order.tolist()) == list(range(len(pack.lengths)))
    assert lengths == sorted(pack.lengths, reverse=True)
    assert int(count) == sum(length > 0 for length in lengths)


def test_offsets_that_fall_count_no_block_behind_the_list(work):
    """On a GPU nobody has looked at the offsets before a kernel uses them."""
    falling = torch.tensor([0, 64, 0, 64, 3, 64, 0], dtype=torch.int32)
    blocks = work.cut_into_blocks(falling, 64, BLOCK)
    assert int(blocks.count) <= blocks.most and int(blocks.ends.max()) <= blocks.most
