"""Our Triton kernels on CPU tensors: Triton's interpreter runs them in place of the compiled CPU kernels.

The public functions, their checks and their gradients are the ones that users call; only what the dispatcher finds for
the CPU is exchanged. The interpreter keeps bfloat16 as the integers of its bits, which some of its operations take for
numbers and others cut off instead of rounding; here they do what GPUs do.
"""

import importlib
import warnings
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

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


def _correct_bfloat16() -> None:
    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    of_one, of_two = InterpreterBuilder.unary_op, InterpreterBuilder.binary_op

    def create_dot(self, a, b, d, *options):
        return product(self, _decoded(a), _decoded(b), d, *options)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 and not _is_bfloat16(src):
            return _encoded(src.data.astype(np.float32))
        return cast(self, _decoded(src), dst_type)

    def unary_op(self, arg, op):
        return _encoded(op(_decoded(arg).data)) if _is_bfloat16(arg) else of_one(self, arg, op)

    def binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs, rhs):
            return of_two(self, lhs, rhs, op)
        result = of_two(self, _decoded(lhs), _decoded(rhs), op)
        return _encoded(result.data) if result.dtype.scalar == _FLOAT32 else result

    for function in (create_dot, cast_impl, unary_op, binary_op):
        setattr(InterpreterBuilder, function.__name__, function)


_correct_bfloat16()


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
