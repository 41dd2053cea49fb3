"""Our Triton kernels on CPU tensors: Triton's interpreter runs them in place of the compiled CPU kernels.

The public functions, their checks and their gradients are the ones that users call; only what the dispatcher finds for
the CPU is exchanged. The interpreter keeps bfloat16 as the integers of its bits, which some of its operations take for
numbers and others cut off instead of rounding; here they do what GPUs do.
"""

import importlib
import warnings
from contextlib import contextmanager
from types import ModuleType
from typing import Callable, Dict, Iterator

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

_FLOAT32 = tl.float32


def _is_bfloat16(*handles: TensorHandle) -> bool:
    return any(handle.dtype.scalar == tl.bfloat16 for handle in handles)


def _decoded(handle: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), _FLOAT32)


def _encoded(data: np.ndarray) -> TensorHandle:
    """To nearest, and of two that are equally near to the even one."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(data), (bits >> 16) | 0x40, rounded).astype(np.uint16), tl.bfloat16)


def _corrected() -> Dict[str, Callable]:
    """The interpreter's operations as they should be on bfloat16: decoded, computed in float32, rounded once.

    Those that move or compare bits, or pick among them, are right as they are.
    """
    stock = {name: getattr(InterpreterBuilder, name) for name in _WRONG_ON_BFLOAT16}

    def create_dot(self, a, b, d, *options):
        return stock["create_dot"](self, _decoded(a), _decoded(b), d, *options)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 and not _is_bfloat16(src):
            return _encoded(src.data.astype(np.float32))
        return stock["cast_impl"](self, _decoded(src), dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if not _is_bfloat16(src) and dst_type.scalar != tl.bfloat16:
            return stock["create_fp_to_fp"](self, src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs, rhs):
            return stock["binary_op"](self, lhs, rhs, op)
        result = stock["binary_op"](self, _decoded(lhs), _decoded(rhs), op)
        return _encoded(result.data) if result.dtype.scalar == _FLOAT32 else result

    def rounded(name):
        def compute(self, *arguments):
            if not any(isinstance(x, TensorHandle) and _is_bfloat16(x) for x in arguments):
                return stock[name](self, *arguments)
            handles = [_decoded(x) if isinstance(x, TensorHandle) else x for x in arguments]
            return _encoded(stock[name](self, *handles).data)

        return compute

    names = ("unary_op", "create_fma", "create_clampf", "create_erf", "create_rsqrt")
    corrected = {name: rounded(name) for name in names}
    for function in (create_dot, cast_impl, create_fp_to_fp, binary_op):
        corrected[function.__name__] = function
    return corrected


_WRONG_ON_BFLOAT16 = (
    "create_dot", "cast_impl", "create_fp_to_fp", "unary_op", "binary_op", "create_fma", "create_clampf", "create_erf",
    "create_rsqrt",
)  # fmt: skip


def _replace(functions: Dict[str, Callable]) -> Dict[str, Callable]:
    """Put ``functions`` into the interpreter; returns what they stand in for."""
    before = {name: getattr(InterpreterBuilder, name) for name in functions}
    for name, function in functions.items():
        setattr(InterpreterBuilder, name, function)
    return before


_STOCK = _replace(_corrected())
# Older releases do not make a constant of that dtype at all.
if not hasattr(InterpreterBuilder, "get_bf16"):
    InterpreterBuilder.get_bf16 = lambda self, value: _encoded(np.array([value], dtype=np.float32))


def _refuse_bfloat16(stock: Callable) -> Callable:
    """A GPU rounds each step of such a sum, in an order of its own; a kernel that sums does so in float32."""

    def apply(self, input):
        given = input if isinstance(input, tuple) else (input,)
        if any(_is_bfloat16(tensor.handle) for tensor in given):
            raise NotImplementedError("a reduction or scan of bfloat16 in the interpreter: reduce in float32")
        return stock(self, input)

    return apply


ReduceScanOpInterface.apply = _refuse_bfloat16(ReduceScanOpInterface.apply)


@contextmanager
def stock_bfloat16() -> Iterator[None]:
    """The interpreter's own bfloat16, for the tests that must notice it."""
    corrected = _replace(_STOCK)
    try:
        yield
    finally:
        _replace(corrected)


@contextmanager
def served_by_triton(kernel: ModuleType):
    """Ops that have a Triton implementation run it, also for CPU tensors.

    What a kernel has not written is NaN, or the largest integer: deterministic mode fills every new tensor.
    """
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    namespace, prefix = kernel._ops.add_op_namespace_prefix("").split("::")
    library = torch.library.Library(namespace, "IMPL")
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name in devices.TRITON:
                library.impl(f"{prefix}{name}", devices.triton_implementation(name), "CPU", allow_override=True)
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        library._destroy()
