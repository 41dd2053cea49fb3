"""Models that cannot keep packed samples apart, or cannot express their attention in ours, are refused by name."""

from typing import AbstractSet, Any, Dict, List, NamedTuple, Set, Tuple

from . import internals

# Names under which transformers has registered an attention kernel of this package.
_our_attention: Set[str] = set()
# Image or sound towers that went back to transformers' own attention: class name -> its implementation.
_towers: Dict[str, str] = {}


class Facts(NamedTuple):
    """What the hooks need to know about a kind of model.

    Attributes:
        takes_positions: position_ids reach the model or a model inside it; BART's kind counts positions itself.
        mixes_tokens: it calls functions that the hooks replace.
        leaks: why its packed result would be wrong whatever the hooks do, or an empty string.
        two_sequences: an encoder and a decoder, each with samples of its own, of which boundaries tell one.
        counter: name of the module that counts positions from its padding index on, or an empty string.
    """

    takes_positions: bool
    mixes_tokens: bool
    leaks: str
    two_sequences: bool = False
    counter: str = ""


# (class of the model, class of its text config) -> facts. A plain dictionary, because compiled forwards read it.
_facts: Dict[Tuple[type, type], Facts] = {}


def note_model(model: Any, hooked_modules: AbstractSet[str]) -> None:
    """Gather the facts about ``model``, once for its kind. ``hooked_modules`` names modules with replaced functions."""
    kind = (type(model), type(internals.text_config(model)))
    if kind not in _facts:
        parts = list(model.modules())
        _facts[kind] = Facts(
            takes_positions=any(internals.takes_positions(part) for part in parts),
            mixes_tokens=any(type(part).__module__ in hooked_modules for part in parts),
            leaks=found_in(model, internals.leaking_models()),
            two_sequences=internals.reads_two_sequences(model),
            counter=internals.position_counter(model),
        )


def facts(model: Any) -> Facts:
    known = _facts.get((type(model), type(internals.text_config(model))))
    return Facts(takes_positions=True, mixes_tokens=True, leaks="") if known is None else known


def concerns(model: Any) -> bool:
    """Whether a packed forward of ``model`` needs the hooks; what transformers does alone is not interfered with."""
    known = facts(model)
    return known.mixes_tokens or bool(known.leaks) or uses_our_attention(model)


def attention_name(model: Any) -> str:
    return getattr(internals.text_config(model), "_attn_implementation", None) or ""


def uses_our_attention(model: Any) -> bool:
    return attention_name(model) in _our_attention


def note_attention_kernel() -> List[str]:
    """Learn under which names this package serves attention; returns the new ones.

    A kernel is registered under whatever repository string the user wrote, so the name is read back from transformers.
    """
    name, function = internals.current_attention_kernel()
    if name is None or name in _our_attention or not internals.is_packfree_function(function):
        return []
    _our_attention.add(name)
    return [name]


def forget() -> None:
    _our_attention.clear()
    _facts.clear()
    _towers.clear()


def found_in(model: Any, patterns: Dict[str, str]) -> str:
    """Why ``model`` is in the list, or an empty string."""
    for config in (getattr(model, "config", None), internals.text_config(model)):
        for pattern, reason in patterns.items():
            if internals.matches(internals.model_type(config), pattern):
                return reason
    return ""


def named(model: Any) -> str:
    return f"{type(model).__name__} (model type {internals.model_type(getattr(model, 'config', None))!r})"


def why_not_packed(model: Any) -> str:
    """Why samples of ``model`` cannot share a row, or an empty string."""
    known = facts(model)
    if known.two_sequences:
        return "its encoder and its decoder each hold samples, and boundaries are told for one of them"
    return known.leaks


def refuse_packed(model: Any) -> None:
    """Raises ValueError if packed samples of ``model`` mix where no hook reaches."""
    reason = why_not_packed(model)
    if reason:
        raise ValueError(
            f"{named(model)} cannot be trained on packed samples: {reason}. Use padded batches "
            "(DataCollatorWithPadding) instead"
        )


def check_loaded(model: Any) -> None:
    """Check a model whose configuration names its attention, before its layers are built.

    A text model whose attention ours cannot express, or which leaks, must not come up under our attention: its results
    would be wrong without a word. A tower without token embeddings goes back to transformers' own attention instead,
    so that a multimodal model still loads by one string.

    Raises:
        ValueError: naming the model and what to use instead.
    """
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name not in _our_attention:
        return
    reason = found_in(model, internals.leaking_models()) or found_in(model, internals.ATTENTION_NOT_EXPRESSED)
    if reason:
        raise ValueError(
            f'{named(model)} cannot run with attn_implementation="{name}": {reason}. Load it with '
            'attn_implementation="eager" and train it on padded batches'
        )
    why = _why_not_flash(model)
    if not why or not internals.has_attention(config):
        return
    if hasattr(config, "vocab_size"):
        raise ValueError(
            f'{named(model)} cannot run with attn_implementation="{name}": {why}. Load it with '
            'attn_implementation="eager"'
        )
    stock = model.get_correct_attn_implementation(None, is_init_check=True)
    config._attn_implementation_internal = stock
    _towers[type(model).__name__] = stock


def _why_not_flash(model: Any) -> str:
    """Why the attention of ``model`` cannot be ours, or an empty string."""
    if not getattr(model, "_supports_flash_attn", False):
        return "transformers marks its attention as one that flash-style kernels do not compute"
    if not internals.attention_is_open(model):
        return "its modeling file computes attention in classes of its own, where no kernel of another name is called"
    return ""


def refused_models() -> Tuple[Tuple[str, str], ...]:
    return tuple({**internals.leaking_models(), **internals.ATTENTION_NOT_EXPRESSED}.items())


def our_attention_names() -> Tuple[str, ...]:
    return tuple(sorted(_our_attention))


def towers() -> Dict[str, str]:
    return dict(_towers)
