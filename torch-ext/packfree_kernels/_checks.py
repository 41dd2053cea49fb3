"""Wording of argument errors: one form for the whole package, ``op: argument must ..., got ...``."""

from typing import Optional, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def value_error(op: str, argument: str, must: str, got: object) -> ValueError:
    return ValueError(f"{op}: {argument} must {must}, got {got}")


def type_error(op: str, argument: str, must: str, got: object) -> TypeError:
    return TypeError(f"{op}: {argument} must {must}, got {got}")


def check_tensor(op: str, argument: str, tensor: object, ndim: Optional[int] = None) -> None:
    """``tensor`` is a tensor, of ``ndim`` dimensions if given."""
    if not isinstance(tensor, Tensor):
        raise type_error(op, argument, "be a tensor", type(tensor).__name__)
    if ndim is not None and tensor.dim() != ndim:
        raise value_error(op, argument, f"have {ndim} dimensions", f"shape {tuple(tensor.shape)}")


def check_shape(op: str, argument: str, tensor: Tensor, shape: Sequence[int], letters: str) -> None:
    """``tensor`` has exactly ``shape``; ``letters`` names the axes, for example ``[T, H, K]``."""
    if tuple(tensor.shape) != tuple(shape):
        raise value_error(op, argument, f"have shape {letters} = {tuple(shape)}", tuple(tensor.shape))


def check_dtype(op: str, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).replace("torch.", "") for dtype in allowed)
        why = ": complex numbers are not served" if tensor.is_complex() else ""
        raise type_error(op, argument, f"have one of the dtypes {names}", str(tensor.dtype).replace("torch.", "") + why)


def check_served(op: str, argument: str, tensor: Tensor) -> None:
    """``tensor``, whose dtype is that of the arithmetic, is where a kernel serves it; float64 is for the CPU."""
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise value_error(op, argument, "be on a CPU or a GPU", tensor.device)
    if tensor.device.type == "cuda" and tensor.dtype == torch.float64:
        must = "be float32, bfloat16 or float16 on a GPU (float64 is for numerical checks on a CPU)"
        raise type_error(op, argument, must, "float64")


def check_same_device(op: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise value_error(op, argument, f"be on {device} like the first argument", tensor.device)
