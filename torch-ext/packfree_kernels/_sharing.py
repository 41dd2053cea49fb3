"""What is made of boundaries once: for every layer, for forward and backward, and for what a checkpoint runs again.

Own offsets are those that this package has made: in order, inside their row, and written to by nobody else. They need
no second check, and lists of work that are made of them stay true, so :func:`of_own` keeps those. A caller's tensor
keeps only what its values were turned into, for as long as they are the same (:func:`of_callers`).

What is kept lives as long as the tensor that it was made of and must not refer to it, or neither would ever be freed.
Nothing is kept while something traces, for what runs then is a description of other calls. Nothing passes from one CUDA
stream to another, where it may not be there yet, nor out of inference mode, whose tensors no backward pass may have,
nor into a CUDA graph or out of it: a graph runs again on other values in the same memory, with everything that was made
inside it and nothing else.
"""

from typing import Any, Callable, Dict, Hashable, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Made = TypeVar("Made")

# What is not a user's own mode but a tracer: the tensors inside stand for others.
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


class _Place(NamedTuple):
    """Where something is made: the CUDA stream that runs (0 for a CPU), whether it is captured, and inference mode."""

    stream: int
    captured: bool
    inference: bool


class _Kept(NamedTuple):
    """Of one tensor.

    Attributes:
        state: what it was when this was made: its version, or a copy of its values.
        tokens: of own offsets, the length of the row that they are inside of; None of a caller's tensor.
        place: of own offsets, where they were made.
        made: results by key.
    """

    state: Any
    tokens: Optional[int]
    place: Optional[_Place]
    made: Dict[Hashable, Any]


_kept = WeakIdKeyDictionary()


def own(offsets: Tensor, tokens: int) -> Tensor:
    """``offsets``, which this package has just made, inside a row of ``tokens`` tokens."""
    if _can_keep(offsets):
        _kept[offsets] = _Kept(_version(offsets), tokens, _place(offsets), {})
    return offsets


def is_own(offsets: Tensor, tokens: int, device: torch.device) -> bool:
    """Whether these are own offsets on ``device`` inside a row of ``tokens`` tokens: no check is needed."""
    kept = _own(offsets)
    return kept is not None and kept.tokens <= tokens and offsets.device == device


def alias(boundaries: Tensor) -> Tensor:
    """The same boundaries as another tensor, own ones as own; what is kept of it ends with its own last user."""
    kept = _own(boundaries)
    if kept is not None:
        return own(boundaries.detach(), kept.tokens)
    return boundaries.detach() if _can_keep(boundaries) else boundaries


def of_own(offsets: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """``make()``, a function of ``offsets`` and ``key`` alone: once for own offsets, each time for others."""
    kept = _own(offsets)
    if kept is None:
        return make()
    if key not in kept.made:
        kept.made[key] = make()
    return kept.made[key]


def of_callers(boundaries: Tensor, key: Hashable, make: Callable[[], Made], by_value: bool) -> Made:
    """``make()``, a function of ``boundaries`` and ``key`` alone: once for as long as they say the same.

    With ``by_value`` the values are compared with a copy. Otherwise their version tells: it counts what PyTorch's
    operations write, not what goes past them.
    """
    place = _place(boundaries) if _can_keep(boundaries) else None
    if place is None or place.captured:
        return make()
    kept = _kept.get(boundaries)
    if kept is None or not _says(boundaries, kept.state):
        state = boundaries.clone() if by_value else _version(boundaries)
        if state is None:
            return make()
        kept = _kept[boundaries] = _Kept(state, None, None, {})
    key = (key, place)
    if key in kept.made:
        return kept.made[key]
    made = make()
    if made is not boundaries:
        kept.made[key] = made
    return made


def tell(boundaries: Tensor, key: Hashable, value: Any, by_value: bool) -> None:
    """Let :func:`of_callers` give ``value``, which was made beside ``boundaries``, in place of what it would make."""
    of_callers(boundaries, key, lambda: value, by_value)


def _own(offsets: Tensor) -> Optional[_Kept]:
    if not _can_keep(offsets):
        return None
    kept = _kept.get(offsets)
    if kept is None or kept.tokens is None or kept.place != _place(offsets) or not _says(offsets, kept.state):
        return None
    return kept


def _says(tensor: Tensor, state: Any) -> bool:
    return torch.equal(tensor, state) if isinstance(state, Tensor) else state == _version(tensor)


def _version(tensor: Tensor) -> Optional[int]:
    """The number of writes so far. Of what inference mode has made they are not counted; own offsets have none."""
    return None if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> _Place:
    if tensor.device.type != "cuda":
        return _Place(0, False, torch.is_inference_mode_enabled())
    stream, captured = torch.cuda.current_stream(tensor.device), torch.cuda.is_current_stream_capturing()
    return _Place(stream.cuda_stream, captured, torch.is_inference_mode_enabled())


def _can_keep(tensor: Tensor) -> bool:
    """Whether ``tensor`` is what it seems: no tracer and no transform of torch.func stands behind it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(tensor) is not Tensor or tensor.is_meta or torch._C._are_functorch_transforms_active():
        return False
    # Without any mode, which is soon told, there is no tracer either.
    modes = torch._C._len_torch_dispatch_stack()
    return not modes or not any(torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS)
