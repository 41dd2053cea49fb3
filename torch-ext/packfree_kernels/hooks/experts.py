"""Mixtures of experts whose backward pass torch.compile can trace in every dtype.

transformers computes experts by a grouped matrix product. Compiled, and in any dtype but bfloat16, that is its own
operator, whose backward formula walks through the experts' token counts in Python: a trace, which has no values, fails
there, so such a model trains compiled in bfloat16 only. Here the same formula becomes one opaque operator.
"""

import functools
from types import SimpleNamespace
from typing import Any, Callable, Tuple

import torch
from torch import Tensor

from . import internals
from .undo import UndoList


def make_traceable(undo: UndoList) -> None:
    """Put the opaque formula in place of transformers' once its module is loaded."""
    definition, stock = internals.grouped_product()
    if definition is not None and definition._backward_fn is stock:
        undo.replace(definition, "_backward_fn", _traceable(stock))


@functools.lru_cache(maxsize=None)
def _traceable(stock: Callable) -> Callable:
    from .._ops import add_op_namespace_prefix

    @torch.library.custom_op(
        add_op_namespace_prefix("grouped_product_bwd"),
        mutates_args=(),
        schema="(Tensor dout, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
    )
    def grouped_product_bwd(dout: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tuple[Tensor, Tensor]:
        # The formula reads its context and nothing else.
        dx, dweight, _ = stock(SimpleNamespace(saved_tensors=(x, weight), offs=ends), dout)
        return dx, dweight

    @grouped_product_bwd.register_fake
    def _(dout: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight)

    def backward(ctx: Any, dout: Tensor) -> Tuple[Tensor, Tensor, None]:
        return (*grouped_product_bwd(dout, *ctx.saved_tensors, ctx.offs), None)

    return backward
