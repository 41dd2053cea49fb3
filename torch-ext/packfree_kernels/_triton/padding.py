"""Rows behind the last offset, set to 0 where the kernels that made the others leave them unwritten."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, programs

_BLOCK = 1024
# Tensors that one launch clears.
_MOST = 6


def clear_padding(cu_seqlens: Tensor, *tensors: Tensor) -> None:
    """Set contiguous ``tensors`` ``[T, ...]`` to 0 from token ``cu_seqlens[-1]`` on, in place; touches nothing else.

    At most six of them, in one launch. A pack without padding costs a look at the last offset.
    """
    given = [tensor for tensor in tensors if tensor.numel()]
    if not given:
        return
    most = triton.cdiv(max(tensor.numel() for tensor in given), _BLOCK)
    sizes = [tensor.numel() // tensor.shape[0] for tensor in given]
    absent = _MOST - len(given)
    launch(
        _clear, programs(given[0], most, 4), *given, *[None] * absent, cu_seqlens, cu_seqlens.shape[0] - 1,
        given[0].shape[0], *sizes, *[0] * absent, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["last", "tokens"])
def _clear(
    a, b, c, d, e, f, cu_seqlens, last, tokens, a_size, b_size, c_size, d_size, e_size, f_size, BLOCK: tl.constexpr
):
    first = tl.load(cu_seqlens + last).to(tl.int64)
    _clear_rows(a, first, tokens, a_size, BLOCK)
    if b is not None:
        _clear_rows(b, first, tokens, b_size, BLOCK)
    if c is not None:
        _clear_rows(c, first, tokens, c_size, BLOCK)
    if d is not None:
        _clear_rows(d, first, tokens, d_size, BLOCK)
    if e is not None:
        _clear_rows(e, first, tokens, e_size, BLOCK)
    if f is not None:
        _clear_rows(f, first, tokens, f_size, BLOCK)


@triton.jit
def _clear_rows(rows, first, tokens, size, BLOCK: tl.constexpr):
    end = tokens.to(tl.int64) * size
    for begin in range(first * size + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        tl.store(rows + place, tl.zeros((BLOCK,), rows.dtype.element_ty), place < end)
