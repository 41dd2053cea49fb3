"""Stages of a chunk that both directions of Mamba-2's scan share, as in ``kernel_src/cpu/mamba2_scan/chunk-inl.h``.

Decays between two tokens of a chunk and C B^T are made anew by every kernel that needs them: on a GPU that costs less
than reading them back. Exponents are sums of log-decays over exactly the tokens between two places, so rates of
either sign neither overflow where the result does not nor lose the small decays behind a large one.
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._checks import type_error
from .launch import dot_precision, launch, padded, programs, target, walked_rows
from .work import Blocks

# Numbers that one program clears at a time.
CLEARED = 1024
# Heads whose steps one program prepares at a time: a row of 128 bytes.
_STEP_HEADS = 32


@dataclass(frozen=True)
class Plan:
    """How the kernels of one call are cut, by dtype and GPU alone.

    Attributes:
        chunk: tokens of a chunk, counted from a sequence's first token. One state a chunk is kept in memory.
        wide: channels and state columns of a tile, at most, where a kernel holds few tiles.
        tight: the same where it holds many.
        walked: the same of the state that a program walks along a sequence with.
        warps: of a program that holds tiles of chunk by chunk.
    """

    chunk: int
    wide: Tuple[int, int]
    tight: Tuple[int, int]
    walked: Tuple[int, int]
    warps: int


def plan_for(x: Tensor) -> Plan:
    """Tiles that no target spills; compiled, not timed, so a GPU may prefer others.

    Products of fp32 run without tensor cores on NVIDIA GPUs: each thread holds whole rows of both operands. Before
    sm_90 tensor cores read both from registers too. On an AMD GPU four waves a program leave 512 registers to a lane.
    """
    gpu = target(x)
    if x.dtype == torch.float32:
        return Plan(32, (16, 32), (32, 16), (16, 32), 4)
    walked = (walked_rows(x, 64), 64)
    if gpu.backend == "hip":
        return Plan(64, (64, 64), (64, 64), walked, 4)
    if gpu.arch < 90:
        return Plan(32, (64, 64), (32, 32), walked, 4)
    return Plan(64, (64, 64), (32, 32), walked, 8)


@dataclass(frozen=True)
class ScanInputs:
    """What both directions are given, as the kernels take it: rows dense, parameters and states contiguous.

    Attributes:
        x, z: ``[T, H, P]``; B, C: ``[T, G, S]``, x's dtype.
        dt: ``[T, H]``; A, dt_bias: ``[H]``; D: ``[H, P]``; initial_state: ``[N, H, P, S]``, all fp32.
        cu_seqlens: int32 ``[N + 1]``.
        dt_min, dt_max: what steps are clamped to.
        softplus: whether steps pass through softplus before.
        plan: tile sizes and warps.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Optional[Tensor]
    z: Optional[Tensor]
    dt_bias: Optional[Tensor]
    cu_seqlens: Tensor
    initial_state: Optional[Tensor]
    dt_min: float
    dt_max: float
    softplus: bool
    plan: Plan

    @staticmethod
    def made(x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max) -> "ScanInputs":
        """From the arguments of either op.

        Raises:
            TypeError: x is float64.
        """
        if x.dtype == torch.float64:
            must = "be float32, bfloat16 or float16 on a GPU (float64 is for a CPU)"
            raise type_error("mamba2_scan", "x", must, "float64")
        x, B, C, z = (_dense_rows(tensor) for tensor in (x, B, C, z))
        dt, A, D, dt_bias, cu_seqlens, initial_state = (
            None if tensor is None else tensor.contiguous()
            for tensor in (dt, A, D, dt_bias, cu_seqlens, initial_state)
        )
        options = (dt_min, dt_max, bool(dt_softplus))
        return ScanInputs(x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, *options, plan_for(x))

    def steps(self, chunks: Blocks) -> Tensor:
        """What chunks need of their steps, fp32 ``[3, H, T]``: the step, the decay from the chunk's start to the token,
        and that from the token to the chunk's end. Made once: in the layouts of all its users it would be made often.
        """
        tokens, heads = self.dt.shape
        steps = self.dt.new_empty((3, heads, tokens))
        tile = min(_STEP_HEADS, triton.next_power_of_2(heads))
        launch(
            _prepare_steps,
            programs(self.x, chunks.most * triton.cdiv(heads, tile), 8),
            self.dt, self.A, self.dt_bias, self.cu_seqlens, chunks.items, chunks.count, steps,
            self.dt_min, self.dt_max, tokens,
            H=heads, CHUNK=chunks.size, BH=tile, SOFTPLUS=self.softplus,
        )  # fmt: skip
        return steps

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def constants(self, tile: Tuple[int, int]) -> Dict[str, Any]:
        """Compile-time values of a kernel that holds tiles of at most ``tile`` channels and state columns."""
        heads, head_dim = self.x.shape[1:]
        groups, state_dim = self.B.shape[1:]
        sizes = dict(H=heads, G=groups, P=head_dim, S=state_dim, CHUNK=self.plan.chunk)
        most_channels, most_columns = tile
        sizes.update(BP=_fitting(head_dim, most_channels), BS=_fitting(state_dim, most_columns))
        return dict(sizes, PRECISION=dot_precision(self.x))

    def new_states(self) -> Tensor:
        """Room for the states between chunks, ``[slots, H, P, S]`` in x's dtype; see :func:`slot_of`."""
        slots = self.x.shape[0] // self.plan.chunk + 1
        return self.x.new_empty((slots, *self.x.shape[1:], self.B.shape[2]))

    def callers_state(self, state: Optional[Tensor]) -> Tensor:
        """Fresh fp32 ``[N, H, P, S]`` holding ``state`` or zeros, which is what an empty sequence returns."""
        if state is not None:
            return state.clone(memory_format=torch.contiguous_format)
        return self.dt.new_zeros((self.sequences, *self.x.shape[1:], self.B.shape[2]))


def _fitting(size: int, most: int) -> int:
    """The tile for an axis of ``size``: a power of two that ``tl.dot`` takes, at most ``most``."""
    return max(16, min(most, padded(size)))


def _dense_rows(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """``tensor`` or a copy of it, with neighbours along the last axis side by side in memory."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def head_tiles(constants: Dict[str, Any]) -> int:
    """Tiles along the channels of one head."""
    return triton.cdiv(constants["P"], constants["BP"])


def column_tiles(constants: Dict[str, Any]) -> int:
    """Tiles along the columns of a state."""
    return triton.cdiv(constants["S"], constants["BS"])


def strides(tensor: Optional[Tensor]) -> Tuple[int, int]:
    """Elements from a token, and from a head or group, to the next."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@triton.jit
def slot_of(begin, CHUNK: tl.constexpr):
    """Where the state before the chunk at token ``begin`` lies, if that is not its sequence's first.

    A whole chunk lies before such a chunk, so no two of them share a slot, and the memory does not grow with the number
    of sequences.
    """
    return begin // CHUNK


@triton.jit
def find_chunk(items, cu_seqlens, place, CHUNK: tl.constexpr):
    """Sequence, index, first token of the chunk, and the token behind its sequence; for ``zero`` see chunk_decay."""
    n = tl.load(items + 2 * place).to(tl.int64)
    index = tl.load(items + 2 * place + 1).to(tl.int64)
    bos = tl.load(cu_seqlens + n).to(tl.int64)
    eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
    return n, index, bos + index * CHUNK, eos, tl.minimum(index, 0)


@triton.jit
def softplus(v):
    """log(1 + exp(v)) to a few ulps everywhere: with u = exp(-|v|) and s = u / (2 + u), log(1 + u) = 2 atanh(s)."""
    u = tl.exp(-tl.abs(v))
    s = u / (2 + u)
    q = s * s
    # s <= 1 / 3, so the first term left out is below 2e-10 of the sum.
    series = 1.0 / 17
    series = series * q + 1.0 / 15
    series = series * q + 1.0 / 13
    series = series * q + 1.0 / 11
    series = series * q + 1.0 / 9
    series = series * q + 1.0 / 7
    series = series * q + 1.0 / 5
    series = series * q + 1.0 / 3
    return tl.maximum(v, 0) + 2 * s * (series * q + 1)


@triton.jit
def clamped_step(before, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """The step of dt + dt_bias, and what it is before it is clamped."""
    unclamped = before
    if SOFTPLUS:
        unclamped = softplus(before)
    # In this form a NaN passes.
    return tl.where(unclamped < dt_min, dt_min, tl.where(unclamped > dt_max, dt_max, unclamped)), unclamped


@triton.jit(do_not_specialize=["tokens"])
def _prepare_steps(
    dt, A, dt_bias, cu_seqlens, items, count, steps, dt_min, dt_max, tokens,
    H: tl.constexpr, CHUNK: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (H + BH - 1) // BH
    i = tl.arange(0, CHUNK)
    units = tl.load(count).to(tl.int64) * TILES
    for item in range(tl.program_id(0).to(tl.int64), units, tl.num_programs(0)):
        _, _, begin, eos, _ = find_chunk(items, cu_seqlens, item // TILES, CHUNK)
        h = item % TILES * BH + tl.arange(0, BH)
        token = begin + i
        rate = tl.load(A + h, h < H, 0)[None, :]
        before = load_rows(dt, token, token < eos, h, H, H)
        after = load_rows(dt, token + 1, (i + 1 < CHUNK) & (token + 1 < eos), h, H, H)
        if dt_bias is not None:
            bias = tl.load(dt_bias + h, h < H, 0)[None, :]
            before += bias
            after += bias
        step, _ = clamped_step(before, dt_min, dt_max, SOFTPLUS)
        step = tl.where((token < eos)[:, None], step, 0)
        later, _ = clamped_step(after, dt_min, dt_max, SOFTPLUS)
        later = tl.where(((i + 1 < CHUNK) & (token + 1 < eos))[:, None], later, 0)
        to = steps + token[:, None] + h[None, :] * tokens.to(tl.int64)
        mask = (token < eos)[:, None] & (h < H)[None, :]
        apart = tokens.to(tl.int64) * H
        tl.store(to, step, mask)
        tl.store(to + apart, tl.exp(tl.cumsum(step * rate, 0)), mask)
        tl.store(to + 2 * apart, tl.exp(tl.cumsum(later * rate, 0, reverse=True)), mask)


@triton.jit
def load_steps(steps, tokens, token, here, eos, h, H: tl.constexpr, CHUNK: tl.constexpr):
    """Step, decay from the chunk's start and to its end of a head's tokens, and the decay over the chunk.

    All but the last are 0 where not ``here``.
    """
    apart = tokens.to(tl.int64)
    at = steps + apart * h
    last = tl.minimum(tl.max(token, 0), eos - 1)
    step = tl.load(at + token, here, 0)
    from_start = tl.load(at + apart * H + token, here, 0)
    to_end = tl.load(at + apart * (2 * H) + token, here, 0)
    return step, from_start, to_end, tl.load(at + apart * H + last)


@triton.jit
def chunk_decay(log_decay, zero, CHUNK: tl.constexpr):
    """decay[i, j] = exp(a_{j+1} + ... + a_i) for j <= i, else 0.

    ``zero`` is a 0 that the compiler does not know: it would keep the masks in registers from one chunk to the next.
    """
    i = tl.arange(0, CHUNK)[:, None] + zero
    j = tl.arange(0, CHUNK)[None, :]
    exponents = tl.cumsum(tl.where(i > j, log_decay[:, None], 0), 0)
    return tl.where(i >= j, tl.exp(exponents), 0)


@triton.jit
def transposed_chunk_decay(log_decay, zero, CHUNK: tl.constexpr):
    """:func:`chunk_decay` at [j, i], made as such."""
    j = tl.arange(0, CHUNK)[:, None] + zero
    i = tl.arange(0, CHUNK)[None, :]
    exponents = tl.cumsum(tl.where(i > j, log_decay[None, :], 0), 1)
    return tl.where(i >= j, tl.exp(exponents), 0)


@triton.jit
def gather_decay_gradients(pairs, d_from_start, d_to_end, zero, CHUNK: tl.constexpr):
    """Gradient of each log-decay: the gradients of all exponents that it is a term of.

    pairs[i, j] belongs to the exponent from j to i, the others to those from the chunk's start to i and from j to its
    end. Only terms that count are added: none is taken away again.
    """
    place = tl.arange(0, CHUNK)[:, None] + zero
    j = tl.arange(0, CHUNK)[None, :]
    ends = tl.cumsum(pairs, 0, reverse=True) + d_to_end[None, :]
    return tl.sum(tl.where(j < place, ends, 0), 1) + tl.cumsum(d_from_start, 0, reverse=True)


@triton.jit
def load_rows(rows, token, here, column, stride, WIDTH: tl.constexpr):
    """Tile [CHUNK, columns] of tokens that are ``here``; ``rows`` points to a head or group of token 0."""
    mask = here[:, None] & (column < WIDTH)[None, :]
    return tl.load(rows + token[:, None] * stride + column[None, :], mask, 0)


@triton.jit
def store_rows(rows, value, token, here, column, stride, WIDTH: tl.constexpr):
    mask = here[:, None] & (column < WIDTH)[None, :]
    tl.store(rows + token[:, None] * stride + column[None, :], value.to(rows.dtype.element_ty), mask)


@triton.jit
def state_tile(states, place, wanted, h, p, s, H: tl.constexpr, P: tl.constexpr, S: tl.constexpr):
    """Pointers to rows p and columns s of a head's state in [.., H, P, S], and which to touch: none if not wanted."""
    rows = p < tl.where(wanted, P, 0)
    pointers = states + (place * H + h) * P * S + p[:, None] * S + s[None, :]
    return pointers, rows[:, None] & (s < S)[None, :]


@triton.jit
def load_state(states, place, wanted, h, p, s, H: tl.constexpr, P: tl.constexpr, S: tl.constexpr):
    pointers, mask = state_tile(states, place, wanted, h, p, s, H, P, S)
    return tl.load(pointers, mask, 0)


@triton.jit
def store_state(states, place, state, wanted, h, p, s, H: tl.constexpr, P: tl.constexpr, S: tl.constexpr):
    pointers, mask = state_tile(states, place, wanted, h, p, s, H, P, S)
    tl.store(pointers, state.to(states.dtype.element_ty), mask)


@triton.jit
def chunk_state(
    states, slot, callers, n, is_callers, h, p, s, H: tl.constexpr, P: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Tile of a state between chunks, or of the caller's state of sequence n (zeros if None), in x's dtype."""
    state = load_state(states, slot, is_callers == 0, h, p, s, H, P, S)
    if callers is not None:
        given = load_state(callers, n, is_callers, h, p, s, H, P, S)
        state = tl.where(is_callers, given.to(state.dtype), state)
    return state


@triton.jit
def load_cotangent(dy, z, h, token, here, p, z_token, z_head, H: tl.constexpr, P: tl.constexpr):
    """Gradient of the output before the gate, d_out = dy silu(z), in fp32."""
    d_out = load_rows(dy + h * P, token, here, p, H * P, P).to(tl.float32)
    if z is not None:
        gate = load_rows(z + h * z_head, token, here, p, z_token, P).to(tl.float32)
        d_out *= gate * tl.sigmoid(gate)
    return d_out


@triton.jit
def clear_behind(out, cu_seqlens, sequences, tokens, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Zeros in rows of ``WIDTH`` numbers behind the last offset: padding, which no chunk owns."""
    width = tl.full((), WIDTH, tl.int64)
    end = width * tokens
    first = width * tl.load(cu_seqlens + sequences)
    own = tl.program_id(0).to(tl.int64) * TILE
    for start in range(first + own, end, tl.num_programs(0).to(tl.int64) * TILE):
        place = start + tl.arange(0, TILE)
        tl.store(out + place, tl.zeros((TILE,), out.dtype.element_ty), place < end)
