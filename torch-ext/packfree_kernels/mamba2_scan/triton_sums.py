"""Gradients of Mamba-2's parameters, summed over what each program of the backward pass has summed itself."""

from typing import Tuple

import triton
import triton.language as tl
from torch import Tensor

from .._triton.launch import launch

_TILE = 256


def sums_over_lanes(a: Tensor, b: Tensor, c: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """The sums of three fp32 ``[lanes, ...]`` over their first axis, in its order, in one launch."""
    sums = tuple(part.new_empty(part.shape[1:]) for part in (a, b, c))
    sizes = dict(zip(("A", "B", "C"), (total.numel() for total in sums)))
    launch(_sum_lanes, triton.cdiv(max(sizes.values()), _TILE), a, b, c, *sums, a.shape[0], **sizes, TILE=_TILE)
    return sums


@triton.jit(do_not_specialize=["lanes"])
def _sum_lanes(
    a, b, c, a_sum, b_sum, c_sum, lanes, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr
):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    _sum_columns(a, a_sum, place, lanes, A)
    _sum_columns(b, b_sum, place, lanes, B)
    _sum_columns(c, c_sum, place, lanes, C)


@triton.jit
def _sum_columns(parts, out, place, lanes, SIZE: tl.constexpr):
    total = tl.load(parts + place, place < SIZE, 0)
    for lane in range(1, lanes):
        total += tl.load(parts + lane * SIZE + place, place < SIZE, 0)
    tl.store(out + place, total, place < SIZE)
