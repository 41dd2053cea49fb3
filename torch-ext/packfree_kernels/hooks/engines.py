"""Engines that give each rank a part of a row: a forward of ours under one would take a part for the whole.

Checked against torch 2.13.0 (``torch.distributed.tensor.experimental.context_parallel``, which Accelerate's ``cp_size``
uses) and DeepSpeed 0.19.8 (``deepspeed.runtime.sequence_parallel``, which Accelerate's ``sp_size`` and TRL use).
"""

import sys
from typing import Any

import torch.nn.functional as F

from . import guards

_TORCH_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_DEEPSPEED_GROUPS = "deepspeed.utils.groups"
_DEEPSPEED_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"

_WAY_OUT = (
    "Train with data parallelism (DDP, FSDP, ZeRO) instead, which keeps every row whole; a model of attention alone "
    'can also be loaded with attn_implementation="sdpa"'
)


def refuse_cut_rows(model: Any) -> None:
    """Raises NotImplementedError while an engine cuts the rows that ``model`` is given."""
    engine = _active()
    if engine:
        raise NotImplementedError(
            f"{guards.named(model)}: {engine} gives each rank a part of every row, and the boundaries and states of "
            f"packfree-kernels do not cross ranks yet. {_WAY_OUT}"
        )


def _active() -> str:
    """The engine at work in this process, or an empty string."""
    # While its context lasts, torch puts a function of its own in the place of a builtin.
    if getattr(F.scaled_dot_product_attention, "__module__", None) == _TORCH_MODULE:
        return "torch's context_parallel"
    return "DeepSpeed's sequence parallelism" if _deepspeed() else ""


def _deepspeed() -> bool:
    """Whether DeepSpeed has split its ranks into groups that share a row; once it has, it stays so."""
    state, groups = sys.modules.get(_DEEPSPEED_STATE), sys.modules.get(_DEEPSPEED_GROUPS)
    if getattr(state, "_SEQUENCE_PARALLEL_GROUP", None) is not None and state.get_sequence_parallel_world_size() > 1:
        return True
    return groups is not None and groups.dist.is_initialized() and groups._get_sequence_parallel_world_size() > 1


# What torch.compiler.assume_constant_result sets, without importing the compiler for it: traced, sys.modules would make
# every import a reason to compile again.
_deepspeed._dynamo_marked_constant = True
