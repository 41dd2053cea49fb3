"""A recurrence on one shard of a pack, by states alone."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .context import ContextParallel
from .scan import CarriedState, Kind

Inputs = Tuple[Any, ...]


class Recurrence(NamedTuple):
    """What an op computes, for any stretch of its tokens.

    Attributes:
        inputs: of the op: tensors, and whatever else.
        axes: for each of them the axis that runs along the tokens, or None.
        run: ``(inputs, cu_seqlens, initial_state, want_state) -> (output, states)``.
        transfer: ``(inputs, cu_seqlens) -> M`` for one sequence: how the state before it enters the one behind it.
        state: shape of one sequence's state, ``[1, ...]``.
        M: shape of M, ``[1, ...]``.
        dtype: of states.
        elementwise: whether M multiplies elementwise; else it is a matrix from the left.
    """

    inputs: Inputs
    axes: Tuple[Optional[int], ...]
    run: Callable[[Inputs, Tensor, Optional[Tensor], bool], Tuple[Tensor, Tensor]]
    transfer: Callable[[Inputs, Tensor], Tensor]
    state: Tuple[int, ...]
    M: Tuple[int, ...]
    dtype: torch.dtype
    elementwise: bool


def carried(
    shard: ContextParallel, rule: Recurrence, cu_seqlens: Tensor, initial: Optional[Tensor], want_state: bool
) -> Tuple[Tensor, Tensor]:
    """What ``rule.run`` gives for the shard's tokens, as if the whole pack were here.

    ``initial``: states of the samples that begin here, or None (zeros). Returns the output, and the states of the
    samples that end here.
    """
    device = cu_seqlens.device
    M, C = _map_of_last(shard, rule, initial)
    kind = Kind(torch.Size(rule.M), torch.Size(rule.state), rule.dtype, device, rule.elementwise)
    given = [*rule.inputs, initial]
    entered, *through = CarriedState.apply(shard, kind, M, C, *(x for x in given if isinstance(x, Tensor)))
    *inputs, initial = _put_back(given, through)
    if shard.entering is not None:
        others = shard.begins
        rest = initial if initial is not None else torch.zeros(others, *rule.state[1:], dtype=rule.dtype, device=device)
        initial = torch.cat([entered, rest])
    output, states = rule.run(tuple(inputs), cu_seqlens, initial, want_state)
    if want_state and shard.leaving is not None:
        states = states[:-1]
    return output, states


def _map_of_last(
    shard: ContextParallel, rule: Recurrence, initial: Optional[Tensor]
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """M and C of the part of the sample that leaves; M is None where it begins here, and C then its state."""
    if shard.leaving is None:
        return None, None
    start, stop = shard.offsets[-2:]
    part = tuple(
        x if axis is None or x is None else x.narrow(axis, start, stop - start)
        for x, axis in zip(rule.inputs, rule.axes)
    )
    device = next(x.device for x in rule.inputs if isinstance(x, Tensor))
    ends = torch.tensor([0, stop - start], dtype=torch.int32).to(device)
    begins_here = shard.leaving[1] == 0
    first = initial[-1:] if begins_here and initial is not None else None
    C = rule.run(part, ends, first, True)[1]
    return None if begins_here else rule.transfer(part, ends), C


def _put_back(given: List[Any], tensors: List[Tensor]) -> List[Any]:
    """``given`` with its tensors replaced by ``tensors``, in order."""
    left = iter(tensors)
    return [next(left) if isinstance(value, Tensor) else value for value in given]
