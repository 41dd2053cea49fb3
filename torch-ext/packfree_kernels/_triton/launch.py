"""The one place that starts a Triton kernel, and what it knows of the GPU.

Every kernel runs on a line of programs, each of which strides over a list of work whose length only the device knows:
no launch waits for a value, and no grid has a second dimension to overflow. Tiles, warps and stages are chosen by
shape, dtype and :func:`target`, never by a timing, so that a call's bits do not depend on what ran before it.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``, as Triton names them.
        arch: compute capability times ten (``90``), or the name of an AMD architecture (``"gfx942"``).
        multiprocessors: number of SMs or compute units.
        shared_memory: bytes that one block of threads may use.
    """

    backend: str
    arch: Any
    multiprocessors: int
    shared_memory: int


# What one block may use: CUDA C++ Programming Guide, table of technical specifications; CDNA3 ISA, LDS size.
SM80 = Target("cuda", 80, 108, 163 * 1024)
SM90 = Target("cuda", 90, 132, 227 * 1024)
SM100 = Target("cuda", 100, 148, 227 * 1024)
GFX942 = Target("hip", "gfx942", 304, 64 * 1024)
TARGETS = (SM80, SM90, SM100, GFX942)

# What a product sums over is no shorter: Triton before 3.8 refuses less. The table of Triton kernels looks at them all.
SHORTEST = 16

# From this many rows on, products take operands from shared memory on Hopper and sum in tensor memory on Blackwell.
ROWS_OF_A_WARPGROUP = 64

# Where no GPU decides, as in Triton's interpreter: few programs, so that each strides over several items of work.
_INTERPRETER = Target("cuda", 80, 3, SM80.shared_memory)


@dataclass(frozen=True)
class Launch:
    """A launch as it was asked for; see :func:`recorded`."""

    kernel: Any
    programs: int
    arguments: Tuple[Any, ...]
    constants: Dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass
class _Recorder:
    target: Target
    launches: List[Launch]


_recorder: Optional[_Recorder] = None


@contextmanager
def recorded(target_: Target) -> Iterator[List[Launch]]:
    """Collect launches for ``target_`` instead of starting them, for example those of a call on fake tensors."""
    global _recorder
    before, _recorder = _recorder, _Recorder(target_, [])
    try:
        yield _recorder.launches
    finally:
        _recorder = before


def target(tensor: Tensor) -> Target:
    """The kind of GPU that ``tensor`` lies on."""
    if _recorder is not None:
        return _recorder.target
    if tensor.device.type != "cuda":
        return _INTERPRETER
    device = torch.cuda.get_device_properties(tensor.device)
    if torch.version.hip:
        arch = device.gcnArchName.split(":")[0]
        return Target("hip", arch, device.multi_processor_count, device.shared_memory_per_block)
    arch = 10 * device.major + device.minor
    return Target("cuda", arch, device.multi_processor_count, device.shared_memory_per_block_optin)


def programs(tensor: Tensor, most: int, per_multiprocessor: int = 1) -> int:
    """How many programs to start for at most ``most`` items of work, ``per_multiprocessor`` at a time."""
    return min(most, target(tensor).multiprocessors * per_multiprocessor)


def padded(size: int) -> int:
    """An axis of ``size`` as ``tl.dot`` takes it: a power of two, :data:`SHORTEST` or more."""
    return max(SHORTEST, 1 << (size - 1).bit_length())


def walked_rows(tensor: Tensor, most: int) -> int:
    """Rows of a tile, at most ``most``, that products change from round to round of a loop.

    On Blackwell too few for products in tensor memory, where Triton before 3.9 lets rounds overtake one another and
    adds two products to one accumulator in the wrong order (its issues 9871, 10590 and 10821).
    """
    gpu = target(tensor)
    is_blackwell = gpu.backend == "cuda" and gpu.arch >= 100
    return min(most, ROWS_OF_A_WARPGROUP // 2) if is_blackwell else most


def dot_precision(tensor: Tensor) -> str:
    """``input_precision`` of ``tl.dot`` on operands made of ``tensor``: fp32 in full, unless torch may use TF32."""
    wants_full = tensor.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if wants_full or target(tensor).backend == "hip" else "tf32"


def launch(kernel: Any, count: int, *arguments: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any) -> None:
    """Start ``count`` programs of ``kernel`` on the device of its first tensor.

    ``arguments`` are given by position, ``constants`` (``tl.constexpr``) by name. Absent tensors may be None.
    """
    if count == 0:
        return
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, count, arguments, constants, num_warps, num_stages))
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(count,)](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)
