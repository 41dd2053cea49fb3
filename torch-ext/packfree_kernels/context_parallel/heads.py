"""Attention by heads: for the time of the call each rank has the tokens of all ranks, and its share of the heads.

One exchange brings queries, keys and values, one takes the outputs home; backward does the same the other way around.
"""

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._checks import value_error
from .context import ContextParallel
from .exchange import swap


class Swapped(torch.autograd.Function):
    """Piece p of this rank goes to rank p, whose piece for this rank comes back in its place.

    ``apply(shard, shapes, *pieces)``: of each rank a piece, and the shape of what it sends. All of one dtype.
    """

    @staticmethod
    def forward(ctx: Any, shard: Any, shapes: Sequence[Tuple[int, ...]], *pieces: Tensor) -> Tuple[Tensor, ...]:
        ctx.shard, ctx.tag = shard, shard.next_tag()
        ctx.shapes = [tuple(piece.shape) for piece in pieces]
        return _swapped(shard, ctx.tag, shapes, pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *_swapped(ctx.shard, ctx.tag + 1, ctx.shapes, gradients))


def _swapped(
    shard: Any, tag: int, shapes: Sequence[Tuple[int, ...]], pieces: Sequence[Tensor]
) -> Tuple[Tensor, ...]:
    own = shard.rank
    found = [pieces[own].new_empty(shape) for shape in shapes]
    others = [rank for rank in range(shard.world_size) if rank != own]
    sends = [(rank, pieces[rank]) for rank in others if pieces[rank].numel()]
    swap(shard.group, tag, sends, [(rank, found[rank]) for rank in others if found[rank].numel()])
    found[own] = pieces[own].clone()
    return tuple(found)


def to_heads(
    op: str,
    shard: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Optional[Tensor],
    visible_keys: Optional[Tensor],
    dropout_p: float,
) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor], Tensor]:
    """q ``[T, H / R, K]``, k and v of all T tokens of the R ranks, sinks of these heads, and the whole offsets.

    A key head that queries of several ranks read goes to each of them.

    Raises:
        ValueError: heads that cannot be shared out, dropout, or ranges of keys.
    """
    ranks, rank, way_out = shard.world_size, shard.rank, "or a ContextParallel with attention='keys'"
    if dropout_p > 0:
        must = "be 0 with cp_context, as what is dropped depends on a token's place in the whole pack"
        raise value_error(op, "dropout_p", must, dropout_p)
    if visible_keys is not None:
        raise value_error(op, "visible_keys", f"be None where attention is shared out by heads, {way_out}", "a tensor")
    if q.shape[1] % ranks:
        raise value_error(op, "q", f"have a multiple of {ranks} heads, one share for each rank, {way_out}", q.shape[1])
    if k.shape[1] % ranks and ranks % k.shape[1]:
        must = f"have a number of heads that {ranks} ranks can share, {way_out}"
        raise value_error(op, "k", must, k.shape[1])
    pieces = [
        torch.cat([_share(x, place, ranks).flatten(1) for x in (q, k, v)], dim=1) for place in range(ranks)
    ]
    width = pieces[0].shape[1]
    rows = torch.cat(Swapped.apply(shard, [(length, width) for length in shard.lengths], *pieces))
    shares = [_share(x[:0], rank, ranks).shape[1:] for x in (q, k, v)]
    q, k, v = (
        x.unflatten(1, share) for x, share in zip(rows.split([a * b for a, b in shares], dim=1), shares)
    )
    s_aux = None if s_aux is None else _share(s_aux[None], rank, ranks)[0]
    return q, k, v, s_aux, shard.whole_on(q.device)


def _share(x: Tensor, place: int, ranks: int) -> Tensor:
    """The heads of ``x`` ``[T, H, ...]`` that rank ``place`` has, or the one that it shares with others."""
    heads = x.shape[1]
    return x.narrow(1, place * heads // ranks, max(heads // ranks, 1))


def from_heads(shard: ContextParallel, x: Tensor) -> Tensor:
    """What this rank's heads gave for all tokens, ``[T, H / R, ...]``: this rank's tokens with all heads."""
    pieces: List[Tensor] = list(x.split(list(shard.lengths)))
    shape = (shard.tokens, *x.shape[1:])
    return torch.cat(Swapped.apply(shard, [shape] * shard.world_size, *pieces), dim=1)
