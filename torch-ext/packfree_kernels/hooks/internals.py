"""Everything that the hooks know about the inside of transformers and kernels.

Checked against the releases of transformers below, from 5.23 on with kernels 0.17.2 let through its version check. What
is relied on:

- sequence-mixing functions are globals of ``modeling_*`` modules and are called through them. With ``kernels`` in use
  they are instances whose class has ``kernel_layer_name``; without it (or with ``USE_HUB_KERNELS=0``) they are plain
  functions named ``wrapped`` whose closure holds ``func_name``;
- every model's ``__init__`` begins with ``PreTrainedModel.__init__``, which loads the attention kernel and then calls
  ``_check_and_adjust_experts_implementation``, before any layer exists; it ends in ``PreTrainedModel.post_init``;
- ``_can_set_attn_implementation()`` says whether a modeling file looks its attention up in transformers' table;
- ``modeling_flash_attention_utils`` keeps the name and the functions of the last attention kernel in module globals;
- ``PreTrainedModel._set_gradient_checkpointing(enable, gradient_checkpointing_func, ...)`` hands the function out;
- experts in another dtype than bfloat16 are computed, compiled, by the operator ``transformers::grouped_mm_fallback``;
- attention gets its boundaries as ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``;
- the forward of a rotary class is wrapped by ``dynamic_rope_update``, whose wrapper's closure holds ``rope_forward``,
  the forward itself, which multiplies positions by the module's ``inv_freq`` and reads no other length.
"""

import inspect
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

# Minor releases, of each of which one ran the table of models (docs/versions.md).
CHECKED_TRANSFORMERS = ("5.16", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")

MODEL_MODULE = "transformers.modeling_utils"

# Keywords of a model's forward that carry boundaries.
OFFSET_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST_KEYWORDS = ("max_length_q", "max_length_k")
BOUNDARY_KEYWORDS = ("seq_idx", *OFFSET_KEYWORDS, *LONGEST_KEYWORDS)
# Keywords that carry boundaries elsewhere and that no forward reads -> what to pass instead.
_OFFSETS = "offsets [N + 1] as cu_seq_lens_q"
_LENGTHS = f"{_OFFSETS} (0 and the running sums of the lengths)"
_LABELS = "sample numbers [B, T] that never decrease as seq_idx"
FOREIGN_BOUNDARY_KEYWORDS = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cumulative_len"), _OFFSETS),
    **dict.fromkeys(("seq_lens", "seqlens", "seq_lengths", "sequence_lengths", "sub_seq_lens"), _LENGTHS),
    **dict.fromkeys(("packed_seq_lengths", "packed_seq_lens", "attention_mask_in_length"), _LENGTHS),
    **dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sample_ids", "sequence_ids", "seq_ids"), _LABELS),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), f"{_OFFSETS} and the length as max_length_q"),
    "packed_seq_params": _OFFSETS,
}
# Tensors that a forward on text alone may be given.
TEXT_KEYWORDS = (*BOUNDARY_KEYWORDS, "input_ids", "labels", "num_items_in_batch", "token_type_ids")
# A cache that is in use under any of these names means generation; the last two belong to continuous batching.
CACHE_KEYWORDS = ("past_key_values", "cache_params")
PAGED_KEYWORDS = ("cache", "block_table")

# Attention implementations that cut a pack by position_ids alone, through the mask that transformers builds.
MASK_ATTENTION = ("eager", "sdpa", "flex_attention")
# Model types that build this mask without their position_ids.
MASK_WITHOUT_POSITIONS = ("granitemoehybrid",)

# What builds mask functions of others: their names, which modeling modules import too.
MASK_MODULE = "transformers.masking_utils"
MASK_BUILDERS = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "blockwise_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",  # from 5.23 on
)
# What numbers the samples of a pack by position_ids [B, T], from 0 on, for the mask functions; it reads a value to
# return None where there is one sample a row.
SAMPLE_FINDER = "find_packed_sequence_indices"
# Model types that give each image's stretch of tokens a number of its own.
NUMBERED_BLOCKS = ("gemma3*", "gemma4*", "diffusion_gemma*")

# Model types (a trailing * stands for any ending) whose packed result is wrong outside the functions that can be
# hooked, and what does it.
LEAKING_MODELS = {
    "fnet": "its Fourier transform mixes the tokens of the whole row",
    "perceiver": "its latents read the tokens of the whole row",
    "tipsv2": "it pools the tokens of the whole row into one embedding",
    "glm5_next*": "its sparse-attention indexer does not see sample boundaries",
    "qwen4_exp*": "its position embedding convolution and n-gram hash do not see sample boundaries",
    "minimax": "its lightning attention carries one state through the row",
    "mobilebert": "its embeddings join the vectors of neighbouring tokens",
    "recurrent_gemma": "its recurrent block carries one state through the row",
    "rwkv": "its recurrence carries one state through the row",
    "xlstm": "its recurrence carries one state through the row",
    "zaya": "its convolutional attention does not see sample boundaries",
}
# The same of types in releases before the one that made their functions hookable.
LEAKING_BEFORE = {
    "lfm3": ("5.24", "its convolution is none of the functions that can be told where samples end"),
    "inkling2*": ("5.24", "its convolution is none of the functions that can be told where samples end"),
}
# Attention that a flash-style kernel cannot express.
ATTENTION_NOT_EXPRESSED = {
    "inkling*": "its attention adds a learned position bias",
    "pegasus_x": "the local attention of its encoder needs a mask of another form than flash-style kernels get",
    "t5gemma*": "the window of its encoder is one token wider than the one that flash-style kernels get",
}


def loaded() -> bool:
    """Whether transformers' model base class exists in this process."""
    return hasattr(sys.modules.get(MODEL_MODULE), "PreTrainedModel")


def minor_release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def leaking_models() -> Dict[str, str]:
    """Patterns of model types that leak in this release of transformers, and why."""
    release = tuple(int(part) for part in minor_release(version() or "0.0").split(".") if part.isdigit())
    early = {
        pattern: reason
        for pattern, (mended, reason) in LEAKING_BEFORE.items()
        if release < tuple(int(part) for part in mended.split("."))
    }
    return {**LEAKING_MODELS, **early}


def version() -> Optional[str]:
    return getattr(sys.modules.get("transformers"), "__version__", None)


def model_base() -> type:
    return sys.modules[MODEL_MODULE].PreTrainedModel


def flash_utils() -> ModuleType:
    import transformers.modeling_flash_attention_utils as utils

    return utils


def flash_entry() -> ModuleType:
    import transformers.integrations.flash_attention as entry

    return entry


def grouped_product() -> Tuple[Any, Optional[Callable]]:
    """The operator that computes experts where PyTorch's grouped product does not, and its backward formula.

    ``(None, None)`` while the module is not loaded, and where it has another form.
    """
    module = sys.modules.get("transformers.integrations.moe")
    stock = getattr(module, "_grouped_mm_fallback_backward", None)
    definition = torch._library.custom_ops._maybe_get_opdef("transformers::grouped_mm_fallback")
    return (definition, stock) if stock is not None and hasattr(definition, "_backward_fn") else (None, None)


def modules_asking_for_flash() -> List[ModuleType]:
    """Loaded modules that ask ``is_flash_attention_requested`` where ours is meant too: generation, of static caches.

    Not the loader: a model that lists its own flash kernels would be given one of those instead of ours, and a model
    without attention refused.
    """
    return [sys.modules[name] for name in ("transformers.generation.utils",) if name in sys.modules]


def attention_functions() -> Any:
    return sys.modules[MODEL_MODULE].ALL_ATTENTION_FUNCTIONS


def mask_functions() -> Any:
    """The table of mask functions by attention implementation, or None."""
    return getattr(sys.modules.get(MASK_MODULE), "ALL_MASK_ATTENTION_FUNCTIONS", None)


def mask_builders() -> Iterator[Tuple[ModuleType, str, Callable]]:
    """Each place where a modeling module, or the mask module itself, finds one of the functions that build masks."""
    return _stock_of_masks(MASK_BUILDERS)


def sample_finders() -> Iterator[Tuple[ModuleType, str, Callable]]:
    """The same places of the function that numbers a pack's samples."""
    return _stock_of_masks((SAMPLE_FINDER,))


def _stock_of_masks(names: Tuple[str, ...]) -> Iterator[Tuple[ModuleType, str, Callable]]:
    for module in [*modeling_modules(), *filter(None, [sys.modules.get(MASK_MODULE)])]:
        for name in names:
            function = vars(module).get(name)
            if getattr(function, "__module__", None) == MASK_MODULE and not hasattr(function, "packfree_stock"):
                yield module, name, function


def plain_mask_name(function: Callable) -> str:
    """``causal`` or ``bidirectional`` for the mask functions that nothing has built, else an empty string."""
    masks = sys.modules[MASK_MODULE]
    if function is masks.causal_mask_function:
        return "causal"
    return "bidirectional" if function is masks.bidirectional_mask_function else ""


def sees_both_ways(config: Any) -> bool:
    """Whether a decoder's own modules drop causality, so that a mask that says so adds nothing."""
    return getattr(config, "use_bidirectional_attention", None) is True


def numbers_every_block(config: Any) -> bool:
    """Whether the model numbers blocks by where they start, so that none has two pieces."""
    return any(matches(model_type(config), pattern) for pattern in NUMBERED_BLOCKS)


def cast_for_attention(module: Any, query: Any, key: Any, value: Any) -> Tuple[Any, Any, Any]:
    """The casts of ``flash_attention_forward``: to the layer's dtype where something has left it in float32."""
    dtype = flash_entry().get_target_dtype(query, module)
    return flash_utils().fa_peft_integration_check(query, key, value, dtype)


def modeling_modules() -> List[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if ".modeling_" in name and module is not None]


def kernel_function_name(value: Any) -> Optional[str]:
    """The name under which transformers registered ``value``, or None if it is no such function."""
    if isinstance(value, torch.nn.Module):
        return getattr(type(value), "kernel_layer_name", None)
    if getattr(getattr(value, "__code__", None), "co_name", None) == "wrapped":
        return _closed_over(value, "func_name")
    return None


def runs_torch_code(function: Any) -> bool:
    """Whether ``function``, of :func:`kernel_function_name`, computes by transformers' torch code at present.

    Otherwise a package that is installed does, or a kernel that was put in its place (``use_kernels=True``).
    """
    if isinstance(function, torch.nn.Module):
        forward = type(function).forward
        if getattr(function.forward, "__func__", None) is not forward:
            return False
        function = _closed_over(forward, "func")
    return not _closed_over(function, "is_new_implementation")


def _closed_over(function: Any, name: str) -> Any:
    """What ``function`` closes over under ``name``, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def model_classes() -> Iterator[type]:
    """Every class with a ``forward`` that a known model inherits, mixins included, without the common bases."""
    seen = set()
    waiting = [model_base()]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                waiting.append(cls)
                yield from forward_classes(cls)


def forward_classes(model_class: type) -> Iterator[type]:
    for cls in model_class.__mro__:
        if "forward" in vars(cls) and cls is not torch.nn.Module and cls is not model_base():
            yield cls


def model_type(config: Any) -> str:
    return getattr(config, "model_type", "") or ""


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return get() if get is not None else config


def has_attention(config: Any) -> bool:
    return getattr(config, "num_attention_heads", None) is not None


def activation(name: str) -> Callable:
    """The activation that a model's configuration calls ``name``."""
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def causal_loss(model: Any) -> Optional[Callable]:
    """transformers' loss of a causal language model if that is what ``model`` computes from labels, else None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    function = getattr(model, "loss_function", None)
    computes = inspect.unwrap(type(model).forward).__code__.co_names
    return function if function is ForCausalLMLoss and "loss_function" in computes else None


def attention_is_open(model: Any) -> bool:
    """Whether the modeling file of ``model`` calls attention through transformers' table of implementations."""
    return bool(type(model)._can_set_attn_implementation())


def reads_two_sequences(model: Any) -> bool:
    """Whether ``model`` is an encoder with a decoder; the decoder of BART's kind alone is none."""
    takes_both = "decoder_input_ids" in inspect.signature(type(model).forward).parameters
    return takes_both and bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def takes_positions(module: Any) -> bool:
    """Whether ``module`` is a model whose forward names ``position_ids``."""
    return isinstance(module, model_base()) and "position_ids" in inspect.signature(type(module).forward).parameters


def position_counter(model: Any) -> str:
    """Name of the module inside ``model`` that counts positions from its ``padding_idx + 1``, or an empty string."""
    for name, part in model.named_modules():
        counts = hasattr(type(part), "create_position_ids_from_input_ids") or name.endswith(".position_embeddings")
        if counts and isinstance(getattr(part, "padding_idx", None), int):
            return name
    return ""


def first_position(model: Any, counter: Optional[str] = None) -> int:
    """The position of a sample's first token: 0, or ``padding_idx + 1`` in embeddings of the RoBERTa kind.

    ``counter`` is what :func:`position_counter` says, where it is known already.
    """
    name = position_counter(model) if counter is None else counter
    return model.get_submodule(name).padding_idx + 1 if name else 0


def current_attention_kernel() -> Tuple[Optional[str], Optional[Callable]]:
    """Name and variable-length function of the attention kernel that transformers loaded last."""
    utils = flash_utils()
    return getattr(utils, "_loaded_implementation", None), getattr(utils, "_flash_varlen_fn", None)


def is_packfree_function(function: Any) -> bool:
    """Whether ``function`` comes from any build of this package; another build's package has another name."""
    root = sys.modules.get((getattr(function, "__module__", "") or "").partition(".")[0])
    return hasattr(root, "hooks_status") and hasattr(root, "flash_attn_varlen_func")


def modeling_classes(name: Optional[str] = None) -> Iterator[type]:
    """Every class in the loaded modeling modules, or those called ``name``."""
    for module in modeling_modules():
        found = list(vars(module).values()) if name is None else [vars(module).get(name)]
        yield from (value for value in found if isinstance(value, type))


# ---- rotary embeddings ----


class Rope(NamedTuple):
    """Rotary tables that depend on a length.

    Attributes:
        kind: ``"longrope"``, ``"dynamic"``, ``"mscale"`` (Phi-MoE, whose tables are scaled by a length) or a name that
            is not known here.
        parameters: the config's ``rope_parameters``.
        prefix: what the module's attributes begin with where layers of several types share it, or an empty string.
        original_length: up to this length the original frequencies hold.
        original_frequencies: float ``[K / 2]``.
    """

    kind: str
    parameters: Dict[str, Any]
    prefix: str
    original_length: int
    original_frequencies: Tensor


LENGTH_ROPES = ("longrope", "dynamic", "mscale")


def rotary_classes() -> Iterator[type]:
    """Every loaded rotary class with a decorated forward of its own, which is not hooked yet."""
    for cls in modeling_classes():
        if undecorated_rotary_forward(vars(cls).get("forward")) is not None:
            yield cls


def undecorated_rotary_forward(function: Any) -> Optional[Callable]:
    """What ``dynamic_rope_update`` has wrapped, or None if ``function`` is no such forward, or ours."""
    while inspect.isfunction(function) and not hasattr(function, "packfree_per_sample"):
        code = function.__code__
        if "rope_forward" in code.co_freevars:
            return function.__closure__[code.co_freevars.index("rope_forward")].cell_contents
        function = getattr(function, "__wrapped__", None)
    return None


def rope_of(module: Any, layer_type: Optional[str]) -> Optional[Rope]:
    """The tables of a rotary ``module`` for layers of ``layer_type`` if they depend on a length, else None."""
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind != "default" and type(module).__name__ == "PhimoeRotaryEmbedding":
        # It overrides what dynamic_rope_update chooses: the frequencies stay, a scale depends on the length.
        kind = "mscale"
    elif "dynamic" not in kind and kind != "longrope":
        return None
    parameters, prefix = module.config.rope_parameters, ""
    if layer_type is not None:
        parameters, prefix = parameters[layer_type], f"{layer_type}_"
    by_config = "dynamic" not in kind
    length = parameters["original_max_position_embeddings"] if by_config else module.original_max_seq_len
    return Rope(kind, parameters, prefix, length, getattr(module, f"{prefix}original_inv_freq"))


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Every part of ``model`` computes its attention eagerly, through masks, until the block ends."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    nested = [
        sub for config in configs.values() for sub in vars(config).values() if hasattr(sub, "_attn_implementation")
    ]
    configs.update({id(config): config for config in nested})
    chosen = [
        (config, config._attn_implementation)
        for config in configs.values()
        if isinstance(getattr(config, "_attn_implementation", None), str)
    ]
    try:
        for config, _ in chosen:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in chosen:
            config._attn_implementation_internal = name


def table_of_a_length(model: Any) -> str:
    """The rope type of ``model`` whose tables depend on a length, or an empty string."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and kind != "default" and rope_of(module, layer_type) is not None:
                return kind
    return ""


def long_frequencies(
    module: Any, prefix: str, layer_type: Optional[str], original_length: int, device: torch.device
) -> Tensor:
    """LongRoPE's frequencies ``[K / 2]`` beyond the original length, kept where transformers itself keeps them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = f"{prefix}long_inv_freq"
    found = getattr(module, name, None)
    if found is None:
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        initialise = ROPE_INIT_FUNCTIONS["longrope"]
        found, _ = initialise(module.config, device, seq_len=original_length + 1, **of_layer)
    if getattr(module, name, None) is None or found.device != device:
        # Moving it waits for a GPU, so that is done once.
        found = found.to(device)
        setattr(module, name, found)
    return found


def forget_lengths(model: Any) -> None:
    """Give dynamic rotary tables of ``model``, which keep what a long sample chose, back their first frequencies."""
    for module in model.modules():
        if not hasattr(module, "max_seq_len_cached") or not hasattr(module, "original_max_seq_len"):
            continue
        for name, original in list(module.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                module.register_buffer(name.replace("original_", ""), original.clone(), persistent=False)
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)
