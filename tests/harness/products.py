"""Matrix products with one order of summation, in place of PyTorch's.

PyTorch's products belong to a BLAS that may round by the number of rows and threads, differently on every CPU. With
these in their place, a function that calls ``F.linear`` shows the bits of everything else it does.
"""

from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [K, N]``, summed over K from first to last: elementwise operations round the same everywhere."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[k]
    return total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _product(dout, weight), _product(dout.t(), x)


def fixed_order_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``F.linear``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]``, in float64 inside."""
    rows = _Linear.apply(x.reshape(-1, x.shape[-1]).double(), weight.double())
    out = rows.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


@contextmanager
def fixed_order_products() -> Iterator[None]:
    """``F.linear`` is :func:`fixed_order_linear` inside."""
    stock = F.linear
    F.linear = fixed_order_linear
    try:
        yield
    finally:
        F.linear = stock
