"""Backward pass of Mamba-2's scan on a GPU. Names of gradients carry d_ before the name of what they belong to."""

from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from .._triton.launch import launch, programs
from .._triton.mamba2_chunk import (
    CLEARED,
    ScanInputs,
    chunk_decay,
    chunk_state,
    clamped_step,
    clear_behind,
    column_tiles,
    find_chunk,
    gather_decay_gradients,
    head_tiles,
    load_cotangent,
    load_rows,
    load_state,
    load_steps,
    slot_of,
    store_rows,
    store_state,
    strides,
    transposed_chunk_decay,
)
from .._triton.work import Blocks, cut_into_blocks, longest_first
from .triton_fwd import advance_states
from .triton_sums import sums_over_lanes

# Heads of a group that one program runs, at most: dB and dC are summed over them first. A constant, because the order
# of a sum decides its bits.
_HEAD_BLOCK = 8


def mamba2_scan_bwd(
    dy: Tensor,
    dfinal_state: Optional[Tensor],
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
) -> Tuple[Tensor, ...]:
    """The op of this name; shapes and dtypes as in ``api.py``.

    Raises:
        TypeError: x is float64.
    """
    scan = ScanInputs.made(
        x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max
    )
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    dinitial_state = None if initial_state is None else scan.callers_state(dfinal_state)
    dx, ddt, dB, dC = x.new_empty(x.shape), dt.new_empty(dt.shape), B.new_empty(B.shape), C.new_empty(C.shape)
    dz = None if z is None else x.new_empty(x.shape)
    if x.numel() > 0:
        dy = dy.contiguous()
        chunks = cut_into_blocks(cu_seqlens, x.shape[0], scan.plan.chunk)
        steps = scan.steps(chunks)
        walk = longest_first(scan.cu_seqlens)
        states = advance_states(scan, walk, steps, None)
        d_states = _return_states(scan, walk, steps, dy, dfinal_state, dinitial_state)
        d_skips, around = _channel_gradients(scan, chunks, steps, states, d_states, dy, dfinal_state, dx, dz)
        d_rates, d_biases = _step_gradients(scan, chunks, steps, around, dy, ddt)
        dD, dA, ddt_bias = sums_over_lanes(d_skips, d_rates, d_biases)
        _group_gradients(scan, chunks, steps, d_states, dfinal_state, dy, scan.C, True, dB)
        _group_gradients(scan, chunks, steps, states, scan.initial_state, dy, scan.B, False, dC)
    else:
        dA, dD, ddt_bias = (dt.new_zeros(shape) for shape in (A.shape, x.shape[1:], A.shape))
    return (
        dx,
        ddt,
        dA,
        dB,
        dC,
        dt.new_empty((0,)) if D is None else dD,
        x.new_empty((0,)) if dz is None else dz,
        dt.new_empty((0,)) if dt_bias is None else ddt_bias,
        dt.new_empty((0,)) if dinitial_state is None else dinitial_state,
    )


def _return_states(
    scan: ScanInputs, walk: Tuple[Tensor, Tensor], steps: Tensor, dy: Tensor, dfinal_state: Optional[Tensor],
    dinitial_state: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """Gradients of the states that ``advance_states`` returns, at their places; fills ``dinitial_state`` if any."""
    d_states = scan.new_states()
    order, walked = walk
    constants = scan.constants(scan.plan.walked)
    tiles = head_tiles(constants) * column_tiles(constants)
    launch(
        _return_states_kernel,
        programs(scan.x, scan.sequences * scan.x.shape[1] * tiles, 4),
        dy, steps, scan.C, scan.z, scan.cu_seqlens, dfinal_state, order, walked, d_states, dinitial_state,
        scan.x.shape[0], *strides(scan.C), *strides(scan.z),
        num_warps=4,
        num_stages=2,
        **constants,
    )  # fmt: skip
    return d_states


def _lanes(scan: ScanInputs) -> int:
    """Programs that share a head's chunks, each summing parameters' gradients over its own.

    Not by the number of sequences: those gradients have the same bits in every spelling of the boundaries.
    """
    tokens, heads, _ = scan.x.shape
    return max(1, programs(scan.x, tokens * heads, 4) // heads)


def _channel_gradients(
    scan: ScanInputs, chunks: Blocks, steps: Tensor, states: Tensor, d_states: Tensor, dy: Tensor,
    dfinal_state: Optional[Tensor], dx: Tensor, dz: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Fills dx and dz, and returns what each lane gives to dD, ``[lanes, H, P]``, and what ``_step_gradients`` needs,
    fp32 ``[3, H, T]``: gradients of the decays from a chunk's start times that decay, of the step by what the state
    behind the chunk takes of the token, and of the decay over the chunk times that decay, once for each token.
    """
    tokens, heads, head_dim = scan.x.shape
    lanes, constants = _lanes(scan), scan.constants(scan.plan.tight)
    d_skips = scan.dt.new_empty((lanes, heads, head_dim))
    around = scan.dt.new_empty((3, heads, tokens))
    launch(
        _channel_gradients_kernel,
        lanes * heads,
        dy, scan.x, steps, scan.A, scan.B, scan.C, scan.D, scan.z, scan.cu_seqlens,
        scan.initial_state, dfinal_state, chunks.items, chunks.count, states, d_states,
        dx, dz, d_skips, around, tokens, scan.sequences,
        *strides(scan.x), *strides(scan.B), *strides(scan.C), *strides(scan.z),
        num_warps=scan.plan.warps,
        num_stages=1,
        TILES=triton.next_power_of_2(head_tiles(constants)),
        CLEARED=CLEARED,
        **constants,
    )  # fmt: skip
    return d_skips, around


def _step_gradients(
    scan: ScanInputs, chunks: Blocks, steps: Tensor, around: Tensor, dy: Tensor, ddt: Tensor
) -> Tuple[Tensor, Tensor]:
    """Fills ddt, and returns what each lane gives to dA and ddt_bias, ``[lanes, H]``."""
    tokens, heads, _ = scan.x.shape
    lanes, constants = _lanes(scan), scan.constants(scan.plan.tight)
    d_rates, d_biases = scan.dt.new_empty((lanes, heads)), scan.dt.new_empty((lanes, heads))
    launch(
        _step_gradients_kernel,
        lanes * heads,
        dy, scan.x, steps, around, scan.dt, scan.A, scan.B, scan.C, scan.z, scan.dt_bias, scan.cu_seqlens,
        chunks.items, chunks.count, ddt, d_rates, d_biases, scan.dt_min, scan.dt_max, tokens, scan.sequences,
        *strides(scan.x), *strides(scan.B), *strides(scan.C), *strides(scan.z),
        num_warps=scan.plan.warps,
        num_stages=1,
        SOFTPLUS=scan.softplus,
        CLEARED=CLEARED,
        **constants,
    )  # fmt: skip
    return d_rates, d_biases


def _group_gradients(
    scan: ScanInputs, chunks: Blocks, steps: Tensor, states: Tensor, callers: Optional[Tensor], dy: Tensor,
    other: Tensor, of_b: bool, out: Tensor,
) -> None:  # fmt: skip
    """Fills dB or dC: sums over the heads of a group, a unit of heads at a time, then over the units in order."""
    tokens, groups, state_dim = other.shape
    group = scan.x.shape[1] // groups
    units = triton.cdiv(group, _HEAD_BLOCK)
    parts = out if units == 1 else scan.dt.new_empty((units, *out.shape))
    constants = scan.constants(scan.plan.tight)
    launch(
        _group_gradients_kernel,
        programs(scan.x, max(1, chunks.most) * groups * units * column_tiles(constants), 4),
        dy, scan.x, steps, scan.A, other, scan.z, scan.cu_seqlens, callers, chunks.items, chunks.count, states, parts,
        tokens, scan.sequences, *strides(scan.x), *strides(other), *strides(scan.z),
        num_warps=scan.plan.warps,
        num_stages=1,
        OF_B=of_b,
        UNITS=units,
        UNIT=triton.cdiv(group, units),
        CLEARED=CLEARED,
        **constants,
    )  # fmt: skip
    if units > 1:
        launch(
            _sum_units,
            programs(scan.x, triton.cdiv(out.numel(), CLEARED), 8),
            parts, out, scan.cu_seqlens, tokens, scan.sequences,
            WIDTH=groups * state_dim,
            UNITS=units,
            TILE=CLEARED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _return_states_kernel(
    dy, steps, C, z, cu_seqlens, dfinal_state, order, walked, d_states, dinitial_state,
    tokens, c_token, c_group, z_token, z_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program walks back along a sequence with one tile [BP, BS] of the gradient of one head's state:

    d_state = decay over the chunk * d_state + sum over i of (from_start_i d_out_i) C_i^T
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
        d_state = tl.zeros((BP, BS), tl.float32)
        if dfinal_state is not None:
            d_state = load_state(dfinal_state, n, True, h, p, s, H, P, S)
        chunks = tl.cdiv(eos - bos, CHUNK)
        # The gradient of the state before the first chunk only if somebody wants it.
        for back in range(chunks - (1 if dinitial_state is None else 0)):
            begin = bos + (chunks - 1 - back) * CHUNK
            token = begin + i
            here = token < eos
            _, from_start, _, over = load_steps(steps, tokens, token, here, eos, h, H, CHUNK)
            d_out = load_cotangent(dy, z, h, token, here, p, z_token, z_head, H, P)
            c = load_rows(C + h // (H // G) * c_group, token, here, s, c_token, S)
            weighted = (d_out * from_start[:, None]).to(c.dtype)
            d_state *= over
            d_state = tl.dot(tl.trans(weighted), c, d_state, input_precision=PRECISION)
            store_state(d_states, slot_of(begin, CHUNK), d_state, begin > bos, h, p, s, H, P, S)
        if dinitial_state is not None:
            store_state(dinitial_state, n, d_state, True, h, p, s, H, P, S)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _channel_gradients_kernel(
    dy, x, steps, A, B, C, D, z, cu_seqlens, initial_state, dfinal_state, items, count, states, d_states,
    dx, dz, d_skips, around, tokens, sequences,
    x_token, x_head, b_token, b_group, c_token, c_group, z_token, z_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, TILES: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """What one head's chunks give to x, z and D, and what their steps get through the states around them.

    A program keeps one head and takes one chunk in so many, so that its sum of dD stays in registers.
    """
    h = tl.program_id(0) % H
    g = h // (H // G)
    lane = tl.program_id(0) // H
    i = tl.arange(0, CHUNK)
    rate = tl.load(A + h)
    d_skip = tl.zeros((TILES, BP), tl.float32)
    for place in range(lane, tl.load(count), tl.num_programs(0) // H):
        n, index, begin, eos, zero = find_chunk(items, cu_seqlens, place, CHUNK)
        token = begin + i
        here = token < eos
        is_last = begin + CHUNK >= eos
        cb_transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, S, BS):
            s = first + tl.arange(0, BS)
            b = load_rows(B + g * b_group, token, here, s, b_token, S)
            c = load_rows(C + g * c_group, token, here, s, c_token, S)
            cb_transposed = tl.dot(b, tl.trans(c), cb_transposed, input_precision=PRECISION)
        step, from_start, to_end, over = load_steps(steps, tokens, token, here, eos, h, H, CHUNK)
        # Computed as such: no product's left operand is a result that was transposed (_triton/__init__.py).
        read_transposed = cb_transposed * transposed_chunk_decay(step * rate, zero, CHUNK) * step[:, None]
        read_transposed = read_transposed.to(x.dtype.element_ty)
        d_from_start = tl.zeros((CHUNK,), tl.float32)
        along = tl.zeros((CHUNK,), tl.float32)
        d_over = 0.0
        for tile in range((P + BP - 1) // BP):
            p = tile * BP + tl.arange(0, BP)
            rows = load_rows(x + h * x_head, token, here, p, x_token, P)
            d_out = load_rows(dy + h * P, token, here, p, H * P, P).to(tl.float32)
            skip = tl.zeros((BP,), tl.float32)
            if D is not None:
                skip = tl.load(D + h * P + p, p < P, 0)
            # Through the state before the chunk.
            inter = tl.zeros((CHUNK, BP), tl.float32)
            for first in range(0, S, BS):
                s = first + tl.arange(0, BS)
                c = load_rows(C + g * c_group, token, here, s, c_token, S)
                state = chunk_state(states, slot_of(begin, CHUNK), initial_state, n, index == 0, h, p, s, H, P, S)
                inter = tl.dot(c, tl.trans(state), inter, input_precision=PRECISION)
            inter *= from_start[:, None]
            if z is not None:
                out = tl.trans(tl.dot(tl.trans(rows), read_transposed, input_precision=PRECISION))
                out += inter + skip[None, :] * rows
                gate = load_rows(z + h * z_head, token, here, p, z_token, P).to(tl.float32)
                sigmoid = tl.sigmoid(gate)
                d_gate = d_out * out * sigmoid * (1 + gate * (1 - sigmoid))
                store_rows(dz + h * P, d_gate, token, here, p, H * P, P)
                d_out *= gate * sigmoid
            d_from_start += tl.sum(d_out * inter, 1)
            if D is not None:
                own = (tl.arange(0, TILES) == tile)[:, None]
                d_skip += tl.where(own, tl.sum(d_out * rows, 0)[None, :], 0)
            # Through the state behind it: what reaches x is weighed by to_end_j step_j.
            d_x = tl.zeros((CHUNK, BP), tl.float32)
            for first in range(0, S, BS):
                s = first + tl.arange(0, BS)
                b = load_rows(B + g * b_group, token, here, s, b_token, S)
                after = slot_of(begin + CHUNK, CHUNK)
                d_state = chunk_state(d_states, after, dfinal_state, n, is_last, h, p, s, H, P, S)
                d_x = tl.dot(b, tl.trans(d_state), d_x, input_precision=PRECISION)
                state = chunk_state(states, slot_of(begin, CHUNK), initial_state, n, index == 0, h, p, s, H, P, S)
                d_over += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
            along += tl.sum(rows * d_x, 1)
            d_x = d_x * (to_end * step)[:, None] + skip[None, :] * d_out
            # Inside the chunk: dx_j = sum over i of read_ij d_out_i.
            d_x = tl.dot(read_transposed, d_out.to(rows.dtype), d_x, input_precision=PRECISION)
            store_rows(dx + h * P, d_x, token, here, p, H * P, P)
        at = around + tokens.to(tl.int64) * h + token
        apart = tokens.to(tl.int64) * H
        tl.store(at, d_from_start, here)
        tl.store(at + apart, along * to_end, here)
        tl.store(at + 2 * apart, d_over * over + 0 * along, here)
    channel = tl.arange(0, TILES)[:, None] * BP + tl.arange(0, BP)[None, :]
    tl.store(d_skips + (lane * H + h) * P + channel, d_skip, channel < P)
    clear_behind(dx, cu_seqlens, sequences, tokens, H * P, CLEARED)
    if dz is not None:
        clear_behind(dz, cu_seqlens, sequences, tokens, H * P, CLEARED)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _step_gradients_kernel(
    dy, x, steps, around, dt, A, B, C, z, dt_bias, cu_seqlens, items, count,
    ddt, d_rates, d_biases, dt_min, dt_max, tokens, sequences,
    x_token, x_head, b_token, b_group, c_token, c_group, z_token, z_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, SOFTPLUS: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Gradients of one head's steps, rate and bias; ``around`` comes from ``_channel_gradients_kernel``.

    With d_read_ij = d_out_i . x_j, step_j gets sum over i of d_read_ij (C_i . B_j) decay_ij, and the exponent from j to
    i gets that times step_j.
    """
    h = tl.program_id(0) % H
    g = h // (H // G)
    lane = tl.program_id(0) // H
    i = tl.arange(0, CHUNK)
    rate = tl.load(A + h)
    d_rate = tl.zeros((CHUNK,), tl.float32)
    d_bias = tl.zeros((CHUNK,), tl.float32)
    for place in range(lane, tl.load(count), tl.num_programs(0) // H):
        _, _, begin, eos, zero = find_chunk(items, cu_seqlens, place, CHUNK)
        token = begin + i
        here = token < eos
        d_read = tl.zeros((CHUNK, CHUNK), tl.float32)
        for tile in range((P + BP - 1) // BP):
            p = tile * BP + tl.arange(0, BP)
            rows = load_rows(x + h * x_head, token, here, p, x_token, P)
            d_out = load_cotangent(dy, z, h, token, here, p, z_token, z_head, H, P).to(rows.dtype)
            d_read = tl.dot(d_out, tl.trans(rows), d_read, input_precision=PRECISION)
        cb = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, S, BS):
            s = first + tl.arange(0, BS)
            b = load_rows(B + g * b_group, token, here, s, b_token, S)
            c = load_rows(C + g * c_group, token, here, s, c_token, S)
            cb = tl.dot(c, tl.trans(b), cb, input_precision=PRECISION)
        step, _, _, _ = load_steps(steps, tokens, token, here, eos, h, H, CHUNK)
        by_step = d_read * cb * chunk_decay(step * rate, zero, CHUNK)
        at = around + tokens.to(tl.int64) * h + token
        apart = tokens.to(tl.int64) * H
        d_from_start = tl.load(at, here, 0)
        along = tl.load(at + apart, here, 0)
        d_over = tl.load(at + 2 * apart, here, 0)
        d_log_decay = gather_decay_gradients(by_step * step[None, :], d_from_start, along * step, zero, CHUNK) + d_over
        gradient = rate * d_log_decay + tl.sum(by_step, 0) + along
        before = tl.load(dt + token * H + h, here, 0)
        if dt_bias is not None:
            before += tl.load(dt_bias + h)
        _, unclamped = clamped_step(before, dt_min, dt_max, SOFTPLUS)
        if SOFTPLUS:
            gradient *= tl.sigmoid(before)
        gradient = tl.where(here & (unclamped >= dt_min) & (unclamped <= dt_max), gradient, 0)
        tl.store(ddt + token * H + h, gradient, here)
        d_rate += d_log_decay * step
        d_bias += gradient
    tl.store(d_rates + lane * H + h, tl.sum(d_rate, 0))
    tl.store(d_biases + lane * H + h, tl.sum(d_bias, 0))
    clear_behind(ddt, cu_seqlens, sequences, tokens, H, CLEARED)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _group_gradients_kernel(
    dy, x, steps, A, other, z, cu_seqlens, callers, items, count, states, out, tokens, sequences,
    x_token, x_head, other_token, other_group, z_token, z_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
    OF_B: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """What the heads of a unit give to one tile of columns of B, or of C, in one chunk.

    Of B: sum over heads of to_end_j step_j x_j d_state, the gradient of the state behind the chunk, and d_cb^T C.
    Of C: sum over heads of from_start_i d_out_i state, the state before it, and d_cb B.
    Of B d_cb and what it is made of are held transposed.
    """
    TILES_S: tl.constexpr = (S + BS - 1) // BS
    EACH: tl.constexpr = G * UNITS * TILES_S
    i = tl.arange(0, CHUNK)
    work = tl.load(count).to(tl.int64) * EACH
    for item in range(tl.program_id(0).to(tl.int64), work, tl.num_programs(0)):
        n, index, begin, eos, zero = find_chunk(items, cu_seqlens, item // EACH, CHUNK)
        s = item % TILES_S * BS + tl.arange(0, BS)
        unit = item % EACH // TILES_S % UNITS
        g = item % EACH // TILES_S // UNITS
        token = begin + i
        here = token < eos
        if OF_B:
            slot = slot_of(begin + CHUNK, CHUNK)
            is_callers = begin + CHUNK >= eos
        else:
            slot = slot_of(begin, CHUNK)
            is_callers = index == 0
        d_cb = tl.zeros((CHUNK, CHUNK), tl.float32)
        total = tl.zeros((CHUNK, BS), tl.float32)
        first = g * (H // G) + unit * UNIT
        for h in range(first, tl.minimum(first + UNIT, (g + 1) * (H // G))):
            step, from_start, to_end, _ = load_steps(steps, tokens, token, here, eos, h, H, CHUNK)
            d_read = tl.zeros((CHUNK, CHUNK), tl.float32)
            for tile in range((P + BP - 1) // BP):
                p = tile * BP + tl.arange(0, BP)
                rows = load_rows(x + h * x_head, token, here, p, x_token, P)
                d_out = load_cotangent(dy, z, h, token, here, p, z_token, z_head, H, P)
                if OF_B:
                    weighted = rows * (to_end * step)[:, None]
                else:
                    weighted = d_out * from_start[:, None]
                state = chunk_state(states, slot, callers, n, is_callers, h, p, s, H, P, S)
                total = tl.dot(weighted.to(rows.dtype), state, total, input_precision=PRECISION)
                if OF_B:
                    d_read = tl.dot(rows, tl.trans(d_out.to(rows.dtype)), d_read, input_precision=PRECISION)
                else:
                    d_read = tl.dot(d_out.to(rows.dtype), tl.trans(rows), d_read, input_precision=PRECISION)
            log_decay = step * tl.load(A + h)
            if OF_B:
                d_cb += d_read * transposed_chunk_decay(log_decay, zero + tl.minimum(h, 0), CHUNK) * step[:, None]
            else:
                d_cb += d_read * chunk_decay(log_decay, zero + tl.minimum(h, 0), CHUNK) * step[None, :]
        others = load_rows(other + g * other_group, token, here, s, other_token, S)
        total = tl.dot(d_cb.to(others.dtype), others, total, input_precision=PRECISION)
        to = out + (tl.full((), G * S, tl.int64) * tokens) * unit + g * S
        store_rows(to, total, token, here, s, G * S, S)
    if UNITS == 1:
        clear_behind(out, cu_seqlens, sequences, tokens, G * S, CLEARED)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _sum_units(parts, out, cu_seqlens, tokens, sequences, WIDTH: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr):
    """out [T, WIDTH] = sum over units of parts [UNITS, T, WIDTH], in rising order."""
    width = tl.full((), WIDTH, tl.int64)
    size = width * tokens
    end = width * tl.load(cu_seqlens + sequences)
    for start in range(tl.program_id(0).to(tl.int64) * TILE, end, tl.num_programs(0).to(tl.int64) * TILE):
        place = start + tl.arange(0, TILE)
        total = tl.load(parts + place, place < end, 0)
        for unit in range(1, UNITS):
            total += tl.load(parts + size * unit + place, place < end, 0)
        tl.store(out + place, total.to(out.dtype.element_ty), place < end)
    clear_behind(out, cu_seqlens, sequences, tokens, WIDTH, TILE)
