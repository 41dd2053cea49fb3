"""What the harness corrects in Triton's interpreter, and that unwritten memory shows in it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.harness import properties
from tests.harness.ops import flash_attn_varlen
from tests.harness.packings import Pack
from tests.harness.triton import served_by_triton, stock_bfloat16


@triton.jit
def _products(x, y, product, rounded, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    sums = tl.dot(tl.load(x + at), tl.load(y + at))
    tl.store(product + at, sums)
    tl.store(rounded + at, sums.to(rounded.dtype.element_ty))


def products(x, y):
    product, rounded = torch.empty(x.shape), torch.empty_like(x)
    _products[(1,)](x, y, product, rounded, N=x.shape[0])
    return product, rounded


def test_bfloat16_is_multiplied_in_full_and_rounded_to_nearest():
    """Integers small enough for every sum to be exact in any order: the bits of the product are PyTorch's."""
    x, y = (torch.randint(-8, 9, (32, 32)).bfloat16() for _ in range(2))
    product, rounded = products(x, y)
    assert torch.equal(product, x.float() @ y.float()) and torch.equal(rounded, x @ y)
    x, y = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    product, rounded = products(x, y)
    torch.testing.assert_close(product, x.float() @ y.float(), rtol=1e-6, atol=1e-5)
    assert torch.equal(rounded, product.bfloat16())


@triton.jit
def _elementwise(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    results = (a + b, a - b, a * b, -a, tl.abs(a), tl.maximum(a, b), tl.minimum(a, b), tl.where(a < b, a, b), a * 2.5)
    results += (
        tl.fma(a, b, a),
        tl.clamp(a, -1.0, 0.5),
        a.to(tl.float16).to(tl.bfloat16),
        a.to(tl.int32).to(tl.bfloat16),
    )
    for j in tl.static_range(len(results)):
        tl.store(out + j * N + i, results[j].to(tl.bfloat16))


def test_bfloat16_is_computed_elementwise_as_by_pytorch():
    """Each operation rounds once, to nearest, and takes no bits for a number."""
    a, b = (4 * torch.randn(64)).bfloat16(), (4 * torch.randn(64)).bfloat16()
    out = torch.empty(13, 64, dtype=torch.bfloat16)
    _elementwise[(1,)](a, b, out, N=64)
    expected = [a + b, a - b, a * b, -a, a.abs(), torch.maximum(a, b), torch.minimum(a, b), torch.where(a < b, a, b)]
    expected += [a * 2.5, (a.double() * b.double() + a.double()).float().bfloat16(), a.clamp(-1, 0.5)]
    expected += [a.half().bfloat16(), a.int().bfloat16()]
    for name, got, right in zip(range(13), out, expected):
        assert torch.equal(got, right), name


@triton.jit
def _reductions(x, out, N: tl.constexpr, SUM: tl.constexpr):
    rows = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.max(rows, 0))
    if SUM:
        tl.store(out + 1, tl.sum(rows, 0))


def test_sums_of_bfloat16_are_refused():
    """What a GPU would make of one is not known here. A largest element is: it is exact."""
    x, out = torch.randn(64).bfloat16(), torch.empty(2)
    _reductions[(1,)](x, out, N=64, SUM=False)
    assert out[0] == x.max()
    with pytest.raises(InterpreterError, match="reduce in float32"):
        _reductions[(1,)](x, out, N=64, SUM=True)


def test_what_the_interpreter_itself_does_is_noticed(kernel):
    """Each of the tests above, and an op's comparison with its reference, fails without the correction."""
    op, pack = flash_attn_varlen.op_under_test(flash_attn_varlen.CASES[0]), Pack("", (3, 1))

    def against_reference():
        with served_by_triton(kernel):
            properties.check_against_reference(op, pack, torch.bfloat16)

    against_reference()
    tests = (
        test_bfloat16_is_multiplied_in_full_and_rounded_to_nearest,
        test_bfloat16_is_computed_elementwise_as_by_pytorch, against_reference,
    )  # fmt: skip
    with stock_bfloat16():
        for test in tests:
            with pytest.raises((AssertionError, RuntimeError)):
                test()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_new_tensors_hold_nothing_that_passes_for_a_result(kernel, dtype):
    with served_by_triton(kernel):
        for new in (torch.empty(3, dtype=dtype), torch.zeros(3, dtype=dtype).new_empty((3,))):
            assert bool((new.isnan() if dtype.is_floating_point else new == torch.iinfo(dtype).max).all())
