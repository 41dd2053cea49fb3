"""Matrices of one chunk that the chunked recurrences share: sums of exponents and the inverse of a triangle.

Tokens of a chunk are numbered from 0; C of them, a power of two. Two tokens i > j part at level s if s is the highest
bit in which i and j differ: i then lies in the upper and j in the lower half of the same 2s tokens. Each pair has one
level, so what is done level by level, for s = 1, 2, 4 ... C / 2, reaches each pair once.

Masks and matrices of 0 and 1 are made where they are used, from ``zero``: a 0 that is loaded, so that the compiler does
not keep all of them in registers across the items of a program's work, where they would crowd out everything else.
"""

import triton
import triton.language as tl


@triton.jit
def level_pairs(s, zero, C: tl.constexpr):
    """bool [C, C]: the pairs i > j that part at level s."""
    i = tl.arange(0, C)[:, None] + zero
    j = tl.arange(0, C)[None, :]
    return ((i ^ j) < 2 * s) & ((i & s) != 0) & ((j & s) == 0)


@triton.jit
def exponents_between(g, zero, C: tl.constexpr):
    """fp32 [C, C]: g_{j+1} + ... + g_i at i >= j, 0 above the diagonal, from g [C].

    Each is a sum over exactly the tokens it spans: a difference of running sums would lose the small decays behind a
    strong one, and a quotient of decays overflows.
    """
    i = tl.arange(0, C)[:, None] + zero
    j = tl.arange(0, C)[None, :]
    return tl.cumsum(tl.where(i > j, g[:, None], 0.0), 0)


@triton.jit
def decay_between(g, zero, C: tl.constexpr):
    """fp32 [C, C]: exp of :func:`exponents_between` at i >= j, 0 above the diagonal."""
    i = tl.arange(0, C)[:, None] + zero
    j = tl.arange(0, C)[None, :]
    return tl.where(i >= j, tl.exp(exponents_between(g, zero, C)), 0.0)


@triton.jit
def double_spans(inside, behind, s):
    """From sums over blocks of s tokens to those over blocks of 2s, fp32 [C, X], along axis 0.

    ``inside`` sums from the first token of a token's block to the token itself, ``behind`` from the token after it to
    the last one of the block. Both grow by terms they span, and by no others.
    """
    i = tl.arange(0, inside.shape[0])[:, None] + tl.zeros(inside.shape, tl.int32)
    pair = i & ~(2 * s - 1)
    is_upper = (i & s) != 0
    lower_half = tl.gather(inside, pair + s - 1, 0)
    upper_half = tl.gather(inside, pair + 2 * s - 1, 0)
    return inside + tl.where(is_upper, lower_half, 0.0), behind + tl.where(is_upper, 0.0, upper_half)


@triton.jit
def invert_unit_lower(a, zero, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangle a fp32 [C, C], C = 2 ** LEVELS.

    Forward substitution by blocks that double: of two inverted blocks X and Y on the diagonal and a' between them, the
    block between becomes -Y a' X. No power of a is ever formed, which could be far larger than the inverse.
    """
    inverse = tl.where(tl.arange(0, C)[:, None] + zero == tl.arange(0, C)[None, :], 1.0, 0.0)
    inverse -= tl.where(level_pairs(1, zero, C), a, 0.0)
    for level in tl.range(1, LEVELS, disable_licm=True):
        between = tl.dot(tl.where(level_pairs(1 << level, zero, C), a, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, between, input_precision=PRECISION)
    return inverse
