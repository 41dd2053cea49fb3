"""Lists of work made of boundaries on the device: nothing waits for them, and their order is fixed.

Of own offsets they are made once for every call, forward or backward, that wants the same (_sharing.py).

A long sequence among short ones is many blocks among few: programs that stride over the list of blocks are balanced,
whatever the lengths. Blocks start at each sequence's first token, so a sequence is cut alike wherever it lies.
"""

from dataclasses import dataclass
from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._sharing import of_own
from .launch import launch

_TILE = 1024


@dataclass(frozen=True)
class Blocks:
    """Sequences cut into blocks of ``size`` tokens, the last of each ragged.

    Attributes:
        items: int32 ``[most, 2]``: sequence, and the block's index inside it; ordered by both, so that a block's place
            in the list numbers all blocks. Only the first ``count`` are set.
        count: int32 ``[1]``, on the device.
        ends: int32 ``[N]``: blocks of sequences 0 to n, which is the place behind the last block of sequence n.
        size: tokens of a whole block.
    """

    items: Tensor
    count: Tensor
    ends: Tensor
    size: int

    @property
    def most(self) -> int:
        """How many blocks there can be, whatever the boundaries say."""
        return self.items.shape[0]


def cut_into_blocks(cu_seqlens: Tensor, tokens: int, size: int, padding: bool = False) -> Blocks:
    """The :class:`Blocks` of ``cu_seqlens`` int32 ``[N + 1]``, whose values lie in 0 to ``tokens``.

    With ``padding`` the tokens behind the last offset are one more sequence, so that kernels write 0 there.
    """

    def make() -> Blocks:
        return _cut(_with_padding(cu_seqlens, tokens) if padding else cu_seqlens, tokens, size)

    return of_own(cu_seqlens, ("blocks", tokens, size, padding), make)


def _with_padding(cu_seqlens: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.pad(cu_seqlens, (0, 1), value=tokens)


def _cut(cu_seqlens: Tensor, tokens: int, size: int) -> Blocks:
    sequences = cu_seqlens.shape[0] - 1
    # Each token but the last of a block, and each sequence, adds at most one block.
    most = min(tokens, tokens // size + sequences)
    items = cu_seqlens.new_empty((most, 2), dtype=torch.int32)
    ends = cu_seqlens.new_empty((sequences,), dtype=torch.int32)
    if most == 0:
        return Blocks(items, ends.new_zeros((1,)), ends.zero_(), size)
    count = cu_seqlens.new_empty((1,), dtype=torch.int32)
    # Also without a sequence: somebody must write the count.
    tiles = max(1, triton.cdiv(sequences, _TILE))
    launch(_count_blocks, tiles, cu_seqlens, ends, count, sequences, most, SIZE=size, TILE=_TILE)
    steps = sequences.bit_length()
    launch(_place_blocks, triton.cdiv(most, _TILE), ends, items, sequences, most, steps, TILE=_TILE)
    return Blocks(items, count, ends, size)


@triton.jit(do_not_specialize=["sequences", "most"])
def _count_blocks(cu_seqlens, ends, count, sequences, most, SIZE: tl.constexpr, TILE: tl.constexpr):
    """ends[n] is the number of blocks of sequences 0 to n; each program counts what lies before its own tile.

    Offsets that fall would make more than ``most`` blocks: nothing counts further, so nobody reads behind the list.
    """
    own = tl.program_id(0)
    before = 0
    for tile in range(own + 1):
        n = tile * TILE + tl.arange(0, TILE)
        here = n < sequences
        lengths = tl.load(cu_seqlens + n + 1, here, 0) - tl.load(cu_seqlens + n, here, 0)
        blocks = (tl.maximum(lengths, 0) + SIZE - 1) // SIZE
        if tile == own:
            tl.store(ends + n, tl.minimum(before + tl.cumsum(blocks, 0), most), here)
        before = tl.minimum(before + tl.sum(blocks, 0), most)
    if own == tl.num_programs(0) - 1:
        tl.store(count, before)


@triton.jit(do_not_specialize=["sequences", "most", "steps"])
def _place_blocks(ends, items, sequences, most, steps, TILE: tl.constexpr):
    """Item i belongs to the first sequence n with i < ends[n], found by halving; 2 ** steps > sequences."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    low = tl.zeros((TILE,), tl.int32)
    high = tl.zeros((TILE,), tl.int32) + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        # Behind the last block there is no such sequence; what is stored there is never read.
        after = i >= tl.load(ends + middle, middle < sequences, 0)
        low = tl.where(after & (low < high), middle + 1, low)
        high = tl.where(after, high, middle)
    first = tl.load(ends + low - 1, (low > 0) & (low <= sequences), 0)
    tl.store(items + 2 * i, low, i < most)
    tl.store(items + 2 * i + 1, i - first, i < most)


def longest_first(cu_seqlens: Tensor) -> Tuple[Tensor, Tensor]:
    """Sequences int32 ``[N]`` by falling length, empty ones last, and the number int32 ``[1]`` of those that are not.

    For kernels that walk along a sequence: the longest decides how long they take, so it starts first.
    """
    return of_own(cu_seqlens, "longest first", lambda: _order(cu_seqlens))


def _order(cu_seqlens: Tensor) -> Tuple[Tensor, Tensor]:
    lengths = torch.diff(cu_seqlens)
    order = torch.argsort(lengths, descending=True, stable=True).to(torch.int32)
    return order, (lengths > 0).sum(dtype=torch.int32).reshape(1)
