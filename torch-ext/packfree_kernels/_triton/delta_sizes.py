"""What a call of a delta rule is made of on the host: sizes, lists of work, tiles, and operands with their factors."""

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
import triton
from torch import Tensor

from .._checks import type_error
from .launch import padded, programs, target, walked_rows
from .work import Blocks, cut_into_blocks, longest_first

# Tokens of a chunk; the note in delta.py tells why not more.
CHUNK = 32


def precision(tensor: Tensor) -> str:
    """``input_precision`` of every product. All operands are fp32, whatever the dtype of q, k and v.

    Three TF32 products keep 22 bits of each factor; plain fp32 products have no tensor cores on NVIDIA GPUs, and tiles
    of this size do not fit their registers.
    """
    if target(tensor).backend == "hip":
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def serves(op: str, *tensors: Tensor) -> Tuple[Tensor, ...]:
    """``tensors`` as the kernels of ``op`` read them: last axis dense, a chunk of tokens within 32-bit offsets.

    Raises:
        TypeError: they are float64.
    """
    if tensors[0].dtype == torch.float64:
        raise type_error(op, "q", "be float32, bfloat16 or float16 on a GPU", "float64; call q.float()")
    return tuple(x if x.stride(-1) == 1 and x.stride(0) < 2**24 else x.contiguous() for x in tensors)


def dense(*tensors: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


@dataclass(frozen=True)
class Sizes:
    """Sizes and lists of work of one call."""

    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    blocks: Blocks
    order: Tensor
    sequences: Tensor
    precision: str

    @staticmethod
    def of(q: Tensor, v: Tensor, cu_seqlens: Tensor) -> "Sizes":
        tokens, key_heads, key_dim = q.shape
        value_heads, value_dim = v.shape[1:]
        chunk = CHUNK if key_dim <= 128 else CHUNK // 2
        blocks = cut_into_blocks(cu_seqlens, tokens, chunk)
        order, sequences = longest_first(cu_seqlens)
        sizes = tokens, key_heads, value_heads, key_dim, value_dim
        return Sizes(*sizes, chunk, blocks, order, sequences, precision(q))

    @property
    def constants(self) -> Dict[str, Any]:
        """What every kernel takes by name."""
        return dict(
            HV=self.value_heads, K=self.key_dim, V=self.value_dim, C=self.chunk, BK=min(32, padded(self.key_dim)),
            PRECISION=self.precision,
        )  # fmt: skip

    @property
    def state_shape(self) -> Tuple[int, int, int, int]:
        """Of one state a sequence."""
        return self.order.shape[0], self.value_heads, self.key_dim, self.value_dim

    @property
    def is_tight(self) -> bool:
        """Whether products take their operands from registers, as before Hopper."""
        to = target(self.order)
        return to.backend == "cuda" and to.arch < 90

    @property
    def walk_columns(self) -> int:
        """Columns of a state that one program walks with: half as many of long ones, which fill the registers."""
        return 8 if self.key_dim > 128 else 16

    def _walk_constants(self, rows: int) -> Dict[str, Any]:
        """The same for kernels that hold a state in registers, in tiles of ``rows``; of long columns in smaller ones.

        With few columns those are also too small for products of tiles in shared memory (see __init__.py).
        """
        rows = 32 if self.key_dim > 128 else walked_rows(self.order, rows)
        return dict(
            self.constants, BK=min(rows, padded(self.key_dim)), BV=self.walk_columns, num_warps=8, num_stages=1
        )  # fmt: skip

    @property
    def walk_constants(self) -> Dict[str, Any]:
        return self._walk_constants(128)

    @property
    def walk_back_constants(self) -> Dict[str, Any]:
        """Two kinds of rows go by: smaller tiles where their products take operands from registers, before Hopper."""
        return self._walk_constants(32 if self.is_tight else 128)

    def walk_programs(self, tensor: Tensor) -> int:
        """As many as run at the same time: one that had to wait for another would hold back long sequences."""
        return programs(tensor, self.order.shape[0] * self.value_heads * triton.cdiv(self.value_dim, self.walk_columns))

    def chunk_programs(self, tensor: Tensor, heads: int, columns: int = 1) -> int:
        return programs(tensor, self.blocks.most * heads * columns, 2)

    def states(self, like: Tensor) -> Tensor:
        """Room for the state before every chunk that is not its sequence's first, fp32 ``[slots, HV, K, V]``.

        Such a chunk starts at least a chunk behind any other such one, whatever the boundaries: the chunk that starts
        at token t has slot t // C, and the room does not grow with the number of sequences.
        """
        return like.new_empty((self.tokens // self.chunk + 1, *self.state_shape[1:]), dtype=torch.float32)


@dataclass(frozen=True)
class Rows:
    """Rows ``[T, heads, K]``, each times a factor ``[T, HV]`` if there is one.

    Attributes:
        rows: dense last axis, any strides.
        factors: fp32, or None for 1.
        group: value heads that read one head of ``rows``.
    """

    rows: Tensor
    factors: Optional[Tensor]
    group: int

    @property
    def arguments(self) -> Tuple[Any, ...]:
        return self.rows, self.factors, self.rows.stride(0), self.rows.stride(1)


@dataclass(frozen=True)
class Prepared:
    """What the chunks of both rules are made of, each chunk by itself. Letters of the ops' README.md.

    Attributes:
        q_start: rows of q, decayed from the start of their chunk.
        k_start: rows of k, decayed from the start of their chunk.
        k_end: rows of k, decayed to the end of their chunk.
        over: fp32 ``[T, HV]`` or ``[T, HV, K]``, set at the first token of each chunk: the decay over all of it.
        read: fp32 ``[T, HV, C]``, the rows of P.
        mix: fp32 ``[T, HV, C]``, the rows of M.
        solve: fp32 ``[T, HV, C]``, the rows of (I + M B)^-1, which give the corrections at beta = 1.
        q_factor, k_factor: fp32 ``[T, H]``, what normalises and scales the rows of q and k.
        solve_back: fp32 ``[T, HV, C]``, the rows of (I + B M)^-1, for the backward pass.
    """

    q_start: Rows
    k_start: Rows
    k_end: Rows
    over: Tensor
    read: Tensor
    mix: Tensor
    solve: Tensor
    q_factor: Tensor
    k_factor: Tensor
    solve_back: Optional[Tensor]


def states_or(states: Optional[Tensor], shape: Tuple[int, ...], like: Tensor) -> Tensor:
    """A copy of ``states``, or zeros: what a sequence without tokens leaves behind."""
    if states is not None:
        return states.clone(memory_format=torch.contiguous_format)
    return like.new_zeros(shape, dtype=torch.float32)
