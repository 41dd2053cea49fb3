"""CUDA tensors without a GPU: shapes, dtypes and devices, and no values, so that whoever reads one is caught."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_GUARD = Path(__file__).resolve().parent.parent / "cpp" / "fake_cuda_guard.cpp"


@functools.lru_cache(maxsize=None)
def _allow_indexing() -> None:
    """Teach a torch without CUDA that a CUDA tensor's device may be made current, which indexing asks for."""
    if torch.version.cuda is not None:
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "guard.so")
        paths = [f"-I{root / 'include'}", str(_GUARD), f"-L{root / 'lib'}", "-lc10"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *paths, "-o", library], check=True)
        ctypes.CDLL(library)


@contextmanager
def fake_cuda():
    """New tensors have no values; ``device="cuda"`` works. Reading a value raises DataDependentOutputException."""
    _allow_indexing()
    with FakeTensorMode():
        yield


def fake(value: Any, device: str = "cuda") -> Any:
    """A tensor like ``value`` without values, a leaf; what is no tensor stays as it is. Inside :func:`fake_cuda`."""
    if not isinstance(value, Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return like.requires_grad_(value.requires_grad)


@contextmanager
def cuda_is_served(kernel: ModuleType):
    """The hooks take CUDA tensors, as in a CUDA variant."""
    import importlib

    functions = importlib.import_module(f"{kernel.__name__}.hooks.functions")
    before, functions.SUPPORTED_DEVICES = functions.SUPPORTED_DEVICES, ("cpu", "cuda")
    try:
        yield
    finally:
        functions.SUPPORTED_DEVICES = before


def read_no_values(kernel: ModuleType, monkeypatch: Any) -> None:
    """CPU tensors are treated as a GPU's: no boundary value is read that would be waited for there."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == kernel.__name__ and hasattr(module, "reads_values"):
            monkeypatch.setattr(module, "reads_values", lambda tensor: False)
