"""What ranks tell one another: all communication of this folder.

Messages of one step are posted together and then waited for, so no order of ranks can block. Who takes part is read
from the cut, which is the same on every rank. A rank that fails leaves the others waiting, for the group's time-out at
most.
"""

from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cut import Transfer


def device_of_group(group: Any) -> torch.device:
    """Where the group's collectives want their tensors."""
    nccl = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def gather_numbers(group: Any, numbers: Sequence[int]) -> List[List[int]]:
    """The int64 ``numbers`` of every rank, equally many on each."""
    own = torch.tensor(list(numbers), dtype=torch.int64, device=device_of_group(group))
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [each.tolist() for each in everyone]


def swap(group: Any, tag: int, sends: Sequence[Tuple[int, Tensor]], receives: Sequence[Tuple[int, Tensor]]) -> None:
    """Send each tensor to its rank of ``group`` and fill each of ``receives`` from its rank; one step.

    Messages between two ranks arrive in the order of these lists.
    """
    posted = [(dist.isend, peer, tensor.contiguous()) for peer, tensor in sends]
    posted += [(dist.irecv, peer, tensor) for peer, tensor in receives]
    if not posted:
        return
    steps = [dist.P2POp(kind, tensor, dist.get_global_rank(group, peer), group, tag) for kind, peer, tensor in posted]
    for work in dist.batch_isend_irecv(steps):
        work.wait()


class Fetch(torch.autograd.Function):
    """Rows of other ranks; backward brings their gradients home.

    ``apply(shard, transfers, rows, *through)``: ``rows`` ``[R, ...]`` is what this rank offers to ``transfers``.
    Returns what they bring, in their order, and ``through`` unchanged. Everything differentiable that the caller goes
    on with is passed through here, so that backward comes by on every rank, also on those that only give.
    """

    @staticmethod
    def forward(ctx: Any, shard: Any, transfers: Sequence[Transfer], rows: Tensor, *through: Tensor) -> Any:
        ctx.shard, ctx.transfers, ctx.tag = shard, transfers, shard.next_tag()
        ctx.shape, ctx.dtype, ctx.device = rows.shape, rows.dtype, rows.device
        ctx.set_materialize_grads(False)
        received = _move(shard, ctx.tag, transfers, rows)
        return (received, *pass_through(ctx, 3, through))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_received: Optional[Tensor], *d_through: Optional[Tensor]) -> Any:
        rank, transfers = ctx.shard.rank, ctx.transfers
        mine = [t for t in transfers if t.target == rank]
        given = [t for t in transfers if t.source == rank]
        shape = (sum(t.stop - t.start for t in mine), *ctx.shape[1:])
        if d_received is None:
            d_received = torch.zeros(shape, dtype=ctx.dtype, device=ctx.device)
        pieces = d_received.split([t.stop - t.start for t in mine]) if mine else []
        buffers = [_empty(ctx, t.stop - t.start) for t in given]
        swap(
            ctx.shard.group,
            ctx.tag + 1,
            [(t.source, piece) for t, piece in zip(mine, pieces)],
            [(t.target, buffer) for t, buffer in zip(given, buffers)],
        )
        # In the order of the transfers, so bits repeat; in a wide dtype, so one rounding is left.
        wide = torch.promote_types(ctx.dtype, torch.float32)
        d_rows = torch.zeros(ctx.shape, dtype=wide, device=ctx.device)
        for transfer, buffer in zip(given, buffers):
            d_rows[transfer.start : transfer.stop] += buffer
        return (None, None, d_rows.to(ctx.dtype), *d_through)


def _empty(like: Any, rows: int) -> Tensor:
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _move(shard: Any, tag: int, transfers: Sequence[Transfer], rows: Tensor) -> Tensor:
    buffers = [(t.source, _empty(rows, t.stop - t.start)) for t in transfers if t.target == shard.rank]
    sends = [(t.target, rows[t.start : t.stop]) for t in transfers if t.source == shard.rank]
    swap(shard.group, tag, sends, buffers)
    return torch.cat([buffer for _, buffer in buffers]) if buffers else rows.new_empty((0, *rows.shape[1:]))


def pass_through(ctx: Any, first: int, tensors: Sequence[Tensor]) -> List[Tensor]:
    """``tensors`` as outputs of the function ``ctx``, whose input number ``first`` is the first of them.

    Those that need no gradient still need none.
    """
    views = [tensor.view_as(tensor) for tensor in tensors]
    fixed = [view for place, view in enumerate(views) if not ctx.needs_input_grad[first + place]]
    ctx.mark_non_differentiable(*fixed)
    return views


def fetch(
    shard: Any, transfers: Sequence[Transfer], rows: Tensor, through: Sequence[Optional[Tensor]]
) -> Tuple[Tensor, List[Optional[Tensor]]]:
    """:class:`Fetch`, where some of ``through`` may be None."""
    received, *passed = Fetch.apply(shard, transfers, rows, *(x for x in through if x is not None))
    left = iter(passed)
    return received, [None if x is None else next(left) for x in through]
