"""The replacements themselves: functions, forwards, checkpointing and attention.

Every wrapper passes straight through once the hooks are off, for the case that someone has wrapped it in turn.
"""

import functools
import inspect
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor

from ..context_parallel import switch
from . import (
    adapters,
    boundaries,
    context,
    counts,
    engines,
    experts,
    functions,
    guards,
    heads,
    internals,
    masks,
    recompute,
    rotary,
    shards,
)
from .undo import UndoList


class _State:
    """Whether the hooks are on: an attribute, for what was compiled is guarded by it."""

    def __init__(self) -> None:
        self.active = False


_state = _State()
_undo = UndoList()
_hooked_functions: Dict[str, List[str]] = {}
_hooked_modules: Set[str] = set()
_stock_attention: Dict[str, Callable] = {}
_checkpointed: "weakref.WeakSet[Any]" = weakref.WeakSet()


def is_active() -> bool:
    return _state.active


def hooked_functions() -> Dict[str, List[str]]:
    return {name: sorted(modules) for name, modules in sorted(_hooked_functions.items())}


def install() -> None:
    base = internals.model_base()
    _state.active = True
    _replace_functions()
    for cls in internals.model_classes():
        _wrap_forward(cls)
    _undo.replace(base, "__init__", _init(base.__init__))
    check = base._check_and_adjust_experts_implementation
    _undo.replace(base, "_check_and_adjust_experts_implementation", _behind_attention_check(check))
    _undo.replace(base, "post_init", _post_init(base.post_init))
    _undo.replace(base, "set_attn_implementation", _set_attention(base.set_attn_implementation))
    _undo.replace(base, "_set_gradient_checkpointing", _set_checkpointing(base._set_gradient_checkpointing))
    utils = internals.flash_utils()
    _undo.replace(utils, "fa_peft_integration_check", _cast_check(utils.fa_peft_integration_check))
    entry = internals.flash_entry()
    _undo.replace(entry, "get_target_dtype", _target_dtype(entry.get_target_dtype))


def peft_imported() -> None:
    """PEFT has come after the hooks."""
    if _state.active:
        adapters.wrap_forwards(_undo, is_active)


def remove() -> None:
    _state.active = False
    _undo.undo_all()
    table = internals.attention_functions()
    masks.unregister(list(_stock_attention))
    for name, stock in _stock_attention.items():
        if getattr(table.get(name), "packfree_stock", None) is stock:
            table.register(name, stock)
    for module in list(_checkpointed):
        function = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(function, CheckpointWithBoundaries):
            module._gradient_checkpointing_func = function.stock
    _checkpointed.clear()
    _stock_attention.clear()
    _hooked_functions.clear()
    _hooked_modules.clear()
    guards.forget()
    recompute.forget()


# ---- functions ----


def _replace_functions() -> None:
    """Replace what does not depend on a model's class, in modules that have been loaded since the last time."""
    _count_as_flash()
    experts.make_traceable(_undo)
    adapters.wrap_forwards(_undo, is_active)
    rotary.make_per_sample(_undo)
    counts.make_per_sample(_undo)
    masks.describe_themselves(_undo)
    masks.number_without_waiting(_undo)
    _replace_mixing_functions()


def _count_as_flash() -> None:
    for module in internals.modules_asking_for_flash():
        stock = vars(module).get("is_flash_attention_requested")
        if stock is not None and not hasattr(stock, "packfree_stock"):
            _undo.replace(module, "is_flash_attention_requested", _flash_requested(stock))


def _flash_requested(stock: Callable) -> Callable:
    """transformers knows flash kernels by their name. For these it keeps the mask that says how full a static cache is,
    because they see all the keys that they are given."""

    @functools.wraps(stock)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: Optional[str] = None, version: Any = None
    ) -> bool:
        if stock(config, requested_attention_implementation, version):
            return True
        name = requested_attention_implementation if config is None else config._attn_implementation
        return _state.active and version is None and name in guards.our_attention_names()

    is_flash_attention_requested.packfree_stock = stock
    return is_flash_attention_requested


def _replace_mixing_functions() -> None:
    """Replace the table's functions in every modeling module that still has stock ones.

    Looks at all of them each time, which takes about a millisecond: a module that has been seen may have been in the
    middle of its import, for example the one that imports transformers' model base class, on which this waits.
    """
    for module in internals.modeling_modules():
        for attribute, value in list(vars(module).items()):
            name = internals.kernel_function_name(value)
            if functions.is_replaced(name):
                _undo.replace(module, attribute, functions.replacement(name, value))
                _hooked_functions.setdefault(name, []).append(module.__name__)
                _hooked_modules.add(module.__name__)


# ---- forward ----


def _wrap_forward(cls: type) -> None:
    stock = vars(cls)["forward"]
    if not inspect.isfunction(stock) or getattr(stock, "packfree_forward", False):
        return
    parameters = list(inspect.signature(stock).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return
    signature = boundaries.Signature(
        tuple(parameter.name for parameter in parameters if parameter.kind not in variadic),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )
    stock = heads.serve(cls, stock, signature.names)
    heads.wrap_poolers(cls, _undo)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.active or len(args) > len(signature.names):
            return stock(self, *args, **kwargs)
        if context.inside_forward():
            return heads.inner(self, stock, args, kwargs)
        shared = switch.current()
        if not torch.compiler.is_compiling():
            _register_attention()
            guards.note_model(self, _hooked_modules)
        if shared is None and not guards.concerns(self):
            return stock(self, *args, **kwargs)
        summed = shared is not None
        if summed:
            engines.refuse_cut_rows(self)
        else:
            shared = engines.cut_rows(self)
        call = dict(zip(signature.names, args))
        call.update(kwargs)
        loss = None
        if shared is None:
            found = boundaries.boundaries_of_call(self, call, signature)
        else:
            found, loss = shards.boundaries_of_shard(self, call, signature, shared, summed)
        compiling = torch.compiler.is_compiling()
        first = None if compiling else recompute.next_node()
        if compiling and found is not None:
            recompute.note_compiled_forward()
        context.enter(found)
        try:
            output = stock(self, **call)
            if found is not None:
                heads.check_output(self, output, found)
            return output if loss is None else loss.of(output)
        finally:
            context.restore((False, None))
            if first is not None:
                recompute.note_forward(first, found)

    forward.packfree_forward = True
    _undo.replace(cls, "forward", forward)


def _init(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _state.active:
            for cls in internals.forward_classes(type(self)):
                _wrap_forward(cls)
        stock(self, *args, **kwargs)

    return __init__


def _post_init(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _state.active:
            # The first model of a process loads this package inside its own __init__, so the class is wrapped here too.
            for cls in internals.forward_classes(type(self)):
                _wrap_forward(cls)
            _replace_functions()
            _register_attention()
            guards.note_model(self, _hooked_modules)
        stock(self, *args, **kwargs)

    return post_init


def _behind_attention_check(stock: Callable) -> Callable:
    """The first method of ``PreTrainedModel`` that runs when a model's attention is known, and no layer is built yet.

    Some models pick the class of their layers by the name of the attention, so post_init is too late for a refusal; and
    the package may have been loaded a moment ago, by this model, so a wrapped ``__init__`` is too early.
    """

    @functools.wraps(stock)
    def _check_and_adjust_experts_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _state.active:
            _register_attention()
            guards.check_loaded(self)
        return stock(self, *args, **kwargs)

    return _check_and_adjust_experts_implementation


def _set_attention(stock: Callable) -> Callable:
    """A model that is switched to our attention is checked like one built with it, and switched back if refused."""

    @functools.wraps(stock)
    def set_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {part: part.config._attn_implementation for part in self.modules() if isinstance(part, base)}
        result = stock(self, *args, **kwargs)
        if _state.active:
            _register_attention()
            try:
                for part in before:
                    guards.check_loaded(part)
            except ValueError:
                for part, name in before.items():
                    part.config._attn_implementation_internal = name
                raise
        return result

    base = internals.model_base()
    return set_attn_implementation


# ---- checkpointing ----


class CheckpointWithBoundaries:
    """A checkpoint function whose recompute sees the boundaries of its own forward."""

    def __init__(self, stock: Callable) -> None:
        self.stock = stock

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        # Traced, the recompute is part of the graph and runs no Python.
        if torch.compiler.is_compiling() or not _state.active:
            return self.stock(function, *args, **kwargs)
        saved = context.save()

        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            before = context.save()
            context.restore(saved)
            try:
                return function(*inner_args, **inner_kwargs)
            finally:
                context.restore(before)

        return self.stock(run, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "CheckpointWithBoundaries":
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        # A saved model must open where this package is not loaded.
        return functools.partial, (self.stock,)


def _set_checkpointing(stock: Callable) -> Callable:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.active:
            return stock(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        function = call.arguments["gradient_checkpointing_func"]
        if not isinstance(function, CheckpointWithBoundaries):
            call.arguments["gradient_checkpointing_func"] = CheckpointWithBoundaries(function)
        result = stock(*call.args, **call.kwargs)
        for module in self.modules():
            if isinstance(getattr(module, "_gradient_checkpointing_func", None), CheckpointWithBoundaries):
                _checkpointed.add(module)
        return result

    return _set_gradient_checkpointing


# ---- attention ----


def _cast_check(stock: Callable) -> Callable:
    """transformers casts float32 inputs to a target dtype and logs that, even where the target is float32.

    The log call breaks a compiled graph of a float32 model, which our kernels serve; without a cast there is nothing
    to say.
    """

    @functools.wraps(stock)
    def fa_peft_integration_check(q: Any, k: Any, v: Any, target_dtype: Optional[torch.dtype] = None) -> Any:
        if target_dtype is None or (target_dtype == q.dtype and k.dtype == q.dtype and v.dtype == q.dtype):
            return q, k, v
        return stock(q, k, v, target_dtype)

    return fa_peft_integration_check


def _target_dtype(stock: Callable) -> Callable:
    """transformers reads the dtype of the first nn.Linear in a float32 attention layer; GPT-2 has none."""

    @functools.wraps(stock)
    def get_target_dtype(query: Tensor, module: Any) -> Optional[torch.dtype]:
        reads_layer = query.dtype == torch.float32 and not torch.is_autocast_enabled(query.device.type)
        if reads_layer and not any(isinstance(layer, torch.nn.Linear) for layer in module.modules()):
            return None
        return stock(query, module)

    return get_target_dtype


def _register_attention() -> None:
    """Lay our wrapper over transformers' attention entry under each of our names."""
    table = internals.attention_functions()
    for name in guards.note_attention_kernel():
        stock = table.get(name)
        if stock is not None and not hasattr(stock, "packfree_stock"):
            _stock_attention[name] = stock
            table.register(name, _attention(stock))
            masks.register(name)


def _attention(stock: Callable) -> Callable:
    """Give a layer of the running packed forward its boundaries where the model has dropped them on the way."""

    @functools.wraps(stock)
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _state.active or not functions.supported(query.device):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        # query and key: [B, H, T, K]
        batch, length = query.shape[0], query.shape[2]
        here = functions.running(needed=kwargs.get("cu_seq_lens_q") is None)
        if here is None:
            positions = kwargs.get("position_ids")
            if isinstance(positions, Tensor) and positions.dim() > 2:
                # Axes of an image's grid, which transformers would take for the lengths of packed samples.
                kwargs = {**kwargs, "position_ids": None}
        elif type(getattr(module, "config", None)) is not here.config_type:
            # A tower was handed the text's keywords along with everything else; its own boundaries are other tensors.
            if kwargs.get("cu_seq_lens_q") is here.cu_seqlens:
                kwargs = {name: value for name, value in kwargs.items() if name not in internals.BOUNDARY_KEYWORDS}
        else:
            if not here.fit(batch, length) or key.shape[2] != length:
                raise ValueError(
                    f"attention: the boundaries of {here.model} cut {here.batch} x {here.length} tokens, and query and "
                    f"key hold {batch} x {length} and {batch} x {key.shape[2]}. Whatever gives attention other tokens "
                    "than the model's own (an engine that cuts rows over ranks, a patch) cannot be used with a pack"
                )
            if here.shard is not None:
                masks.refuse_dense(module, attention_mask)
                return shards.attend(module, query, key, value, here, *args, **kwargs)
            if kwargs.get("cu_seq_lens_q") is None:
                kwargs.update(cu_seq_lens_q=here.cu_seqlens, cu_seq_lens_k=here.cu_seqlens)
                kwargs.update(max_length_q=here.max_length, max_length_k=here.max_length)
            if attention_mask is not None and not masks.is_ranges(attention_mask):
                # A mask would take precedence and make the row one sequence.
                raise ValueError(
                    f"attention: {here.model} made an attention_mask in a packed forward; it cannot be packed with "
                    f"attn_implementation={module.config._attn_implementation!r}"
                )
        if masks.is_ranges(attention_mask):
            return masks.attend(module, query, key, value, attention_mask, *args, **kwargs)
        masks.refuse_dense(module, attention_mask)
        return stock(module, query, key, value, attention_mask, *args, **kwargs)

    attention.packfree_stock = stock
    return attention
