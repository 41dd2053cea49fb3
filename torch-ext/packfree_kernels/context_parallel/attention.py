"""Attention on a shard: keys and values of the samples that cross its ends, from the ranks that have them."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._checks import value_error
from ..packing import Boundaries
from .context import ContextParallel, shard_of
from .cut import rows_before, rows_behind
from .exchange import fetch


def shard_of_attention(
    op: str, cp_context: Any, q: Tensor, k: Tensor, cu_seqlens_q: Boundaries, cu_seqlens_k: Optional[Boundaries]
) -> Tuple[ContextParallel, Tensor]:
    """As ``shard_of``, where queries and keys may have boundaries each; here they are the same."""
    shard_of(op, cp_context, 1, k.shape[0], k.device, cu_seqlens_k, argument="cu_seqlens_k")
    return shard_of(op, cp_context, 1, q.shape[0], q.device, cu_seqlens_q, argument="cu_seqlens_q")


class Widened(NamedTuple):
    """What the op is called with for the queries of one shard."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_k: Tensor
    s_aux: Optional[Tensor]
    causal: bool
    window: Tuple[int, int]
    visible_keys: Optional[Tensor]


def with_far_keys(
    op: str,
    shard: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Optional[Tensor],
    causal: bool,
    window: Tuple[int, int],
    visible_keys: Optional[Tensor],
    dropout_p: float,
) -> Widened:
    """The queries of the shard, and all keys that they may see.

    Ranges of ``visible_keys`` count from the first key of the whole sample, so that is what comes for them.
    """
    if dropout_p > 0:
        must = "be 0 with cp_context, as what is dropped depends on a token's place in the whole pack"
        raise value_error(op, "dropout_p", must, dropout_p)
    left, right = window[0], 0 if causal else window[1]
    k, v, offsets, before, (q, s_aux) = _far_keys(shard, k, v, left, right, (q, s_aux))
    if visible_keys is None and right != 0 and (left >= 0 or right >= 0):
        # The last query no longer stands at the last key, from which windows are counted.
        visible_keys = _ranges(shard, q.shape[0], offsets, before, left, right)
        causal, window = False, (-1, -1)
    return Widened(q, k, v, offsets, s_aux, causal, window, visible_keys)


def _ranges(
    shard: ContextParallel, tokens: int, cu_seqlens_k: Tensor, before: int, left: int, right: int
) -> Tensor:
    """First and last key in the window of each query, int32 ``[tokens, 2]``, counted from its sequence's first here."""
    offsets = shard.offsets_on(cu_seqlens_k.device)
    token = torch.arange(tokens, device=offsets.device, dtype=torch.int32)
    sample = (torch.searchsorted(offsets, token, right=True) - 1).clamp(max=max(len(offsets) - 2, 0))
    if len(offsets) < 2:
        return torch.stack([token, token - 1], 1)
    place = token - offsets[sample] + torch.where(sample == 0, before, 0)
    last = cu_seqlens_k[sample + 1] - cu_seqlens_k[sample] - 1
    first = (place - left).clamp(min=0) if left >= 0 else torch.zeros_like(place)
    return torch.stack([first, torch.minimum(place + right, last) if right >= 0 else last], 1).to(torch.int32)


def _far_keys(
    shard: ContextParallel, k: Tensor, v: Tensor, left: int, right: int, through: Sequence[Optional[Tensor]]
) -> Tuple[Tensor, Tensor, Tensor, int, List[Optional[Tensor]]]:
    """Keys and values ``[Tk, HK, ...]`` that the shard's queries may see, their own among them.

    ``left``, ``right``: how many keys before and behind its own position a query sees; -1 is all.

    Returns k, v, their offsets int32 ``[N + 1]``, how many keys of other ranks stand before the first, and ``through``.
    """
    chains, everything = shard.cut.chains, 2**31
    offered = [chain.lengths for chain in chains]
    before = rows_before(chains, offered, everything if left < 0 else left)
    behind = rows_behind(chains, offered, everything if right < 0 else right)
    # Rows are counted within a rank's part of the sample. It begins its shard where keys behind come from.
    starts = {rank: start for chain in chains for rank, start in zip(chain.ranks[:-1], chain.starts)}
    transfers = [t._replace(start=starts[t.source] + t.start, stop=starts[t.source] + t.stop) for t in before] + behind
    flat = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    found, (k, v, *through) = fetch(shard, transfers, flat, [k, v, *through])
    far_k, far_v = found.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
    count = sum(t.stop - t.start for t in before if t.target == shard.rank)
    end = shard.offsets[-1]

    def joined(own: Tensor, far: Tensor) -> Tensor:
        if far.shape[0] == 0:
            return own
        far = far.unflatten(1, own.shape[1:])
        return torch.cat([far[:count], own[:end], far[count:]])

    offsets = [0] + [offset + count for offset in shard.offsets[1:]]
    if len(offsets) > 1:
        offsets[-1] += found.shape[0] - count
    offsets = torch.tensor(offsets, dtype=torch.int32).to(k.device)
    return joined(k, far_k), joined(v, far_v), offsets, count, through
