"""What the harness corrects in Triton's interpreter, and that unwritten memory shows in it."""

import pytest
import torch
import triton
import triton.language as tl

from tests.harness.triton import served_by_triton


@triton.jit
def _products(x, y, product, rounded, negative, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    left, right = tl.load(x + at), tl.load(y + at)
    sums = tl.dot(left, right)
    tl.store(product + at, sums)
    tl.store(rounded + at, sums.to(rounded.dtype.element_ty))
    tl.store(negative + at, -left * right)


def test_bfloat16_is_multiplied_in_full_and_rounded_to_nearest():
    x, y = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    product, rounded, negative = torch.empty(16, 16), torch.empty_like(x), torch.empty_like(x)
    _products[(1,)](x, y, product, rounded, negative, N=16)
    torch.testing.assert_close(product, x.float() @ y.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(rounded, product.bfloat16())
    assert torch.equal(negative, -x * y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_new_tensors_hold_nothing_that_passes_for_a_result(kernel, dtype):
    with served_by_triton(kernel):
        for new in (torch.empty(3, dtype=dtype), torch.zeros(3, dtype=dtype).new_empty((3,))):
            assert bool((new.isnan() if dtype.is_floating_point else new == torch.iinfo(dtype).max).all())
