"""Notice a recompute that has lost its boundaries.

Activation checkpointing runs a layer again during the backward pass. Checkpointing that transformers sets up re-enters
the boundaries of its own forward (see ``patches.py``); a wrapper from elsewhere, put around a model that does not hand
boundary keywords to the layer, would recompute the layer as one sequence and give wrong gradients without a word.
"""

from collections import OrderedDict
from typing import Hashable

import torch

# Packed calls that had their boundaries from the context alone, newest last. The bound only keeps it from growing with
# every new length; a recompute follows its forward within one training step.
_packed_calls: "OrderedDict[Hashable, None]" = OrderedDict()
_MOST = 512


def _recomputing() -> bool:
    """Whether this call runs inside a backward pass: -1 is what autograd reports outside of one."""
    return torch._C._current_graph_task_id() >= 0


def served_from_context(key: Hashable) -> None:
    """Remember that the call ``key`` was packed although its keywords did not say so."""
    if torch.compiler.is_compiling() or _recomputing():
        return
    _packed_calls[key] = None
    _packed_calls.move_to_end(key)
    if len(_packed_calls) > _MOST:
        _packed_calls.popitem(last=False)


def served_without_boundaries(name: str, key: Hashable) -> None:
    """The call ``key`` knows no boundaries; that is an error if its forward knew some.

    Raises:
        RuntimeError: in a backward pass, if the latest forward of the same call was packed.
    """
    if torch.compiler.is_compiling() or not _packed_calls:
        return
    if not _recomputing():
        _packed_calls.pop(key, None)
    elif key in _packed_calls:
        raise RuntimeError(
            f"{name}: the sample boundaries of a packed forward are not known in its recompute. Activation "
            "checkpointing must be switched on with model.gradient_checkpointing_enable(), which keeps them, not with "
            "a wrapper around the layers; or pass seq_idx and cu_seq_lens_q to every layer."
        )
