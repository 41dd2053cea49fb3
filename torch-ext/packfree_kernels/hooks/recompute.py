"""The boundaries of a layer that is recomputed in the backward pass, when nothing hands them to it.

Activation checkpointing runs a layer again during the backward pass. Checkpointing that transformers sets up re-enters
the boundaries of its own forward (see ``patches.py``). A wrapper from elsewhere (FSDP's, accelerate's, a hand-written
one) does not, and a model that drops the boundary keywords would recompute the layer as one sequence: wrong gradients
without a word.

Autograd tells which forward is being recomputed. It numbers the nodes of its graph in the order of their creation, each
thread for itself, and a recompute runs inside a node that the forward has made: a node of the checkpointed region, or
the reentrant checkpoint itself. So the numbers between which a model's forward ran are kept with its boundaries. What
cannot be told by them is an error, never a guess.
"""

from collections import deque
from typing import Callable, Deque, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from .. import _sharing
from .context import Boundaries

# Forwards whose backward pass may still come. They hold a few integers a token each, so not all are kept.
_MOST = 32


class _Remembered:
    """A tensor of boundaries, without what layers make of it, which ends with the backward pass that needs it.

    Whoever asks gets the tensor of the forward as long as somebody has it, and then another one that says the same.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._lend(tensor)

    def _lend(self, tensor: Tensor) -> None:
        self._kept, self._lent = _sharing.alias(tensor), WeakIdRef(tensor)

    def recall(self) -> Tensor:
        tensor = self._lent()
        if tensor is None:
            tensor = self._kept
            self._lend(tensor)
        return tensor


class _Forward(NamedTuple):
    """A finished forward of a model: it made the nodes ``first`` to ``end - 1``; None means that it was unpacked."""

    first: int
    end: int
    boundaries: Optional[Boundaries]
    cu_seqlens: Optional[_Remembered] = None
    seq_idx: Optional[_Remembered] = None

    @staticmethod
    def of(first: int, end: int, boundaries: Optional[Boundaries]) -> "_Forward":
        if boundaries is None:
            return _Forward(first, end, None)
        cu_seqlens, seq_idx = _Remembered(boundaries.cu_seqlens), _Remembered(boundaries.seq_idx)
        return _Forward(first, end, boundaries._replace(cu_seqlens=None, seq_idx=None), cu_seqlens, seq_idx)

    def recall(self) -> Optional[Boundaries]:
        if self.boundaries is None:
            return None
        return self.boundaries._replace(cu_seqlens=self.cu_seqlens.recall(), seq_idx=self.seq_idx.recall())


class _Forwards:
    """What is known of earlier forwards."""

    def __init__(self) -> None:
        self.kept: Deque[_Forward] = deque(maxlen=_MOST)
        # The nodes of packed forwards that are kept no longer end here.
        self.forgotten_end = 0
        # Whether a packed forward was compiled: where its graph breaks, what runs between the pieces is not noted.
        self.any_compiled = False


_forwards = _Forwards()


def constant_in_a_trace(function: Callable) -> Callable:
    """What ``torch.compiler.assume_constant_result`` does; that imports torch._dynamo, which makes a folder on disk."""
    function._dynamo_marked_constant = True
    return function


def next_node() -> int:
    """The number that autograd gives to the next node of this thread."""
    return torch.autograd._get_sequence_nr()


def note_forward(first: int, boundaries: Optional[Boundaries]) -> None:
    """Remember a forward that ends now and began when ``first`` was the next node, if it can have a backward pass."""
    end = next_node()
    # Evaluation numbers a node too where it calls an autograd function.
    if end == first or not torch.is_grad_enabled():
        return
    kept = _forwards.kept
    if len(kept) == _MOST and kept[0].boundaries is not None:
        _forwards.forgotten_end = max(_forwards.forgotten_end, kept[0].end)
    kept.append(_Forward.of(first, end, boundaries))


@constant_in_a_trace
def note_compiled_forward() -> None:
    """Remember that packed forwards are compiled; runs while one is traced."""
    _forwards.any_compiled = True


def forget() -> None:
    _forwards.kept.clear()
    _forwards.forgotten_end, _forwards.any_compiled = 0, False


@constant_in_a_trace
def recomputing() -> bool:
    """Whether this call runs inside a backward pass: -1 is what autograd reports outside of one."""
    return torch._C._current_graph_task_id() >= 0


def boundaries_of_recompute(needed: bool = True) -> Optional[Boundaries]:
    """The boundaries of the forward that this call recomputes; None outside a backward pass, and for an unpacked one.

    Raises:
        RuntimeError: the call recomputes something, it cannot be told whether that was packed, and the caller needs
            to know because nothing else says so.
    """
    node = torch._C._current_autograd_node() if recomputing() else None
    if node is None:
        return None
    number, forwards = node._sequence_nr(), list(_forwards.kept)
    found = [forward for forward in forwards if forward.first <= number < forward.end]
    if len(found) == 1:
        return found[0].recall()
    # Several: threads that number alike. None: a forgotten forward, or a checkpoint made inside a recompute.
    unpacked = all(forward.boundaries is None for forward in found or forwards) and number >= _forwards.forgotten_end
    if needed and (_forwards.any_compiled or not unpacked):
        raise unknown()
    return None


def unknown() -> RuntimeError:
    return RuntimeError(
        "packfree-kernels: the sample boundaries of a packed forward are not known in its recompute. Activation "
        "checkpointing must be switched on with model.gradient_checkpointing_enable(), which keeps them, not with a "
        "wrapper around the layers; or pass seq_idx and cu_seq_lens_q to every layer"
    )
