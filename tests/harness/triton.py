"""Our Triton kernels on CPU tensors: Triton's interpreter runs them in place of the compiled CPU kernels.

The public functions, their checks and their gradients are the ones that users call; only what the dispatcher finds for
the CPU is exchanged.
"""

import importlib
import warnings
from contextlib import contextmanager
from types import ModuleType

import torch

# In Triton 3.9's interpreter tl.dot of two bfloat16 tiles is wrong, so bf16 is for a GPU to show.
DTYPES = [torch.float32, torch.float16]


@contextmanager
def served_by_triton(kernel: ModuleType):
    """Ops that have a Triton implementation run it, also for CPU tensors."""
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    namespace, prefix = kernel._ops.add_op_namespace_prefix("").split("::")
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name in devices.TRITON:
                library.impl(f"{prefix}{name}", devices.triton_implementation(name), "CPU", allow_override=True)
        yield
    finally:
        library._destroy()
