"""The boundaries of the packed forward that is running now, per thread.

Some models drop the boundary keywords on their way to a layer. What the outermost forward found is therefore also kept
here, where the hooked functions look when their keywords say nothing.

A ``threading.local`` is what ``torch.compile(fullgraph=True)`` traces; a ``contextvars.ContextVar`` breaks the graph.
Threads matter: data parallel replicas run forward in threads of their own, and on a GPU a checkpointed layer is
recomputed in a thread of the autograd engine.
"""

import threading
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import packing


class Boundaries(NamedTuple):
    """Where the samples of one packed forward end.

    Attributes:
        cu_seqlens: int32 ``[N + 1]``, offsets into the ``B * T`` tokens of the batch read row after row. While tracing
            it has one entry per token plus one and ends in empty sequences.
        seq_idx: int32 ``[B, T]``, the sequence of each token, -1 for padding after the last offset.
        batch: rows B.
        length: tokens T of a row.
        max_length: an upper bound of the longest sequence.
        model: class name of the model, for messages.
        config_type: class of the model's text config; tells its own attention layers from those of an image tower.
        shard: the :class:`~..context_parallel.ContextParallel` of a row that is one rank's part of a longer one, or
            None; the other boundaries are then this part's own.
    """

    cu_seqlens: Tensor
    seq_idx: Tensor
    batch: int
    length: int
    max_length: int
    model: str
    config_type: type
    shard: Any = None

    def fit(self, batch: int, length: int) -> bool:
        """Whether a tensor of ``batch`` rows and ``length`` tokens is cut by these boundaries."""
        return self.batch == batch and self.length == length


class _Slot(threading.local):
    def __init__(self) -> None:
        # Runs once a thread. Class attributes as defaults would not do: dynamo guards that the instance lacks them,
        # and a compiled forward, which sets them, would break its own guard.
        self.inside = False
        self.current: Optional[Boundaries] = None
        # Of a running head (see heads.py): what its base model has not been given yet, and how many results it makes.
        self.reading: Any = None
        self.results: Optional[int] = None


_slot = _Slot()

Saved = Tuple[bool, Optional[Boundaries]]


def inside_forward() -> bool:
    """Whether a model's forward is running in this thread, packed or not."""
    return _slot.inside


def current() -> Optional[Boundaries]:
    """The boundaries of the running forward, or None outside one and in an unpacked one."""
    return _slot.current


def save() -> Saved:
    return _slot.inside, _slot.current


def enter(boundaries: Optional[Boundaries]) -> None:
    """Begin an outermost forward; ``None`` marks it as unpacked."""
    _slot.inside = True
    _slot.current = boundaries


def restore(saved: Saved) -> None:
    _slot.inside, _slot.current = saved


def reading() -> Any:
    return _slot.reading


def set_reading(reading: Any) -> None:
    _slot.reading = reading


def results() -> Optional[int]:
    return _slot.results


def set_results(results: Optional[int]) -> None:
    _slot.results = results


def is_one_sample(here: Boundaries, wait: bool = False) -> bool:
    """Whether the row is one sample without padding, where that can be read; ``wait`` says to wait for a GPU."""
    readable = packing.has_values(here.cu_seqlens) if wait else packing.reads_values(here.cu_seqlens)
    return here.batch == 1 and readable and torch.unique_consecutive(here.cu_seqlens).tolist() == [0, here.length]
