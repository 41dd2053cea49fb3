"""The layers of a model and what mixes tokens in each of them, read from the model and from its classes' code."""

import inspect
import re
import sys
from types import CodeType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from torch import nn

from ..hooks import functions, internals

# What a layer is called by the function that it calls; the first that matches counts.
KINDS = {
    "chunk_gated_delta_rule": "gated delta rule",
    "chunk_kda": "KDA",
    "mamba_chunk_scan_combined": "Mamba-2",
    "selective_scan_fn": "Mamba-1",
    "causal_conv1d_fn": "short convolution",
}

# Experts get the tokens of all samples in one matmul whose shape depends on the routing, so another sample may change
# the last bits; and rounding may send a token to another expert.
_ROUTED = re.compile("(Experts?|Router|Gating|MoE)$")


class Place(NamedTuple):
    """A layer of the model, or a module in it that mixes tokens.

    Attributes:
        name: short and unique, for example ``layers.3``; a mixer's is its name in the layer, for example ``mamba``.
        module: the module.
        kind: what mixes tokens, for example ``Mamba-2``; of a layer, the kinds of its mixers.
        functions: of a mixer, the functions of the hooks' table that its class calls.
        hooked: of a mixer, whether those functions are replaced by ours.
        mixers: of a layer, the modules in it that mix tokens, as far as they are recognised.
        routed: whether there are experts in it.
    """

    name: str
    module: nn.Module
    kind: str
    functions: Tuple[str, ...] = ()
    hooked: bool = False
    mixers: Tuple["Place", ...] = ()
    routed: bool = False


def find_layers(model: nn.Module) -> List[Place]:
    """The members of the outermost module lists of ``model``: the usual home of decoder and encoder layers."""
    found = []
    inside: Set[nn.Module] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        inside.update(module.modules())
        found += [(f"{name}.{index}", child) for index, child in enumerate(module)]
    short = [".".join(name.split(".")[-2:]) for name, _ in found]
    unique = len(set(short)) == len(short)
    return [_layer(shown if unique else name, module) for shown, (name, module) in zip(short, found)]


def is_routed(module: nn.Module) -> bool:
    return any(_ROUTED.search(type(part).__name__) for part in module.modules())


def _layer(name: str, module: nn.Module) -> Place:
    mixers = tuple(_mixers(module))
    kinds = list(dict.fromkeys(mixer.kind for mixer in mixers))
    return Place(name, module, ", ".join(kinds) or type(module).__name__, mixers=mixers, routed=is_routed(module))


def _mixers(layer: nn.Module, prefix: str = "") -> Iterator[Place]:
    """The outermost modules below ``layer`` that are recognised as mixing tokens."""
    for name, module in layer.named_children():
        path = prefix + name
        called = functions_called(type(module))
        if called or "Attention" in type(module).__name__ or _calls_attention(type(module)):
            hooked = bool(called) and all(called.values())
            yield Place(path, module, _kind(module, called), tuple(called), hooked, routed=is_routed(module))
        else:
            yield from _mixers(module, f"{path}.")


def _kind(module: nn.Module, called: Dict[str, bool]) -> str:
    if not any(_calls_attention(type(part)) for part in module.modules()):
        return next((kind for function, kind in KINDS.items() if function in called), type(module).__name__)
    if getattr(module, "kv_lora_rank", None) is not None:
        return "latent attention"
    # A class without windows of its own per layer reads the configuration's when it is called.
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    return "attention with a window" if window else "attention"


def _calls_attention(cls: type) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in names for _, names in _code_names(cls))


def functions_called(cls: type) -> Dict[str, bool]:
    """Function of the hooks' table that the methods of ``cls`` call -> whether it is replaced by ours."""
    found: Dict[str, bool] = {}
    for module_name, names in _code_names(cls):
        values = vars(sys.modules.get(module_name)) if module_name in sys.modules else {}
        for name in sorted(names & values.keys()):
            value = values[name]
            function = internals.kernel_function_name(getattr(value, "packfree_stock", value))
            if function in functions.REPLACEMENTS:
                found[function] = hasattr(value, "packfree_stock")
    return {name: found[name] for name in functions.REPLACEMENTS if name in found}


def _code_names(cls: type) -> Iterator[Tuple[str, Set[str]]]:
    """For each class that ``cls`` inherits: its module and the global names that its own methods use."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        names: Set[str] = set()
        for value in vars(base).values():
            names |= _names_of(getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None)
        yield base.__module__, names


def _names_of(code: Optional[CodeType]) -> Set[str]:
    if code is None:
        return set()
    inner: List[Any] = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))
