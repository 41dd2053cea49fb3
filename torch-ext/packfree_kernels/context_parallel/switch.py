"""The switch that says: rows of this process are shards."""

import threading
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Optional

import torch.distributed as dist

from .._checks import type_error
from .context import check_attention


class Switch(NamedTuple):
    """Who shares every row, and how attention reaches over ranks."""

    group: Any
    attention: str = "keys"


class _Slot(threading.local):
    def __init__(self) -> None:
        self.switch: Optional[Switch] = None


_slot = _Slot()


def current() -> Optional[Switch]:
    """The switch that is on in this thread, or None."""
    return _slot.switch


def group_of(op: str, group: Any) -> Any:
    """The process group that ``group`` means.

    Raises:
        RuntimeError: there is none.
        TypeError: something else.
    """
    if not dist.is_initialized():
        raise RuntimeError(f"{op}: torch.distributed must be initialized; call init_process_group first")
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) and not hasattr(group, "get_group"):
        raise type_error(op, "group", "be a process group, a DeviceMesh of one dimension or None", type(group).__name__)
    return group.get_group() if hasattr(group, "get_group") else group


@contextmanager
def sequence_parallel(group: Any = None, attention: str = "keys") -> Iterator[None]:
    """In this block, a model of transformers is given this rank's shard of a row that the ranks of ``group`` share.

    The shards of the ranks, one after the other, are one packed row, cut at any token (:func:`shard_batch` cuts it).
    A forward begins with one small exchange, in which the ranks agree on where the samples of the whole row lie. Each
    layer then gives its part of what one process gives for the whole row, forward and backward.

    A call holds ``input_ids`` (or ``inputs_embeds``) ``[1, t]``, t of 1 or more on each rank, and as boundaries its
    part of the row's ``position_ids`` or ``seq_idx``, or ``cu_seq_lens_q`` of the whole row; the same arguments on
    every rank. Without any the row is one sample. Logits are this rank's. With ``labels``, its part of the row's, the
    loss is this rank's summand: divided by the number of labels of all ranks (or by ``num_items_in_batch``), so that
    the sum over the ranks is the loss of one process. The label of a shard's last token comes from the next rank, or
    from ``shift_labels``. Sum gradients of parameters over the group; what averages them (FSDP, DDP) wants the loss
    times the number of ranks.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the default group. Give NCCL a group that
            nothing else uses: its messages and another's collectives must not cross.
        attention: ``"keys"``: each rank's queries fetch the keys and values of samples that are cut; ``"heads"``: for
            attention each rank has all tokens of its share of the heads (Ulysses), of which there must be a multiple of
            the ranks. Other layers exchange states either way.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError, TypeError, NotImplementedError: at the model's call, on every rank, naming the model or the
            argument, where a shard cannot be served.

    Example:
        >>> with sequence_parallel(group):
        ...     loss = model(**shard_batch(batch, group)).loss
        ...     loss.backward()
    """
    check_attention("sequence_parallel", attention)
    before, _slot.switch = _slot.switch, Switch(group_of("sequence_parallel", group), attention)
    try:
        yield
    finally:
        _slot.switch = before
