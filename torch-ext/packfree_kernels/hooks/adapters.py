"""Adapters of PEFT that act on a row are refused on a pack: prompts before the row, sums and places over all of it.

PEFT rewrites a call before the model sees it: virtual tokens stand before the row and not before each sample, positions
are dropped and offsets end too early. So the forwards of PEFT's wrappers are looked at before they begin. Adapters that
act on each token for itself (LoRA, DoRA, (IA)3, OFT, ...) are not concerned.
"""

import functools
import inspect
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from ..context_parallel import switch
from . import boundaries, context, guards, internals
from .undo import UndoList

PEFT_MODULE = "peft.peft_model"

_WAY_OUT = "Use padded batches (DataCollatorWithPadding), or an adapter that acts on each token, such as LoRA"

# PEFT type -> what it takes over the whole row.
_READS_THE_ROW: Dict[str, str] = {
    "LILY": "its router averages over all tokens of the row",
    "SHADOW": "its shadow model runs through the row and is not told where samples end",
}


def loaded() -> Optional[ModuleType]:
    """PEFT's module of wrappers if it has been imported whole."""
    module = sys.modules.get(PEFT_MODULE)
    return module if hasattr(module, "PeftModelForFeatureExtraction") else None


def wrap_forwards(undo: UndoList, active: Callable[[], bool]) -> None:
    """Wrap the forward of PEFT's model classes, if PEFT is loaded; doing it again changes nothing."""
    module = loaded()
    base = getattr(module, "PeftModel", None)
    for cls in vars(module).values() if module is not None else ():
        if isinstance(cls, type) and issubclass(cls, base) and "forward" in vars(cls):
            stock = vars(cls)["forward"]
            if not hasattr(stock, "packfree_stock"):
                undo.replace(cls, "forward", _forward(stock, active))


def _forward(stock: Callable, active: Callable[[], bool]) -> Callable:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and not context.inside_forward():
            _refuse_packed(self, signature.bind(self, *args, **kwargs))
        return stock(self, *args, **kwargs)

    forward.packfree_stock = stock
    return forward


def _refuse_packed(peft_model: Any, bound: inspect.BoundArguments) -> None:
    """Raises ValueError where an adapter that acts on the row meets a pack, or a shard of a row."""
    call = {name: value for name, value in bound.arguments.items() if name not in ("self", "args", "kwargs")}
    call.update(bound.arguments.get("kwargs", {}))
    if "args" in bound.arguments and "input_ids" not in call and bound.arguments["args"]:
        call["input_ids"] = bound.arguments["args"][0]
    why = reads_the_row(peft_model, call)
    model = peft_model.get_base_model()
    if not why or not isinstance(model, internals.model_base()) or not guards.concerns(model):
        return
    if switch.current() is not None or is_packed(model, call):
        kind = internals.model_type(model.config)
        raise ValueError(
            f"{type(peft_model).__name__} of {type(model).__name__} (model type {kind!r}) cannot run on packed "
            f"samples: {why}. {_WAY_OUT}"
        )


def is_packed(model: Any, call: Dict[str, Any]) -> bool:
    """Whether the call is a pack; one sample with explicit boundaries is one too, because PEFT leaves those short."""
    signature = boundaries.Signature(tuple(inspect.signature(type(model).forward).parameters)[1:], True)
    given = dict(call)
    found = boundaries.boundaries_of_call(model, given, signature)
    if found is None:
        return False
    told = any(call.get(name) is not None for name in internals.BOUNDARY_KEYWORDS)
    return told or not context.is_one_sample(found, wait=True)


def reads_the_row(peft_model: Any, call: Dict[str, Any]) -> str:
    """What the active adapters of ``peft_model`` take over the whole row, or an empty string."""
    if getattr(peft_model, "_adapters_disabled", False):
        return ""
    for config in _active_configs(peft_model):
        name = _name(config)
        if config.is_prompt_learning:
            return f"{name.replace('_', ' ').lower()} puts its virtual tokens before the row, not before each sample"
        if name in _READS_THE_ROW:
            return _READS_THE_ROW[name]
        if getattr(config, "alora_invocation_tokens", None):
            return "activated LoRA begins at one place of the row (alora_invocation_tokens)"
        tasks = call.get("task_ids")
        if name == "POLY" and getattr(tasks, "numel", lambda: 1)() > 1:
            return "task_ids choose an adapter for each row, not for each sample"
    return ""


def virtual_tokens(model: Any) -> int:
    """How many tokens the active adapters of ``model``, if any, put before each row (a prefix in a cache is no row)."""
    configs = [] if getattr(model, "_adapters_disabled", False) else _active_configs(model)
    prompts = [config for config in configs if config.is_prompt_learning]
    return sum(config.num_virtual_tokens for config in prompts if _name(config) not in ("PREFIX_TUNING", "CARTRIDGE"))


def _name(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _active_configs(peft_model: Any) -> Any:
    configs = getattr(peft_model, "peft_config", None) or {}
    if not configs:
        return []
    active = getattr(peft_model, "active_adapters", None) or [getattr(peft_model, "active_adapter", None)]
    if callable(active):
        # A model of transformers that holds adapters. Those put there by a wrapper of PEFT it does not know by name.
        active = active() if getattr(peft_model, "_hf_peft_config_loaded", False) else configs
    names = [active] if isinstance(active, str) else list(active)
    return [configs[name] for name in names if name in configs]
