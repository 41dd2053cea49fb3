"""Geometry of one pack that is cut over ranks at any tokens. Numbers only; no tensors, no communication.

Every rank makes the same :class:`Cut` and asks it what each rank does, so all agree on who sends what to whom.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import List, NamedTuple, Optional, Sequence, Tuple

Link = Tuple["Chain", int]


class Chain(NamedTuple):
    """The ranks that hold tokens of one sample that lies on several, in the order of its tokens.

    Attributes:
        ranks: two or more; ranks without tokens in between are left out.
        lengths: the sample's tokens on each of them.
        starts: where they begin in its shard.
    """

    ranks: Tuple[int, ...]
    lengths: Tuple[int, ...]
    starts: Tuple[int, ...]


class Transfer(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of what rank ``source`` offers go to rank ``target``."""

    source: int
    target: int
    start: int
    stop: int


class Cut:
    """A pack of samples ``offsets`` (``[N + 1]`` ints), of whose tokens rank ``r`` has ``lengths[r]``, in this order.

    Tokens after the last offset are padding. A sample without tokens is on the rank of the token that follows it, or on
    the last rank if none does.
    """

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        self.offsets, self.lengths = tuple(offsets), tuple(lengths)
        self.starts = (0, *accumulate(lengths))  # the first token of each rank, and the number of all
        self.chains = tuple(self._chains())

    def _rank_of(self, token: int) -> int:
        """The rank that has ``token``, or the last one."""
        return min(bisect_right(self.starts, token) - 1, len(self.lengths) - 1)

    def _chains(self) -> List[Chain]:
        chains = []
        for start, stop in zip(self.offsets, self.offsets[1:]):
            if start == stop:
                continue
            parts = []
            for rank in range(self._rank_of(start), self._rank_of(stop - 1) + 1):
                begin = max(start, self.starts[rank])
                length = min(stop, self.starts[rank + 1]) - begin
                if length > 0:
                    parts.append((rank, length, begin - self.starts[rank]))
            if len(parts) > 1:
                chains.append(Chain(*zip(*parts)))
        return chains

    def entering(self, rank: int) -> Optional[Link]:
        """The chain of the sample that began before ``rank``, and the rank's place in it."""
        return next(((c, c.ranks.index(rank)) for c in self.chains if rank in c.ranks[1:]), None)

    def leaving(self, rank: int) -> Optional[Link]:
        """The chain of the sample that goes on behind ``rank``, and the rank's place in it."""
        return next(((c, c.ranks.index(rank)) for c in self.chains if rank in c.ranks[:-1]), None)

    def local_offsets(self, rank: int) -> List[int]:
        """Offsets of the samples, or parts of samples, on ``rank``, counted from its first token."""
        first, behind = self.starts[rank], self.starts[rank + 1]
        offsets = [0]
        for start, stop in zip(self.offsets, self.offsets[1:]):
            here = max(start, first) < min(stop, behind) if stop > start else self._rank_of(start) == rank
            if here:
                offsets.append(min(stop, behind) - first)
        return offsets


def rows_before(chains: Sequence[Chain], offered: Sequence[Sequence[int]], wanted: int) -> List[Transfer]:
    """Every rank but the first of a chain gets the ``wanted`` rows before its own, or as many as there are.

    ``offered[c][i]`` is how many rows, the last ones before the next rank's, place ``i`` of chain ``c`` has to give.
    Oldest rows come first for each target.
    """
    transfers = []
    for chain, rows in zip(chains, offered):
        for place in range(1, len(chain.ranks)):
            missing, found = wanted, []
            for source in range(place - 1, -1, -1):
                taken = min(missing, rows[source])
                if taken > 0:
                    found.append(Transfer(chain.ranks[source], chain.ranks[place], rows[source] - taken, rows[source]))
                missing -= taken
            transfers += reversed(found)
    return transfers


def rows_behind(chains: Sequence[Chain], offered: Sequence[Sequence[int]], wanted: int) -> List[Transfer]:
    """Every rank but the last of a chain gets the ``wanted`` rows behind its own, or as many as there are."""
    transfers = []
    for chain, rows in zip(chains, offered):
        for place in range(len(chain.ranks) - 1):
            missing = wanted
            for source in range(place + 1, len(chain.ranks)):
                taken = min(missing, rows[source])
                if taken > 0:
                    transfers.append(Transfer(chain.ranks[source], chain.ranks[place], 0, taken))
                missing -= taken
    return transfers
