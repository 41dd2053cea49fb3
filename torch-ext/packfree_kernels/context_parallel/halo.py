"""The convolution on a shard: W - 1 tokens from the ranks before."""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .context import ContextParallel
from .cut import rows_before
from .exchange import fetch


def conv_halo(
    shard: ContextParallel, x: Tensor, width: int, initial: Optional[Tensor], through: Sequence[Optional[Tensor]]
) -> Tuple[Optional[Tensor], List[Optional[Tensor]]]:
    """States before each of the shard's samples, ``[N, D, W - 1]`` or None (zeros), and ``through``.

    ``x`` ``[1, D, T]``; ``initial``: of the samples that begin here. What a rank offers of the sample that leaves it is
    its last ``W - 1`` tokens; where the sample begins, its initial state stands before them.
    """
    halo, chains = width - 1, shard.cut.chains
    offered = [[halo] + [min(length, halo) for length in chain.lengths[1:-1]] + [0] for chain in chains]
    rows = x.new_zeros(0, x.shape[1])
    if shard.leaving is not None:
        start, stop = shard.offsets[-2:]
        rows = x[0, :, max(start, stop - halo) : stop].T
        if shard.leaving[1] == 0:
            before = rows.new_zeros(halo, rows.shape[1]) if initial is None else initial[-1].T.to(x.dtype)
            rows = torch.cat([before, rows])[-halo:]
    found, (initial, *through) = fetch(shard, rows_before(chains, offered, halo), rows, [initial, *through])
    if shard.entering is not None:
        entered = found.T[None]
        initial = torch.zeros_like(entered).expand(shard.begins, -1, -1) if initial is None else initial
        initial = torch.cat([entered, initial])
    return initial, through
