"""States of samples that lie on several ranks: an exclusive scan of affine maps in log2(ranks) exchanges.

A part of a sample maps the state before it to the state behind it, ``S -> M S + C``. ``M`` is a matrix that multiplies
from the left, or numbers that multiply elementwise (and broadcast).
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import pass_through, swap


class Map(NamedTuple):
    """``S -> M S + C``."""

    M: Tensor
    C: Tensor


class Kind(NamedTuple):
    """Shapes of a map's two parts, their dtype and device, and whether M is elementwise."""

    M: torch.Size
    C: torch.Size
    dtype: torch.dtype
    device: torch.device
    elementwise: bool

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right if self.elementwise else left @ right

    def after(self, later: Map, earlier: Map) -> Map:
        """First ``earlier``, then ``later``."""
        return Map(self.times(later.M, earlier.M), self.times(later.M, earlier.C) + later.C)

    def constant(self, C: Tensor) -> Map:
        """What gives ``C`` whatever was before."""
        return Map(torch.zeros(self.M, dtype=self.dtype, device=self.device), C.to(self.dtype))

    def transposed(self, M: Tensor) -> Tensor:
        return M if self.elementwise else M.transpose(-1, -2)

    def flat(self, pair: Map) -> Tensor:
        return torch.cat([pair.M.reshape(-1), pair.C.reshape(-1)])

    def empty(self) -> Tensor:
        return torch.empty(self.M.numel() + self.C.numel(), dtype=self.dtype, device=self.device)

    def unflat(self, flat: Tensor) -> Map:
        M, C = flat.split([self.M.numel(), self.C.numel()])
        return Map(M.view(self.M), C.view(self.C))


class Seat(NamedTuple):
    """This rank's place among ``ranks``, and its map; the last place needs none."""

    ranks: Tuple[int, ...]
    place: int
    own: Optional[Map]


def exclusive_scan(group: Any, tag: int, kind: Kind, seats: Sequence[Seat]) -> List[Optional[Tensor]]:
    """For each seat the state before it: C of all maps in front, one after the other; None for a first place.

    The first map of every chain is a constant. Recursive doubling: after step d a place knows the maps of the
    ``2^d - 1`` places in front of it as one (``before``), and with its own as another (``through``). A message is one
    map, whatever the number of tokens or ranks.
    """
    with torch.autocast(kind.device.type, enabled=False):  # which would round states
        return _scan(group, tag, kind, seats)


def _scan(group: Any, tag: int, kind: Kind, seats: Sequence[Seat]) -> List[Optional[Tensor]]:
    before: List[Optional[Map]] = [None] * len(seats)
    through = [seat.own for seat in seats]
    distance = 1
    while any(distance < len(seat.ranks) for seat in seats):
        sends, receives, receivers = [], [], []
        for index, seat in enumerate(seats):
            if seat.place + distance < len(seat.ranks):
                sends.append((seat.ranks[seat.place + distance], kind.flat(through[index])))
            if seat.place >= distance:
                receives.append((seat.ranks[seat.place - distance], kind.empty()))
                receivers.append(index)
        swap(group, tag, sends, receives)
        for index, (_, flat) in zip(receivers, receives):
            earlier = kind.unflat(flat)
            before[index] = earlier if before[index] is None else kind.after(before[index], earlier)
            if seats[index].own is not None:
                through[index] = kind.after(through[index], earlier)
        distance *= 2
    return [None if pair is None else pair.C for pair in before]


class CarriedState(torch.autograd.Function):
    """The state that enters this shard.

    ``apply(shard, kind, M, C, *through)``: M and C are the map of the shard's part of the sample that leaves it, None
    if none does; M is None where the sample begins here, so that C is its state. Returns the state of the sample that
    enters (zeros if none does) and ``through`` unchanged, as in :class:`~.exchange.Fetch`.

    Backward is the same scan from the last rank to the first, of the transposed maps: with ``G_i`` the gradient of the
    state before place i, ``G_i = dS_i + M_i^T G_{i+1}``, ``dC_i = G_{i+1}`` and ``dM_i = G_{i+1} S_i^T``.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: Any, kind: Kind, M: Optional[Tensor], C: Optional[Tensor], *through: Tensor
    ) -> Any:
        ctx.shard, ctx.kind, ctx.tag = shard, kind, shard.next_tag()
        ctx.set_materialize_grads(False)
        own = None if C is None else kind.constant(C) if M is None else Map(M, C)
        seats = [Seat(chain.ranks, place, own if leaves else None) for chain, place, leaves in _places(shard)]
        states = exclusive_scan(shard.group, ctx.tag, kind, seats)
        entered = next((state for state in states if state is not None), None)
        if entered is None:
            entered = torch.zeros(kind.C, dtype=kind.dtype, device=kind.device)
        ctx.save_for_backward(M, entered)
        return (entered.clone(), *pass_through(ctx, 4, through))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entered: Optional[Tensor], *d_through: Optional[Tensor]) -> Any:
        shard, kind, (M, entered) = ctx.shard, ctx.kind, ctx.saved_tensors
        if d_entered is None:
            d_entered = torch.zeros(kind.C, dtype=kind.dtype, device=kind.device)
        seats = []
        for chain, place, leaves in _places(shard):
            own = None
            if place > 0:
                own = Map(kind.transposed(M), d_entered) if leaves else kind.constant(d_entered)
            seats.append(Seat(chain.ranks[::-1], len(chain.ranks) - 1 - place, own))
        # What comes back to a seat is the gradient behind it: only the one of the sample that leaves has one.
        dC = next((G for G in exclusive_scan(shard.group, ctx.tag + 1, kind, seats) if G is not None), None)
        dM = None
        if M is not None:
            with torch.autocast(kind.device.type, enabled=False):
                dM = kind.times(dC, kind.transposed(entered)).sum_to_size(kind.M)
        return (None, None, dM, dC, *d_through)


def _places(shard: Any) -> List[Tuple[Any, int, bool]]:
    """The chains that this rank is in (two at most), its places, and whether the sample leaves it."""
    places = []
    if shard.entering is not None:
        chain, place = shard.entering
        places.append((chain, place, place < len(chain.ranks) - 1))
    if shard.leaving is not None and shard.leaving[1] == 0:
        places.append((*shard.leaving, True))
    return places
