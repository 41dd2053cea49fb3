"""What the attention kernels share: which keys a query sees, rows of a tile, scores, dropout. As in the CPU's columns.

A tile's rows are token after token and, inside a token, the heads that share a key/value head (up to BM of them): so
keys are read once for all of them, little of a tile lies above a causal diagonal, and one new token fills a tile.
"""

import math
from dataclasses import dataclass
from typing import Dict, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SM80, Target

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Call:
    """Numbers that a call's kernels take, made of its arguments.

    A product ``q . k`` becomes a score in units of log2: ``outer * q . k``, or with softcap
    ``outer * tanh(inner * q . k)``; the scale stays out of q because there it would cost q a rounding.
    """

    inner: float
    outer: float
    left: int
    right: int
    threshold: int
    keep_scale: float

    @staticmethod
    def of(
        q: Tensor, k: Tensor, dropout_p: float, softmax_scale: float, left: int, right: int, softcap: float
    ) -> "Call":
        # A window this wide hides nothing, and its sums with positions stay in 32 bits.
        widest = max(q.shape[0], k.shape[0])
        return Call(
            inner=softmax_scale / softcap if softcap > 0 else 0.0,
            outer=(softcap if softcap > 0 else softmax_scale) * math.log2(math.e),
            left=widest if left < 0 else min(left, widest),
            right=widest if right < 0 else min(right, widest),
            threshold=int(dropout_p * 2**32),
            keep_scale=1 / (1 - dropout_p),
        )


@dataclass(frozen=True)
class Rows:
    """How a tile of ``BM`` rows is laid over tokens and heads: ``G`` heads a token, ``CHUNKS`` tiles for a token's."""

    BM: int
    GROUP: int

    @property
    def G(self) -> int:
        return min(self.GROUP, self.BM)

    @property
    def tokens(self) -> int:
        return self.BM // self.G

    @property
    def chunks(self) -> int:
        return -(-self.GROUP // self.G)

    @property
    def constants(self) -> Dict[str, int]:
        return dict(BM=self.BM, GROUP=self.GROUP, G=self.G, CHUNKS=self.chunks)


def tile(rows: int, keys: int, num_warps: int, num_stages: int) -> Dict[str, int]:
    return dict(BM=rows, BN=keys, num_warps=num_warps, num_stages=num_stages)


def is_roomy(on: Target) -> bool:
    """A GPU whose blocks of threads may use the shared memory of an A100 or more."""
    return on.backend == "cuda" and on.shared_memory >= SM80.shared_memory


def contiguous_rows(tensor: Tensor) -> Tensor:
    """``[T, H, K]`` with a contiguous last axis, copied only if it is not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def dropout_seed(seed: Optional[Tensor], dropout_p: float) -> Optional[Tensor]:
    """The seed if a kernel is to read it. It was drawn on the tensors' device: nothing is copied there in a call."""
    return seed if dropout_p > 0 else None


def check_served(op: str, q: Tensor, v: Tensor) -> None:
    """What no GPU kernel serves.

    Raises:
        TypeError: float64.
        ValueError: a head dim above 256.
    """
    if q.dtype == torch.float64:
        raise TypeError(f"{op}: q must have one of the dtypes float32, bfloat16, float16 on a GPU, got float64; "
                        "float64 is for numerical checks on the CPU")  # fmt: skip
    for name, dim in (("q and k", q.shape[2]), ("v", v.shape[2])):
        if dim > 256:
            raise ValueError(f"{op}: head_dim of {name} must lie in 1 .. 256 on a GPU, got {dim}")


@triton.jit
def visible_keys(i, query_length, key_length, left, right):
    """Half-open range of the keys that query ``i`` of a sequence sees; the last query is aligned with the last key."""
    aligned = i + key_length - query_length
    begin = tl.minimum(tl.maximum(aligned - left, 0), key_length)
    end = tl.minimum(tl.maximum(aligned + right + 1, begin), key_length)
    return begin, end


@triton.jit
def listed_keys(ranges, token, seen, key_length):
    """The same by the list ``ranges`` of first and last keys, for the queries at row ``token`` of it; 0, 0 for none."""
    begin = tl.maximum(tl.load(ranges + 2 * token, seen, 0), 0)
    # The last key is cut before 1 is added: it may be the largest number there is.
    end = tl.minimum(tl.load(ranges + 2 * token + 1, seen, -1), key_length - 1) + 1
    nothing = begin >= end
    return tl.where(nothing, 0, begin), tl.where(nothing, 0, end)


@triton.jit
def key_blocks(
    ranges, begin, end, here, part, query_length, key_length, left, right, TOKENS: tl.constexpr, BN: tl.constexpr
):
    """Blocks of keys that some row of a tile sees, [low, high), and in the middle of them those that every row sees
    whole, [whole, whole_end); both are ``high`` where there is none of these."""
    if ranges is not None:
        low = tl.min(tl.where(here & (begin < end), begin, key_length))
        high = tl.max(tl.where(here, end, 0))
        low = tl.minimum(low, high)
        all_begin = tl.max(tl.where(here, begin, 0))
        all_end = tl.min(tl.where(here, end, key_length))
    else:
        low, all_end = visible_keys(part * TOKENS, query_length, key_length, left, right)
        last = tl.minimum((part + 1) * TOKENS, query_length) - 1
        all_begin, high = visible_keys(last, query_length, key_length, left, right)
    low, high = low // BN, tl.cdiv(high, BN)
    whole, whole_end = tl.cdiv(all_begin, BN), all_end // BN
    any_whole = whole < whole_end
    return low, tl.where(any_whole, whole, high), tl.where(any_whole, whole_end, high), high


@triton.jit
def tile_rows(tile, chunk, query_length, BM: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr):
    """Query position and head inside the group of each row of a tile, and whether there is such a row."""
    row = tl.arange(0, BM)
    i = tile * (BM // G) + row // G
    head = chunk * G + row % G
    return i, head, (row < BM // G * G) & (i < query_length) & (head < GROUP)


@triton.jit
def load_rows(base, offsets, here, DIM: tl.constexpr, PADDED: tl.constexpr):
    """``[rows, PADDED]`` from rows at ``base + offsets``, 0 where there is none and behind DIM."""
    d = tl.arange(0, PADDED)
    if DIM == PADDED:
        return tl.load(base + offsets[:, None] + d[None, :], here[:, None], 0.0)
    return tl.load(base + offsets[:, None] + d[None, :], here[:, None] & (d < DIM)[None, :], 0.0)


@triton.jit
def store_rows(base, offsets, here, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    mask = here[:, None] & (d < DIM)[None, :]
    tl.store(base + offsets[:, None] + d[None, :], values.to(base.dtype.element_ty), mask)


@triton.jit
def tanh(x):
    """To a few units in the last place: near 0 by its series, where the exponential would cancel."""
    magnitude = tl.abs(x)
    decay = tl.exp2(magnitude * (-2 * LOG2E))
    far = (1 - decay) / (1 + decay)
    far = tl.where(x < 0, -far, far)
    square = x * x
    near = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(magnitude < 0.25, near, far)


@triton.jit
def _scatter64(x):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def dropout_streams(seed, sequence, head, i):
    """The key of each row's stream, uint64."""
    # Scattered before the index is added: neighbouring seeds must not share streams.
    key = _scatter64(_scatter64(tl.load(seed).to(tl.uint64)) + sequence.to(tl.uint64))
    key = _scatter64(key + head.to(tl.uint64))
    return _scatter64(key + i.to(tl.uint64))


@triton.jit
def _murmur_rounds(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def dropout_keep(streams, keys, threshold, keep_scale):
    """``keep_scale`` where (row, key) survives, else 0; ``streams`` and ``keys`` broadcast against each other."""
    low = streams.to(tl.uint32)
    high = (streams >> 32).to(tl.uint32)
    x = _murmur_rounds(_murmur_rounds(keys.to(tl.uint32) + low) ^ high)
    return tl.where(x.to(tl.int64) >= threshold, keep_scale, 0.0)
