"""Ranks tell one another their shards: from what each knows of its own to the one cut that all share, in one exchange.

A rank that has its tokens knows where samples begin inside them. Where the samples lie that cross its ends, the others
know: how many tokens they have, and whether what each begins with goes on from the rank before. That is a few numbers
from each rank, whatever the tokens and samples.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch.distributed as dist

from .._checks import value_error
from .context import ContextParallel, checksum
from .cut import Cut
from .exchange import gather_numbers


class Shard(NamedTuple):
    """What one rank knows of its own shard.

    Attributes:
        tokens: how many it has.
        starts: places above 0 where a sample begins, counted from its first token.
        first, last: what tells whether a sample goes on across an end: a position, or a label.
        step: by how much ``first`` exceeds ``last`` of the rank before it where a sample goes on: 1 for positions, 0
            for labels.
        offsets: those of the whole pack instead, where every rank has them; the four above are then not read.
    """

    tokens: int
    starts: Sequence[int] = ()
    first: int = 0
    last: int = 0
    step: int = 0
    offsets: Optional[Sequence[int]] = None


class _Told(NamedTuple):
    """One rank's numbers; ``well`` is 0 where it has failed before."""

    well: int
    spelling: int
    tokens: int
    starts: int
    head: int
    tail: int
    first: int
    last: int
    checksum: int


_FAILED = (0,) * len(_Told._fields)


def fail(group: Any, numbers: int) -> None:
    """Take part in the exchange of a rank that cannot go on, so that the others learn it. ``numbers``: of ``also``."""
    gather_numbers(group, [*_FAILED, *[0] * numbers])


def agree(
    op: str, group: Any, shard: Shard, also: Sequence[int] = (), spelling: int = 0, attention: str = "keys"
) -> Tuple[ContextParallel, List[List[int]]]:
    """The context of the pack whose shard on this rank is ``shard``, and the numbers ``also`` of every rank.

    Args:
        op: who asks, for messages.
        spelling: a number below 256 for how the call tells its boundaries; the same on every rank.
        attention: as in :class:`ContextParallel`. By heads every rank needs all boundaries: a second exchange, of the
            most that a rank has.

    Raises (on every rank):
        ValueError: a rank has failed, is told its boundaries in another way, or has other offsets.
    """
    offsets, starts = shard.offsets, list(shard.starts)
    mine = _Told(
        well=1,
        spelling=spelling + 256 * shard.step + 512 * (attention == "heads"),
        tokens=shard.tokens,
        starts=len(starts),
        head=starts[0] if starts else shard.tokens,
        tail=starts[-1] if starts else 0,
        first=shard.first,
        last=shard.last,
        checksum=0 if offsets is None else checksum(offsets),
    )
    everyone = gather_numbers(group, [*mine, *also])
    told = [_Told(*numbers[: len(mine)]) for numbers in everyone]
    _check(op, told)
    lengths = [each.tokens for each in told]
    if offsets is None:
        inner = [[each.head, each.tail][: min(each.starts, 2)] for each in told]
        inner[dist.get_rank(group)] = starts
        if attention == "heads":  # where each rank has all tokens
            most = max(each.starts for each in told)
            padded = starts + [0] * (most - len(starts))
            rows = gather_numbers(group, padded) if most else [[]] * len(told)
            inner = [row[: each.starts] for row, each in zip(rows, told)]
        offsets = _offsets(told, inner)
    elif offsets[-1] != sum(lengths):
        must = f"be the offsets of the whole row, which end at the {sum(lengths)} tokens of all ranks"
        raise value_error(op, "cu_seq_lens_q", must, offsets[-1])
    context = ContextParallel.of_cut(group, Cut(offsets, lengths), attention)
    return context, [numbers[len(mine) :] for numbers in everyone]


def _check(op: str, told: Sequence[_Told]) -> None:
    wrong = [rank for rank, each in enumerate(told) if not each.well]
    if wrong:
        raise value_error(op, "its shard", "be one that every rank can take", f"an error on rank {wrong[0]}")
    for rank, each in enumerate(told):
        if each.spelling != told[0].spelling:
            got = f"others on rank {rank} than on rank 0"
            must = "be the same on every rank that shares a row"
            raise value_error(op, "the arguments of the call", must, got)
        if each.checksum != told[0].checksum:
            got = f"others on rank {rank} than on rank 0"
            raise value_error(op, "cu_seq_lens_q", "be the offsets of the whole row, the same on every rank", got)


def _offsets(told: Sequence[_Told], inner: Sequence[Sequence[int]]) -> List[int]:
    """Offsets of the pack as this rank sees it; ``inner``: where samples begin inside each shard, as far as is known.

    Its own samples are all there. Of those inside another shard only the first and the last begin matter, which is
    where samples that cross its ends begin or end; what lies between them is one sample here.
    """
    offsets, begin, before = [0], 0, None
    for each, starts in zip(told, inner):
        if not each.tokens:
            continue
        goes_on = before is None or each.first == before.last + (each.spelling >> 8 & 1)
        offsets += [begin + start for start in [*([] if goes_on else [0]), *starts]]
        begin, before = begin + each.tokens, each
    return [*offsets, begin] if begin else offsets
