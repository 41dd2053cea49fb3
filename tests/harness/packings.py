"""One catalogue of packings for every op."""

from dataclasses import dataclass
from functools import cached_property
from typing import List, Tuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Lengths of packed sequences, padding behind the last, and what the case is there to show."""

    why: str
    lengths: Tuple[int, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    @cached_property
    def offsets(self) -> List[int]:
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int32)

    @property
    def seq_idx(self) -> Tensor:
        """Labels ``[1, T]``, -1 on padding."""
        labels = [n for n, length in enumerate(self.lengths) for _ in range(length)]
        return torch.tensor([labels + [-1] * self.padding], dtype=torch.int32)

    @property
    def position_ids(self) -> Tensor:
        """Positions ``[1, T]`` from 0 in each sequence. There is no spelling for padding."""
        assert self.padding == 0
        return torch.tensor([[t for length in self.lengths for t in range(length)]])

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


def catalogue(edge: int) -> List[Pack]:
    """Packings for an op whose tiles or chunks are ``edge`` tokens long."""
    return [
        Pack("one sequence", (edge + 3,)),
        Pack("all of one token", (1,) * 7),
        Pack("ragged", (5, 9, 17, 3)),
        Pack("empty first middle last", (0, 4, 0, 0, 6, 0)),
        Pack("padding behind", (3, 6), padding=5),
        Pack("around an edge", (edge - 1, 1, edge, edge + 1, 2)),
        Pack("one long among short", (2, 2 * edge + 7, 1, 3)),
        Pack("only padding", (0,), padding=4),
    ]


SMALL = Pack("small", (3, 1, 6))
