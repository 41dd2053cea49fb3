"""Dtypes: which the functions take, in which a kernel sums, and how an error names one."""

from typing import Union

import torch
from torch import Tensor

# What a GPU takes, and what a CPU takes: float64 is for numerical checks.
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = FLOAT_DTYPES + (torch.float64,)
INTEGER_DTYPES = (torch.int32, torch.int64)


def accumulation_dtype(*of: Union[Tensor, torch.dtype]) -> torch.dtype:
    """What sums, states and parameters of tensors of these dtypes are kept in: float32, or float64 where one is."""
    widest = torch.float32
    for dtype in of:
        widest = torch.promote_types(dtype.dtype if isinstance(dtype, Tensor) else dtype, widest)
    return widest


def dtype_name(of: Union[Tensor, torch.dtype]) -> str:
    """``float32``, without the module."""
    return str(of.dtype if isinstance(of, Tensor) else of).replace("torch.", "")
