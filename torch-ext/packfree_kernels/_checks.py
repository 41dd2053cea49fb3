"""Wording of argument errors: one form for the whole package, ``op: argument must ..., got ...``."""

import functools
import inspect
import numbers
from typing import (
    Any,
    Callable,
    Dict,
    NamedTuple,
    Optional,
    Sequence,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from ._dtypes import FLOAT_DTYPES, dtype_name


def value_error(op: str, argument: str, must: str, got: object) -> ValueError:
    return ValueError(f"{op}: {argument} must {must}, got {got}")


def type_error(op: str, argument: str, must: str, got: object) -> TypeError:
    return TypeError(f"{op}: {argument} must {must}, got {got}")


def check_tensor(op: str, argument: str, tensor: object, ndim: Optional[int] = None) -> None:
    """``tensor`` is a tensor, of ``ndim`` dimensions if given."""
    if not isinstance(tensor, Tensor):
        raise type_error(op, argument, "be a tensor", type(tensor).__name__)
    if ndim is not None and tensor.dim() != ndim:
        raise value_error(op, argument, f"have {ndim} dimensions", f"shape {tuple(tensor.shape)}")


def check_shape(op: str, argument: str, tensor: Tensor, shape: Sequence[int], letters: str) -> None:
    """``tensor`` has exactly ``shape``; ``letters`` names the axes, for example ``[T, H, K]``."""
    if tuple(tensor.shape) != tuple(shape):
        raise value_error(op, argument, f"have shape {letters} = {tuple(shape)}", tuple(tensor.shape))


def check_dtype(op: str, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(map(dtype_name, allowed))
        why = ": complex numbers are not served" if tensor.is_complex() else ""
        raise type_error(op, argument, f"have one of the dtypes {names}", dtype_name(tensor) + why)


def check_served(op: str, argument: str, tensor: Tensor) -> None:
    """``tensor``, whose dtype is that of the arithmetic, is where a kernel serves it; float64 is for the CPU."""
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise value_error(op, argument, "be on a CPU or a GPU", tensor.device)
    if tensor.device.type == "cuda" and tensor.dtype == torch.float64:
        must = "be float32, bfloat16 or float16 on a GPU (float64 is for numerical checks on a CPU)"
        raise type_error(op, argument, must, "float64")


def check_same_device(op: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise value_error(op, argument, f"be on {device} like the first argument", tensor.device)


# ---- kinds of arguments, as their annotations tell ----

Function = TypeVar("Function", bound=Callable[..., Any])


class _Kind(NamedTuple):
    """``holds`` for what an argument may be, in words what it ``must`` be, and what else is wrong with such a value."""

    holds: Callable[[Any], bool]
    must: str
    is_number: bool = False


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_flag(value: object) -> bool:
    # None and 0 mean False and 1 means True, as callers of upstream write; NumPy's own kind is no bool.
    if isinstance(value, (bool, int)):
        return value in (0, 1)
    return value is None or isinstance(value, torch.SymBool) or type(value).__name__ in ("bool", "bool_")


def is_integer(value: object) -> bool:
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _is_pair_of_numbers(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value))


_KINDS: Dict[Any, _Kind] = {
    Tensor: _Kind(_is_tensor, "be a tensor"),
    bool: _Kind(_is_flag, "be True or False"),
    int: _Kind(is_integer, "be an int"),
    float: _Kind(_is_number, "be a number", is_number=True),
    torch.dtype: _Kind(lambda value: isinstance(value, torch.dtype), "be a dtype"),
    tuple: _Kind(_is_pair_of_numbers, "be a pair of numbers"),
}


def _kind_of(annotation: Any) -> Optional[_Kind]:
    """The kind that an annotation means, or None where the function looks for itself."""
    parts = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    known = [_KINDS.get(get_origin(part) or part) for part in parts if part is not type(None)]
    if None in known:
        return None
    optional, (holds, *others) = len(known) < len(parts), [kind.holds for kind in known]
    return _Kind(
        lambda value: (optional and value is None) or holds(value) or any(other(value) for other in others),
        " or ".join(kind.must for kind in known).replace(" or be ", " or ") + (" or None" if optional else ""),
        any(kind.is_number for kind in known),
    )


def with_checked_kinds(function: Function) -> Function:
    """``function``, which begins with an error by name for an argument that is none of what its annotation says.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a number is NaN.
    """
    op, names = function.__name__, tuple(inspect.signature(function).parameters)
    found = {name: _kind_of(annotation) for name, annotation in get_type_hints(function).items() if name in names}
    kinds = {name: kind for name, kind in found.items() if kind is not None}

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        for name, value in zip(names, arguments):
            if name in kinds:
                _check_kind(op, name, kinds[name], value)
        for name, value in named.items():
            if name in kinds:
                _check_kind(op, name, kinds[name], value)
        return function(*arguments, **named)

    return checked


def _check_kind(op: str, name: str, kind: _Kind, value: object) -> None:
    if not kind.holds(value):
        plain = isinstance(value, (str, bool, int, float, complex, tuple, list, type(None)))
        raise type_error(op, name, kind.must, repr(value)[:80] if plain else type(value).__name__)
    # By a comparison, which torch.compile can trace for a number that is an input of the graph; math.isnan it cannot.
    if kind.is_number and isinstance(value, float) and value != value:
        raise value_error(op, name, kind.must, value)
