"""Hooks into transformers: a packed batch reaches our functions with its boundaries, whatever the model drops.

Importing the package installs them (``PACKFREE_HOOKS=0`` leaves transformers alone, ``PACKFREE_PLAIN=0`` its calls that
hold no pack). transformers is never imported from here: where it is not loaded yet, the hooks wait for it.

One build at a time holds the hooks. A second build loaded into the same process leaves them to the first, because
models that run already keep their functions; ``remove_hooks()`` of the first frees them. Which build's functions are
called directly, and whose attention a model's string names, is not affected.
"""

import os
import threading
import warnings
from typing import Set, Union

from . import adapters, functions, guards, internals, patches
from . import plain as plain_calls
from .late_import import ImportWatch
from .status import HooksStatus

__all__ = ["HooksStatus", "hooks_status", "install_hooks", "remove_hooks"]

_OWNER = "_packfree_hooks_owner"
_lock = threading.RLock()
_warned: Set[str] = set()


def _install_now() -> None:
    with _lock:
        base = internals.model_base()
        if getattr(base, _OWNER, None) is None:
            setattr(base, _OWNER, __name__)
            patches.install()


def _install_late() -> None:
    _install_now()
    _warn_of_fallbacks()


_watch = ImportWatch(internals.MODEL_MODULE, _install_late)
_watch_peft = ImportWatch(adapters.PEFT_MODULE, lambda: patches.peft_imported())


def install_hooks(plain: Union[bool, str, None] = None) -> HooksStatus:
    """Hook transformers now, or as soon as it is imported. Doing it again changes nothing but what it is told.

    Args:
        plain: whether calls that hold no pack are served too, where ours is faster than transformers' torch code. False
            leaves them to transformers; True serves them on a CPU, where that has been measured; a string names the
            devices, ``"cpu,cuda"`` for a GPU's as well. None is what the variable ``PACKFREE_PLAIN`` says in the same
            words (``0`` is False), or True; where the hooks are installed, what was said before.

    Returns:
        What :func:`hooks_status` returns.

    Raises:
        TypeError, ValueError: ``plain`` is none of these.
    """
    with _lock:
        if plain is not None or not patches.is_active():
            plain_calls.choose(plain)
        if internals.loaded():
            _install_now()
        else:
            _watch.start()
        if adapters.loaded() is None:
            _watch_peft.start()
        return hooks_status()


def remove_hooks() -> HooksStatus:
    """Take every replacement out of transformers again, so that it behaves as if this package had no hooks.

    Returns:
        What :func:`hooks_status` returns.
    """
    with _lock:
        _watch.stop()
        _watch_peft.stop()
        plain_calls.choose(False)
        if patches.is_active():
            patches.remove()
            delattr(internals.model_base(), _OWNER)
        return hooks_status()


def hooks_status() -> HooksStatus:
    """Which functions are hooked where, which models are refused, and what serves the calls; ``print`` it."""
    with _lock:
        hooked = {name: tuple(modules) for name, modules in patches.hooked_functions().items()}
        return HooksStatus(
            installed=patches.is_active(),
            reason=_why_not_installed(),
            functions={name: modules for name, modules in hooked.items() if functions.is_served(name)},
            not_served={name: modules for name, modules in hooked.items() if not functions.is_served(name)},
            plain=plain_calls.devices() if patches.is_active() else (),
            attention=guards.our_attention_names(),
            towers=guards.towers(),
            refused_models=dict(guards.refused_models()),
            transformers=internals.version(),
            checked_transformers=internals.CHECKED_TRANSFORMERS,
        )


def _why_not_installed() -> str:
    if patches.is_active():
        return ""
    if internals.loaded():
        holder = getattr(internals.model_base(), _OWNER, None)
        if holder is not None:
            return f"the hooks of another build are in place ({holder.partition('.')[0]})"
    if _watch.waiting:
        return "waiting for transformers to be imported"
    return "PACKFREE_HOOKS=0" if os.environ.get("PACKFREE_HOOKS") == "0" else "not asked for"


def _warn_of_fallbacks() -> None:
    """One line for what serves with less than it could, once each: after the import, and when the hooks come later."""
    status = hooks_status()
    news = [sentence for sentence in status.fallbacks if sentence not in _warned]
    _warned.update(news)
    if news:
        warnings.warn(
            f"packfree-kernels: {'; '.join(news)} ({status.variant}, CPU tier {status.cpu_tier}, hooks {status.state}; "
            "see hooks_status())",
            RuntimeWarning,
            stacklevel=2,
        )


def install_on_import() -> None:
    """What the package calls at the end of its own import."""
    if os.environ.get("PACKFREE_HOOKS") != "0":
        install_hooks()
    _warn_of_fallbacks()
