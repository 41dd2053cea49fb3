"""Engines that give each rank a part of a row: a forward of ours under one must not take a part for the whole.

torch's gives each rank one stretch of the row where its load balancing is off, or the tokens are no multiple of twice
the ranks: such rows are shards (``shards.py``).

Checked against torch 2.13.0 (``torch.distributed.tensor.experimental.context_parallel``, which Accelerate's ``cp_size``
uses) and DeepSpeed 0.19.8 (``deepspeed.runtime.sequence_parallel``, which Accelerate's ``sp_size`` and TRL use).
"""

import inspect
import sys
from typing import Any, Optional

import torch
import torch.nn.functional as F

from ..context_parallel.switch import Switch
from . import guards

_TORCH_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_DEEPSPEED_GROUPS = "deepspeed.utils.groups"
_DEEPSPEED_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"

_WAY_OUT = (
    "Train with packfree.sequence_parallel, which cuts rows over ranks for such models, or with data parallelism (DDP, "
    'FSDP, ZeRO), which keeps every row whole; a model of attention alone can also be loaded with '
    'attn_implementation="sdpa"'
)


def cut_rows(model: Any) -> Optional[Switch]:
    """Over which ranks an engine at work in this process cuts every row, or None without one.

    Raises:
        NotImplementedError: each rank has no single stretch of the row, or what it has is not known here.
    """
    patched = F.scaled_dot_product_attention
    # While its context lasts, torch puts a function of its own in the place of a builtin.
    if getattr(patched, "__module__", None) == _TORCH_MODULE:
        engine = "torch's context_parallel"
        if torch.compiler.is_compiling():
            _refuse(model, engine, "a part of every row")
        if sys.modules[_TORCH_MODULE]._cp_options.enable_load_balance:
            _refuse(model, engine, "a part of every row from its head and one from its tail")
        mesh = inspect.getclosurevars(patched).nonlocals.get("device_mesh")
        if mesh is None:
            _refuse(model, engine, "a part of every row")
        return Switch(mesh.get_group())
    if _deepspeed():
        _refuse(model, "DeepSpeed's sequence parallelism", "a part of every row")
    return None


def refuse_cut_rows(model: Any) -> None:
    """Raises NotImplementedError while an engine cuts rows that our own switch is told to be shards."""
    if cut_rows(model) is not None:
        _refuse(model, "torch's context_parallel inside sequence_parallel", "a part of a part of every row")


def _refuse(model: Any, engine: str, what: str) -> None:
    raise NotImplementedError(
        f"{guards.named(model)}: {engine} gives each rank {what}, over which the boundaries and states of "
        f"packfree-kernels do not reach. {_WAY_OUT}"
    )


def _deepspeed() -> bool:
    """Whether DeepSpeed has split its ranks into groups that share a row; once it has, it stays so."""
    state, groups = sys.modules.get(_DEEPSPEED_STATE), sys.modules.get(_DEEPSPEED_GROUPS)
    if getattr(state, "_SEQUENCE_PARALLEL_GROUP", None) is not None and state.get_sequence_parallel_world_size() > 1:
        return True
    return groups is not None and groups.dist.is_initialized() and groups._get_sequence_parallel_world_size() > 1


# What torch.compiler.assume_constant_result sets, without importing the compiler for it: traced, sys.modules would make
# every import a reason to compile again.
_deepspeed._dynamo_marked_constant = True
