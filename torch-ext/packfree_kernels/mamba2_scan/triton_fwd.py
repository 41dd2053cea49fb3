"""Forward pass of Mamba-2's scan on a GPU; README.md in this folder has the formulas, the design and what bounds it."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.launch import launch, programs
from .._triton.mamba2_chunk import (
    CLEARED,
    ScanInputs,
    chunk_decay,
    chunk_state,
    clear_behind,
    column_tiles,
    find_chunk,
    head_tiles,
    load_rows,
    load_state,
    load_steps,
    slot_of,
    store_rows,
    store_state,
    strides,
)
from .._triton.work import Blocks, cut_into_blocks, longest_first

# The caller's states are fp32 whatever the dtype of x, which tl.dot wants both operands in: terms of the state are cut
# into as many numbers of that dtype as hold 22 bits or more, and each is multiplied. The walk waits for memory anyway.
_PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def mamba2_scan_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    dt_bias: Optional[Tensor],
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    """The op of this name; shapes and dtypes as in ``api.py``.

    Raises:
        TypeError: x is float64.
    """
    scan = ScanInputs.made(
        x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max
    )
    y = x.new_empty(x.shape)
    final_state = scan.callers_state(scan.initial_state) if want_state else None
    if y.numel() > 0:
        chunks = cut_into_blocks(cu_seqlens, x.shape[0], scan.plan.chunk)
        steps = scan.steps(chunks)
        states = advance_states(scan, longest_first(scan.cu_seqlens), steps, final_state)
        _read(scan, chunks, steps, states, y)
    return y, dt.new_empty((0,)) if final_state is None else final_state


def advance_states(
    scan: ScanInputs, walk: Tuple[Tensor, Tensor], steps: Tensor, final_state: Optional[Tensor]
) -> Tensor:
    """States before each chunk but a sequence's first, ``[slots, H, P, S]``; fills ``final_state`` if there is one.

    ``walk`` is :func:`longest_first` of the offsets.
    """
    states = scan.new_states()
    order, walked = walk
    constants = scan.constants(scan.plan.walked)
    tiles = head_tiles(constants) * column_tiles(constants)
    launch(
        _advance_states,
        programs(scan.x, scan.sequences * scan.x.shape[1] * tiles, 4),
        scan.x, steps, scan.B, scan.cu_seqlens, scan.initial_state, order, walked, states, final_state,
        scan.x.shape[0], *strides(scan.x), *strides(scan.B),
        num_warps=4,
        num_stages=2,
        PARTS=_PARTS[scan.x.dtype],
        **constants,
    )  # fmt: skip
    return states


def _read(scan: ScanInputs, chunks: Blocks, steps: Tensor, states: Tensor, y: Tensor) -> None:
    tokens, heads, _ = scan.x.shape
    constants = scan.constants(scan.plan.wide)
    launch(
        _read_chunks,
        programs(scan.x, max(1, chunks.most) * heads * head_tiles(constants), 4),
        scan.x, steps, scan.A, scan.B, scan.C, scan.D, scan.z, scan.cu_seqlens, scan.initial_state,
        chunks.items, chunks.count, states, y, tokens, scan.sequences,
        *strides(scan.x), *strides(scan.B), *strides(scan.C), *strides(scan.z),
        num_warps=scan.plan.warps,
        num_stages=2,
        CLEARED=CLEARED,
        **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _advance_states(
    x, steps, B, cu_seqlens, initial_state, order, walked, states, final_state,
    tokens, x_token, x_head, b_token, b_group,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program walks along a sequence with one tile [BP, BS] of one head's state, longest sequences first:

    state = decay over the chunk * state + sum over j of (to_end_j step_j x_j) B_j^T
    """
    TILES_S: tl.constexpr = (S + BS - 1) // BS
    TILES: tl.constexpr = (P + BP - 1) // BP * TILES_S
    i = tl.arange(0, CHUNK)
    units = tl.load(walked).to(tl.int64) * (H * TILES)
    for item in range(tl.program_id(0).to(tl.int64), units, tl.num_programs(0)):
        n = tl.load(order + item // (H * TILES)).to(tl.int64)
        h = item % (H * TILES) // TILES
        p = item % TILES // TILES_S * BP + tl.arange(0, BP)
        s = item % TILES_S * BS + tl.arange(0, BS)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
        state = tl.zeros((BP, BS), tl.float32)
        if initial_state is not None:
            state = load_state(initial_state, n, True, h, p, s, H, P, S)
        # The state behind the last chunk only if somebody wants it.
        chunks = tl.cdiv(eos - bos, CHUNK) - (1 if final_state is None else 0)
        for index in range(chunks):
            begin = bos + index * CHUNK
            token = begin + i
            step, _, to_end, over = load_steps(steps, tokens, token, token < eos, eos, h, H, CHUNK)
            rows = load_rows(x + h * x_head, token, token < eos, p, x_token, P)
            b = load_rows(B + h // (H // G) * b_group, token, token < eos, s, b_token, S)
            weighted = rows.to(tl.float32) * (to_end * step)[:, None]
            state *= over
            for part in tl.static_range(PARTS):
                rounded = weighted.to(b.dtype)
                state = tl.dot(tl.trans(rounded), b, state, input_precision=PRECISION)
                if part + 1 < PARTS:
                    weighted -= rounded.to(tl.float32)
            store_state(states, slot_of(begin + CHUNK, CHUNK), state, begin + CHUNK < eos, h, p, s, H, P, S)
        if final_state is not None:
            store_state(final_state, n, state, True, h, p, s, H, P, S)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _read_chunks(
    x, steps, A, B, C, D, z, cu_seqlens, initial_state, items, count, states, y,
    tokens, sequences, x_token, x_head, b_token, b_group, c_token, c_group, z_token, z_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: y_i = from_start_i state C_i + sum over j <= i of read_ij x_j + D x_i, times silu(z_i)."""
    TILES: tl.constexpr = (P + BP - 1) // BP
    i = tl.arange(0, CHUNK)
    units = tl.load(count).to(tl.int64) * (H * TILES)
    for item in range(tl.program_id(0).to(tl.int64), units, tl.num_programs(0)):
        h = item % (H * TILES) // TILES
        g = h // (H // G)
        p = item % TILES * BP + tl.arange(0, BP)
        n, index, begin, eos, zero = find_chunk(items, cu_seqlens, item // (H * TILES), CHUNK)
        token = begin + i
        here = token < eos
        cb = tl.zeros((CHUNK, CHUNK), tl.float32)
        out = tl.zeros((CHUNK, BP), tl.float32)
        for first in range(0, S, BS):
            s = first + tl.arange(0, BS)
            b = load_rows(B + g * b_group, token, here, s, b_token, S)
            c = load_rows(C + g * c_group, token, here, s, c_token, S)
            state = chunk_state(states, slot_of(begin, CHUNK), initial_state, n, index == 0, h, p, s, H, P, S)
            cb = tl.dot(c, tl.trans(b), cb, input_precision=PRECISION)
            out = tl.dot(c, tl.trans(state), out, input_precision=PRECISION)
        step, from_start, _, _ = load_steps(steps, tokens, token, here, eos, h, H, CHUNK)
        out *= from_start[:, None]
        decay = chunk_decay(step * tl.load(A + h), zero, CHUNK)
        rows = load_rows(x + h * x_head, token, here, p, x_token, P)
        read = (cb * decay * step[None, :]).to(rows.dtype)
        out = tl.dot(read, rows, out, input_precision=PRECISION)
        if D is not None:
            out += tl.load(D + h * P + p, p < P, 0)[None, :] * rows
        if z is not None:
            gate = load_rows(z + h * z_head, token, here, p, z_token, P).to(tl.float32)
            out *= gate * tl.sigmoid(gate)
        store_rows(y + h * P, out, token, here, p, H * P, P)
    clear_behind(y, cu_seqlens, sequences, tokens, H * P, CLEARED)
