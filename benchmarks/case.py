"""What a measurement is of: one op on one shape, its lengths, and the work in it. Needs nothing but torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of each sequence; every pack has 4,096. The first is a draw from a log-normal distribution, as texts are.
LENGTHS = {
    "documents": (216, 263, 480, 234, 913, 64, 326, 86, 244, 197, 196, 38, 276, 450, 113),
    "one long": (4096,),
    "many short": (16,) * 256,
    "mixed": (2048,) + (16,) * 128,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest allowed |ours - truth| / max|truth|, of outputs and of every gradient. bf16 rounds to 1/256 at the end alone.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
CHUNK = 64


@dataclass(frozen=True)
class Work:
    """One op on one shape; ``forward_work`` and ``both_work`` count flops or bytes, as ``limit`` says.

    Attributes:
        op: name of the public function.
        shape: of the layer, for people.
        tensors: inputs that all functions take, in order; those that require gradients are checked and measured.
        ours: this package's function of them.
        limit: what bounds it: ``fp32``, ``bf16`` (flops) or ``copy`` (bytes).
        forward_work: flops or bytes of the forward.
        both_work: of forward and backward; 0 where there is no backward to measure.
    """

    op: str
    shape: str
    tensors: tuple[Tensor, ...]
    ours: Callable[..., object]
    limit: str
    forward_work: float
    both_work: float


@dataclass(frozen=True)
class Case(Work):
    """What is measured on a CPU. ``ours``, ``alone`` and ``stock_pack`` return a tensor, or output and new state.

    Attributes:
        dtype: key of ``DTYPES``.
        distribution: key of ``LENGTHS``, or the batch of a decoding step.
        lengths: tokens of each sequence.
        alone, stock_pack: see ``cases.py``; the last may be None.
        exact: dtype in which ``alone`` gives the truth: fp64, or fp32 where the stock function computes in that only.
    """

    dtype: str
    distribution: str
    lengths: tuple[int, ...]
    alone: Callable[..., object]
    stock_pack: Callable[..., object] | None
    exact: torch.dtype

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "forward+backward") if self.both_work else ("forward",)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def samples(tensors: tuple[Tensor, ...], lengths: tuple[int, ...], dim: int) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of each sequence, cut along ``dim``.

    By ``split``, whose backward joins the gradients once; the backward of a slice fills a tensor as long as the pack,
    which would make the peers several times slower on many short sequences.
    """
    return zip(*(tensor.split(lengths, dim) for tensor in tensors))


def leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).requires_grad_()
