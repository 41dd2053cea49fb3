"""The delta rules in chunks, whatever their decay: the walk of the states along a sequence, and the outputs.

Letters and derivations are in the README.md of gated_delta_rule and kda; the stages are those of the CPU kernels.

Pipeline. Forward: ``_pairs`` (of each rule; a chunk by itself: decays, M, P, and for KDA decayed rows), ``_solve`` ((I
+ M B)^-1 by blocks that double), ``_walk`` (a sequence and 16 columns of a value head's state in one program, longest
sequences first; nothing else is serial), ``_outputs`` (a chunk by itself). Backward: these without the outputs, then
``_read_back``, ``_walk_back`` (the same walk, from the end), ``_pair_gradients``, ``_row_gradients``, the rule's own
way back through its decays, and ``_finish_rows``, which sums a key head's value heads in their order.

Tiles. Chunks of 32 tokens (16 beyond K = 128), so that a product's operands stay in registers: of 64, the addresses and
descriptors of all products alone fill the registers of a program in the backward walk. Key columns go by up to 128 in
the walks, shared by eight warps, and by 16 or 32 elsewhere; beyond K = 128 by at most 32, and a program walks with 8
columns of a state. No loop takes out of it what stays the same in all its rounds (disable_licm): offsets and masks are
made where they are used, since to keep them all would fill the registers as well. What each takes of sm_80, sm_90,
sm_100 and gfx942 at K = V = 64, 128 and 256, and the few bytes that spill, is in benchmarks/results. The inverse is
formed rather than W and U of the WY form: Z = (I + M B)^-1 (V - k_start S) is a product of C x C more in the walk, but
S takes part before the solve, so sums cancel as in the recurrence; and no row of W or U has to be written and read.

Precision. All products have fp32 operands and three TF32 parts (delta_sizes.precision), because final states and the
gradients of decays and strengths are fp32 whatever the dtype of q, k and v. With
``torch.set_float32_matmul_precision("high")`` they take one part, a third of the work.

Memory. For each token and value head in fp32: rows of P, M and the inverse (3 C numbers), the corrections (V), and
KDA's decayed rows (4 K). For each chunk that is not its sequence's first the state before it (K V numbers), at most T /
C of them; the backward pass keeps as many gradients of states. Nothing but the inputs is saved between the passes.

Cost at K = V = 128, for each token and value head. The forward multiplies 3 K V + 2 C V + C K numbers in products with
states and pairs, 0.13 MFLOP, three times that in TF32 operations: at a dense TF32 rate of half the bf16 one (about 790
TFLOP/s on an H200) 1 ns. It moves about 7 KB, 4 KB of them states: 1.6 ns at 4.3 TB/s. So memory bounds it where chunks
are independent; with few sequences and heads the latency of the walk does. The backward pass moves and computes about
four times as much. These are counts: none of this has run on a GPU yet.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunk_math import invert_unit_lower
from .delta_sizes import Prepared, Sizes, states_or
from .launch import SHORTEST, launch, padded
from .padding import clear_padding


@triton.jit
def chunk_of(item, heads, cu_seqlens, items, C: tl.constexpr):
    """Head and sequence of a work item, its first token and the end of its sequence as int64, and a 0 for chunk_math.

    There is no item without tokens, which the compiler cannot know.
    """
    block = item // heads
    n = tl.load(items + 2 * block)
    first = tl.load(cu_seqlens + n).to(tl.int64) + tl.load(items + 2 * block + 1).to(tl.int64) * C
    eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
    return item % heads, n, first, eos, (eos <= first).to(tl.int32)


@triton.jit
def load_rows(rows, factors, row_token, row_head, first, here, head, hv, HV: tl.constexpr, k, K: tl.constexpr):
    """fp32 [tokens, BK] of :class:`Rows` from token ``first`` on; 0 where not ``here``.

    Offsets are 64-bit to the first token and 32-bit from there: what all threads share stays out of their registers.
    """
    j = tl.arange(0, here.shape[0])
    at = rows + (first * row_token + tl.cast(head, tl.int64) * row_head) + ((j * row_token)[:, None] + k[None, :])
    tile = tl.load(at, here[:, None] & (k < K)[None, :], 0.0).to(tl.float32)
    if factors is not None:
        tile *= load_head(factors, first, here, hv, HV)[:, None]
    return tile


@triton.jit
def load_head(base, first, here, hv, HV: tl.constexpr):
    """fp32 [tokens] of a contiguous [T, HV]; 0 where not ``here``."""
    at = base + (first * HV + hv) + tl.arange(0, here.shape[0]) * HV
    return tl.load(at, here, 0.0)


@triton.jit
def store_head(base, first, here, hv, HV: tl.constexpr, values):
    at = base + (first * HV + hv) + tl.arange(0, here.shape[0]) * HV
    tl.store(at, values, here)


@triton.jit
def load_heads(base, first, here, hv, HV: tl.constexpr, x, X: tl.constexpr):
    """fp32 [tokens, BX] of a contiguous [T, HV, X]; 0 where not ``here``."""
    j = tl.arange(0, here.shape[0])
    at = base + (first * HV + hv) * X + ((j * (HV * X))[:, None] + x[None, :])
    return tl.load(at, here[:, None] & (x < X)[None, :], 0.0).to(tl.float32)


@triton.jit
def store_heads(base, first, here, hv, HV: tl.constexpr, x, X: tl.constexpr, tile):
    j = tl.arange(0, here.shape[0])
    at = base + (first * HV + hv) * X + ((j * (HV * X))[:, None] + x[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), here[:, None] & (x < X)[None, :])


@triton.jit
def _invert(
    mix, first, eos, zero, hv, HV: tl.constexpr, row_strength, column_strength, inverse, C: tl.constexpr,
    PART: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sets the rows of (I + diag(row_strength) mix diag(column_strength))^-1 of one chunk.

    By halves of PART = 2 ** LEVELS tokens, or, where those would be too short for products, whole.
    """
    x = tl.arange(0, PART)
    middle = first + PART
    upper = first + x < eos
    X = load_heads(mix, first, upper, hv, HV, x, C)
    columns = strengths(column_strength, first, upper, hv, HV)[None, :]
    X *= strengths(row_strength, first, upper, hv, HV)[:, None] * columns
    X = invert_unit_lower(X, zero, PART, LEVELS, PRECISION)
    store_heads(inverse, first, upper, hv, HV, x, C, X)
    if PART < C:
        store_heads(inverse, first, upper, hv, HV, x + PART, C, tl.zeros((PART, PART), tl.float32))
        if middle < eos:
            lower = middle + x < eos
            rows = strengths(row_strength, middle, lower, hv, HV)[:, None]
            Y = load_heads(mix, middle, lower, hv, HV, x + PART, C)
            Y *= rows * strengths(column_strength, middle, lower, hv, HV)[None, :]
            Y = invert_unit_lower(Y, zero, PART, LEVELS, PRECISION)
            store_heads(inverse, middle, lower, hv, HV, x + PART, C, Y)
            between = load_heads(mix, middle, lower, hv, HV, x, C) * (rows * columns)
            between = tl.dot(tl.dot(Y, between, input_precision=PRECISION), X, input_precision=PRECISION)
            store_heads(inverse, middle, lower, hv, HV, x, C, -between)


@triton.jit
def strengths(beta, first, here, hv, HV: tl.constexpr):
    """beta of some tokens, 0 where not ``here``; 1 if there is no ``beta``."""
    if beta is None:
        return tl.zeros(here.shape, tl.float32) + 1.0
    else:
        return load_head(beta, first, here, hv, HV)


@triton.jit
def _solve(
    mix, beta, cu_seqlens, items, count, solve, solve_back, HV: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        _invert(mix, first, eos, zero, hv, HV, None, beta, solve, C, PART, LEVELS, PRECISION)
        if solve_back is not None:
            _invert(mix, first, eos, zero, hv, HV, beta, None, solve_back, C, PART, LEVELS, PRECISION)


def solve_systems(
    sizes: Sizes, mix: Tensor, beta: Tensor, cu_seqlens: Tensor, for_backward: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """``solve`` and, if ``for_backward``, ``solve_back`` of :class:`Prepared`, from the rows of M in ``mix``."""
    solve, solve_back = torch.empty_like(mix), torch.empty_like(mix) if for_backward else None
    part = max(SHORTEST, sizes.chunk // 2)
    launch(
        _solve, sizes.chunk_programs(mix, sizes.value_heads), mix, beta, cu_seqlens, sizes.blocks.items,
        sizes.blocks.count, solve, solve_back, HV=sizes.value_heads, C=sizes.chunk, PART=part,
        LEVELS=part.bit_length() - 1, PRECISION=sizes.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    return solve, solve_back


@triton.jit
def load_over(over, first, hv, HV: tl.constexpr, k, K: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Decay over the chunk at ``first``: fp32 [BK, 1], or a number."""
    if PER_CHANNEL:
        return tl.load(over + (first * HV + hv) * K + k, k < K, 0.0)[:, None]
    else:
        return tl.load(over + first * HV + hv)


@triton.jit
def state_at(base, slot, hv, HV: tl.constexpr, k, K: tl.constexpr, v, V: tl.constexpr):
    """Pointers [BK, BV] into [slots, HV, K, V], and where they are valid; slot is int64."""
    at = base + (slot * HV + hv) * (K * V) + ((k * V)[:, None] + v[None, :])
    return at, (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def load_states(base, slot, hv, HV: tl.constexpr, K: tl.constexpr, v, V: tl.constexpr, BK: tl.constexpr):
    """The rows of a state in tiles of BK; zeros if there is no ``base``."""
    tiles = ()
    for row in tl.static_range(0, K, BK):
        if base is None:
            tiles += (tl.zeros((BK, v.shape[0]), tl.float32),)
        else:
            at, valid = state_at(base, slot, hv, HV, row + tl.arange(0, BK), K, v, V)
            tiles += (tl.load(at, valid, 0.0),)
    return tiles


@triton.jit
def store_states(base, slot, hv, HV: tl.constexpr, K: tl.constexpr, v, V: tl.constexpr, BK: tl.constexpr, tiles):
    for row in tl.static_range(0, K, BK):
        at, valid = state_at(base, slot, hv, HV, row + tl.arange(0, BK), K, v, V)
        tl.store(at, tiles[row // BK], valid)


@triton.jit
def _walk(
    k_start, start_factors, start_token, start_head, k_end, end_factors, end_token, end_head, over, solve,
    v, v_token, v_head, beta, cu_seqlens, order, sequences, initial_state, states, corrections, final_state,
    HV: tl.constexpr, ROW_GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A sequence's states in BV columns of one value head, chunk after chunk:

    Z = (I + M B)^-1 (V - k_start S);  S = over S + k_end^T B Z.
    """
    columns: tl.constexpr = (V + BV - 1) // BV
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(sequences) * (HV * columns), tl.num_programs(0), disable_licm=True):
        n = tl.load(order + item // (HV * columns)).to(tl.int64)
        hv = item // columns % HV
        head = hv // ROW_GROUP
        value = item % columns * BV + tl.arange(0, BV)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
        state = load_states(initial_state, n, hv, HV, K, value, V, BK)
        for first in tl.range(bos, eos, C, disable_licm=True):
            here = first + j < eos
            if first > bos:
                store_states(states, first // C, hv, HV, K, value, V, BK, state)
            right = load_rows(v, None, v_token, v_head, first, here, hv, hv, HV, value, V)
            for row in tl.static_range(0, K, BK):
                k = row + tl.arange(0, BK)
                rows = load_rows(k_start, start_factors, start_token, start_head, first, here, head, hv, HV, k, K)
                right -= tl.dot(rows, state[row // BK], input_precision=PRECISION)
            z = tl.dot(load_heads(solve, first, here, hv, HV, j, C), right, input_precision=PRECISION)
            store_heads(corrections, first, here, hv, HV, value, V, z)
            z *= load_head(beta, first, here, hv, HV)[:, None]
            after = ()
            for row in tl.static_range(0, K, BK):
                k = row + tl.arange(0, BK)
                rows = load_rows(k_end, end_factors, end_token, end_head, first, here, head, hv, HV, k, K)
                kept = load_over(over, first, hv, HV, k, K, PER_CHANNEL) * state[row // BK]
                after += (tl.dot(tl.trans(rows), z, kept, input_precision=PRECISION),)
            state = after
        if final_state is not None:
            store_states(final_state, n, hv, HV, K, value, V, BK, state)


def walk(
    sizes: Sizes,
    prepared: Prepared,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    final_state: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """The states before all chunks but the sequences' first (see :meth:`Sizes.states`), and the corrections.

    ``final_state`` is set for sequences that have tokens. Corrections are fp32 ``[T, HV, V]``, those at beta = 1.
    """
    states = sizes.states(v)
    corrections = v.new_empty(v.shape, dtype=torch.float32)
    launch(
        _walk, sizes.walk_programs(v), *prepared.k_start.arguments, *prepared.k_end.arguments, prepared.over,
        prepared.solve, v, v.stride(0), v.stride(1), beta, cu_seqlens, sizes.order, sizes.sequences, initial_state,
        states, corrections, final_state, **sizes.walk_constants, ROW_GROUP=prepared.k_start.group,
        PER_CHANNEL=prepared.over.dim() == 3,
    )  # fmt: skip
    return states, corrections


@triton.jit
def load_state(outer, inner, n, inside, slot, hv, HV: tl.constexpr, k, K: tl.constexpr, v, V: tl.constexpr):
    """fp32 [BK, BV] between two chunks of a sequence, in ``slot`` of ``inner``, or, if not ``inside``, at an end of
    sequence n, in ``outer``; zeros if there is no ``outer``."""
    if inside:
        at, valid = state_at(inner, slot, hv, HV, k, K, v, V)
        state = tl.load(at, valid, 0.0)
    elif outer is not None:
        at, valid = state_at(outer, n.to(tl.int64), hv, HV, k, K, v, V)
        state = tl.load(at, valid, 0.0)
    else:
        state = tl.zeros((k.shape[0], v.shape[0]), tl.float32)
    return state


@triton.jit
def _outputs(
    q_start, start_factors, start_token, start_head, read, beta, corrections, initial_state, states, cu_seqlens, items,
    count, o, HV: tl.constexpr, ROW_GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = q_start S + P B Z, a chunk and BV columns at a time."""
    columns: tl.constexpr = (V + BV - 1) // BV
    j = tl.arange(0, C)
    for item in tl.range(tl.program_id(0), tl.load(count) * (HV * columns), tl.num_programs(0), disable_licm=True):
        value = item % columns * BV + tl.arange(0, BV)
        hv, n, first, eos, zero = chunk_of(item // columns, HV, cu_seqlens, items, C)
        head = hv // ROW_GROUP
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        here = first + j < eos
        written = load_heads(corrections, first, here, hv, HV, value, V)
        written *= load_head(beta, first, here, hv, HV)[:, None]
        out = tl.dot(load_heads(read, first, here, hv, HV, j, C), written, input_precision=PRECISION)
        for row in tl.range(0, K, BK, disable_licm=True):
            k = row + tl.arange(0, BK)
            state = load_state(initial_state, states, n, first > bos, first // C, hv, HV, k, K, value, V)
            rows = load_rows(q_start, start_factors, start_token, start_head, first, here, head, hv, HV, k, K)
            out = tl.dot(rows, state, out, input_precision=PRECISION)
        store_heads(o, first, here, hv, HV, value, V, out)


def outputs(
    sizes: Sizes,
    prepared: Prepared,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    states: Tensor,
    corrections: Tensor,
    o: Tensor,
) -> None:
    """Sets ``o`` ``[T, HV, V]`` at all tokens of sequences."""
    width = min(32, padded(sizes.value_dim))
    columns = triton.cdiv(sizes.value_dim, width)
    launch(
        _outputs, sizes.chunk_programs(o, sizes.value_heads, columns), *prepared.q_start.arguments, prepared.read, beta,
        corrections, initial_state, states, cu_seqlens, sizes.blocks.items, sizes.blocks.count, o, **sizes.constants,
        ROW_GROUP=prepared.q_start.group, BV=width, num_warps=4,
    )  # fmt: skip


def forward(
    sizes: Sizes,
    prepared: Prepared,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Optional[Tensor],
    want_state: bool,
) -> Tuple[Tensor, Tensor]:
    """What the forward ops return."""
    final_state = states_or(initial_state, sizes.state_shape, v) if want_state else None
    states, corrections = walk(sizes, prepared, v, beta, cu_seqlens, initial_state, final_state)
    o = v.new_empty(v.shape)
    clear_padding(cu_seqlens, o)
    outputs(sizes, prepared, beta, cu_seqlens, initial_state, states, corrections, o)
    return o, beta.new_empty((0,)) if final_state is None else final_state
