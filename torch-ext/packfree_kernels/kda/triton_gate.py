"""KDA's gate on a GPU: log-decays from what a model projects, and back."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton.delta import chunk_of, load_heads, store_head, store_heads
from .._triton.delta_sizes import Sizes
from .._triton.launch import launch

# The rate is cut at exp(_MOST_LOG_RATE), for the reasons given in kernel_src/cpu/kda/gate-inl.h.
_MOST_LOG_RATE = tl.constexpr(70.0)
_FAR_BELOW = tl.constexpr(-40.0)


@triton.jit
def _rate_and_cut(a_log):
    """exp(a_log) as far as it is not cut, and how much larger a_log is than its logarithm."""
    most = tl.where(a_log > _MOST_LOG_RATE, _MOST_LOG_RATE, a_log)
    return tl.exp(most), tl.where(a_log > _MOST_LOG_RATE, a_log - _MOST_LOG_RATE, 0.0)


@triton.jit
def _with_cut(y, x, cut):
    """Softplus or its derivative y, where they are e^x times what was cut off the rate."""
    return tl.where(x < _FAR_BELOW, tl.exp(tl.minimum(x + cut, 0.0)), y)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact to fp32 where exp(x) is small too."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    # What 1 + small rounds away is put back in proportion.
    exact = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + exact


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gate_input(g, dt_bias, first, here, hv, HV: tl.constexpr, k, K: tl.constexpr):
    x = load_heads(g, first, here, hv, HV, k, K)
    if dt_bias is not None:
        x += tl.load(dt_bias + hv * K + k, k < K, 0.0)[None, :]
    return x


@triton.jit
def _gate(
    g, a_log, dt_bias, lower_bound, cu_seqlens, items, count, log_decay, HV: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        here = first + tl.arange(0, C) < eos
        rate, cut = _rate_and_cut(tl.load(a_log + hv))
        for row in tl.range(0, K, BK, disable_licm=True):
            k = row + tl.arange(0, BK)
            x = _gate_input(g, dt_bias, first, here, hv, HV, k, K)
            if BOUNDED:
                x = _sigmoid(rate * x) * lower_bound
            else:
                x = _with_cut(_softplus(x), x, cut) * -rate
            store_heads(log_decay, first, here, hv, HV, k, K, x)


@triton.jit
def _gate_gradients(
    g, a_log, dt_bias, lower_bound, d_log_decay, cu_seqlens, items, count, dg, d_rates, HV: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The gradient of g, and in d_rates what each token gives to that of a_log."""
    for item in tl.range(tl.program_id(0), tl.load(count) * HV, tl.num_programs(0), disable_licm=True):
        hv, n, first, eos, zero = chunk_of(item, HV, cu_seqlens, items, C)
        here = first + tl.arange(0, C) < eos
        rate, cut = _rate_and_cut(tl.load(a_log + hv))
        by_rate = tl.zeros((C,), tl.float32)
        for row in tl.range(0, K, BK, disable_licm=True):
            k = row + tl.arange(0, BK)
            x = _gate_input(g, dt_bias, first, here, hv, HV, k, K)
            d = load_heads(d_log_decay, first, here, hv, HV, k, K)
            if BOUNDED:
                s = _sigmoid(rate * x)
                dx = d * s * (1.0 - s) * (lower_bound * rate)
                by_rate += tl.sum(dx * x, 1)
            else:
                d *= -rate
                dx = d * _with_cut(_sigmoid(x), x, cut)
                softplus = _with_cut(_softplus(x), x, cut)
                by_rate += tl.sum(tl.where((k < K)[None, :], d * softplus, 0.0), 1)
            store_heads(dg, first, here, hv, HV, k, K, dx)
        store_head(d_rates, first, here, hv, HV, by_rate)


def gated(
    sizes: Sizes,
    g: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
) -> Tensor:
    """Log-decays ``[T, HV, K]`` at all tokens of sequences; g itself without ``a_log``."""
    if a_log is None:
        return g
    log_decay = torch.empty_like(g)
    launch(_gate, sizes.chunk_programs(g, sizes.value_heads), g, a_log, dt_bias, _number(lower_bound), cu_seqlens,
           sizes.blocks.items, sizes.blocks.count, log_decay, **_constants(sizes, lower_bound))  # fmt: skip
    return log_decay


def gate_gradients(
    sizes: Sizes,
    g: Tensor,
    a_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    cu_seqlens: Tensor,
    d_log_decay: Tensor,
) -> Tuple[Tensor, Tensor]:
    """At all tokens of sequences, the gradient of g, and ``[T, HV]`` what each token gives to that of a_log.

    Without ``a_log`` the latter has no elements.
    """
    if a_log is None:
        return d_log_decay, g.new_empty((0,))
    dg, d_rates = torch.empty_like(g), g.new_empty(g.shape[:2])
    launch(_gate_gradients, sizes.chunk_programs(g, sizes.value_heads), g, a_log, dt_bias, _number(lower_bound),
           d_log_decay, cu_seqlens, sizes.blocks.items, sizes.blocks.count, dg, d_rates,
           **_constants(sizes, lower_bound))  # fmt: skip
    return dg, d_rates


def _number(lower_bound: Optional[float]) -> float:
    return 0.0 if lower_bound is None else float(lower_bound)


def _constants(sizes: Sizes, lower_bound: Optional[float]) -> dict:
    width = sizes.constants["BK"]
    return dict(HV=sizes.value_heads, K=sizes.key_dim, C=sizes.chunk, BK=width, BOUNDED=lower_bound is not None)
