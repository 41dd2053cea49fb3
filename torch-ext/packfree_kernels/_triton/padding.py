"""Rows behind the last offset, set to 0 where a kernel that is not ours has left them unwritten."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, programs

_BLOCK = 1024


def clear_padding(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Set contiguous ``rows`` ``[T, ...]`` to 0 from token ``cu_seqlens[-1]`` on, in place; touches nothing else."""
    most = triton.cdiv(rows.numel(), _BLOCK)
    if most:
        size = rows.numel() // rows.shape[0]
        last = cu_seqlens.shape[0] - 1
        launch(_clear, programs(rows, most, 4), rows, cu_seqlens, last, rows.shape[0], size, BLOCK=_BLOCK)
    return rows


@triton.jit(do_not_specialize=["last", "tokens"])
def _clear(rows, cu_seqlens, last, tokens, size, BLOCK: tl.constexpr):
    begin = tl.load(cu_seqlens + last).to(tl.int64) * size
    end = tokens.to(tl.int64) * size
    for first in range(begin + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(rows + place, tl.zeros((BLOCK,), rows.dtype.element_ty), place < end)
