"""Shapes of what ops return, for tracing: fake tensors, torch.compile and torch.export.

An op's arguments come by the names of its schema, which stands in bindings/<op>.cpp and nowhere in Python: an argument
more concerns only the shapes that depend on it.
"""

from types import SimpleNamespace
from typing import Any, Callable, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ._dtypes import accumulation_dtype
from ._ops import add_op_namespace_prefix, ops

# Makes the op's results, empty tensors, of its arguments, attributes by name.
Shapes = Callable[[Any], Any]


def returns(*names: str) -> Callable[[Shapes], Shapes]:
    """Register the decorated function as the shapes of the ops ``names``."""

    def register(shapes: Shapes) -> Shapes:
        for name in names:
            torch.library.register_fake(add_op_namespace_prefix(name))(_by_name(name, shapes))
        return shapes

    return register


def returns_gradients(name: str, wide: Sequence[str] = (), shapes: Mapping[str, Shapes] = {}) -> None:
    """Register op ``<name>_bwd``, whose result ``dx`` is like its argument x, and without elements where x is absent.

    Args:
        name: of the op without ``_bwd``.
        wide: inputs whose gradients come in the dtype in which sums are kept.
        shapes: of gradients that have another shape than their input, by its name.
    """
    results = [result.name[1:] for result in getattr(ops, f"{name}_bwd").default._schema.returns]

    def gradient(a: Any, name: str, first: Tensor) -> Tensor:
        value = getattr(a, name)
        dtype = accumulation_dtype(first) if name in wide else first.dtype if value is None else value.dtype
        shape = (0,) if value is None else shapes[name](a) if name in shapes else value.shape
        return first.new_empty(shape, dtype=dtype)

    @returns(f"{name}_bwd")
    def gradients(a: Any) -> Tuple[Tensor, ...]:
        first = next(iter(vars(a).values()))
        return tuple(gradient(a, name, first) for name in results)


def _by_name(name: str, shapes: Shapes) -> Callable[..., Any]:
    arguments = getattr(ops, name).default._schema.arguments

    def fake(*given: Any, **named: Any) -> Any:
        # The dispatcher leaves out trailing arguments that have their default value.
        values = {argument.name: argument.default_value for argument in arguments}
        values.update(zip(values, given))
        return shapes(SimpleNamespace(**{**values, **named}))

    return fake
