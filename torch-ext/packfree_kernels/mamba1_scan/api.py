"""Public functions of Mamba-1, under the names and argument order of mamba-ssm."""

from typing import Any, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import (
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    value_error,
    with_checked_kinds,
)
from .._dtypes import DTYPES, accumulation_dtype
from .._ops import ops
from ..causal_conv1d import causal_conv1d_fn
from ..context_parallel import recurrences
from ..context_parallel.carry import carried
from ..context_parallel.context import shard_of
from ..packing import Boundaries, resolve_packing
from . import autograd  # noqa: F401  registers the gradient


@with_checked_kinds
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    delta_bias: Optional[Tensor] = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Boundaries] = None,
    position_ids: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Selective state-space scan that starts anew, or from a given state, at each sequence's first token.

    Formula:
        ``s = softplus(delta + delta_bias)`` with ``delta_softplus``, else the sum itself (softplus is the identity
        above 20, as PyTorch's); ``h_t = exp(s_t A) h_{t-1} + s_t u_t B_t``; ``y_t = (C_t . h_t + D u_t) silu(z_t)``.

    Args:
        u: ``[B, D, T]``, any strides. Channel-last memory (a transposed ``[B, T, D]``) and token-contiguous memory both
            run without a copy, and ``y`` comes back in the order of ``u``.
        delta: ``[B, D, T]``. May lie in the other order, and have another float dtype, as may all that follow.
        A: ``[D, N]``, real.
        B: ``[D, N]`` the same for all tokens, ``[B, N, T]``, or ``[B, G, N, T]`` where G divides D: channel ``d`` reads
            group ``d // (D / G)``.
        C: like ``B``, of either form.
        D: ``[D]`` or None (zeros).
        z: ``[B, D, T]`` or None (no gate).
        delta_bias: ``[D]`` or None (zeros).
        delta_softplus: whether the step goes through softplus.
        return_last_state: also return the state after each sequence.
        seq_idx: labels ``[B, T]``, never decreasing along a row; negative labels are tail padding.
        cu_seqlens: offsets ``[S + 1]`` of S packed sequences, int32 or int64, ``B == 1``; tokens after the last are
            padding.
        position_ids: ``[T]``, ``[B, T]`` or 3 or 4 such rows; used where neither of the others is given.
        initial_states: ``[S, D, N]`` or None (zeros), the state before each sequence.
        cp_context: None, or a :class:`ContextParallel`: the tokens are this rank's shard of a pack that is cut over
            ranks. It has the boundaries; initial states are of the samples that begin on this rank, final states of
            those that end on it.

        Without boundaries each row is a sequence and S is B. States beside labels or positions on a GPU wait for their
        values once, and need ``cu_seqlens`` under ``torch.compile``.

    Returns:
        y ``[B, D, T]`` in the dtype of ``u``, 0 on padding; with ``return_last_state`` also the last states
        ``[S, D, N]`` in float32 (float64 for float64). An empty sequence returns its initial state.

    Gradients: u, delta, A, B, C, D, z, delta_bias and initial_states, from y and the last states.
    Precision: all arithmetic and the states in float32, whatever the dtypes; float64 where ``u`` is float64.
    Determinism: y, the states and the gradients of u, delta, z, initial_states and of B and C per token are the same
        bits alone or packed, with any number of threads; the gradients of the parameters repeat.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Source: mamba-ssm, ``selective_scan_fn``; boundaries, initial states and their gradients are ours.
    """
    op = "selective_scan_fn"
    check_tensor(op, "u", u, 3)
    check_dtype(op, "u", u, DTYPES)
    check_served(op, "u", u)
    batch, channels, length = u.shape
    _check(op, "delta", delta, u, (batch, channels, length), "[B, D, T]")
    check_tensor(op, "A", A, 2)
    _check(op, "A", A, u, (channels, A.shape[1]), "[D, N]")
    states = A.shape[1]
    if states == 0:
        raise value_error(op, "A", "have at least one state", tuple(A.shape))
    B = _coefficients(op, "B", B, u, states)
    C = _coefficients(op, "C", C, u, states)
    B, C = _same_groups(op, B, C)
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None:
            _check(op, name, vector, u, (channels,), "[D]")
    if z is not None:
        _check(op, "z", z, u, (batch, channels, length), "[B, D, T]")
    has_states = return_last_state or initial_states is not None
    shard = None
    if cp_context is not None:
        shard, cu_seqlens = shard_of(op, cp_context, batch, length, u.device, cu_seqlens, seq_idx, position_ids)
    packing = resolve_packing(op, batch, length, u.device, cu_seqlens, seq_idx, position_ids, has_states)
    if initial_states is not None:
        count = packing.num_states if shard is None else shard.begins
        _check(op, "initial_states", initial_states, u, (count, channels, states), "[S, D, N]")
        initial_states = packing.spread_states(initial_states)

    u, delta = packing.mask_padding(u, time_dim=2), packing.mask_padding(delta, time_dim=2)
    B, C = (x if x.dim() == 2 else packing.mask_padding(x, time_dim=3) for x in (B, C))
    channels_last = u.stride(1) == 1 and (u.stride(2) != 1 or channels > 1)
    delta, B, C = (_kernel_dtype(x, u) for x in (delta, B, C))
    z = None if z is None else _kernel_dtype(packing.mask_padding(z, time_dim=2), u)
    inputs = (u, delta, A, B, C, D, z, delta_bias)
    steps, want_state = (bool(delta_softplus), channels_last), bool(return_last_state)
    if shard is None:
        y, last_states = ops.mamba1_scan_fwd(*inputs, packing.cu_seqlens, initial_states, *steps, want_state)
    else:
        rule = recurrences.mamba1(ops.mamba1_scan_fwd, inputs, steps, accumulation_dtype(u))
        y, last_states = carried(shard, rule, packing.cu_seqlens, initial_states, want_state)
    y = packing.mask_padding(y.transpose(1, 2) if channels_last else y, time_dim=2)
    return (y, packing.gather_states(last_states)) if return_last_state else y


@with_checked_kinds
def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Optional[Tensor],
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Optional[Tensor],
    A: Tensor,
    B: Optional[Tensor] = None,
    C: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    delta_bias: Optional[Tensor] = None,
    B_proj_bias: Optional[Tensor] = None,
    C_proj_bias: Optional[Tensor] = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Optional[Tensor] = None,
    c_rms_weight: Optional[Tensor] = None,
    dt_rms_weight: Optional[Tensor] = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Boundaries] = None,
    position_ids: Optional[Tensor] = None,
) -> Tensor:
    """A whole Mamba-1 mixer behind its input projection: convolution, projections, scan, gate, output projection.

    Formula:
        ``x, z = xz``; ``x = silu(conv(x))``; ``dt, B, C = x_proj(x)``; ``delta = norm(delta_proj(dt))``;
        ``y = scan(x, delta, A, norm(B), norm(C), D, z, delta_bias)``; the result is ``out_proj(y)``. The norms are
        there where their weights are given: ``norm(v) = weight v / sqrt(mean(v^2) + eps)``, computed in float32.
        As in mamba-ssm, the step is normalised behind its projection, over all D channels. transformers' FalconMamba
        normalises ``dt`` before it in eager mode, which is another function.

    Args:
        xz: ``[B, 2 D, T]``, any strides: the convolution's input and the gate.
        conv1d_weight: ``[D, 1, W]`` or ``[D, W]``, W 2 to 8.
        conv1d_bias: ``[D]`` or None.
        x_proj_weight: ``[R + N + N, D]``; without the rows of B or C that are given as arguments.
        delta_proj_weight: ``[D, R]``.
        out_proj_weight: ``[H, D]``.
        out_proj_bias: ``[H]`` or None.
        A: ``[D, N]``, real.
        B, C: None (from ``x_proj``), or as :func:`selective_scan_fn` takes them.
        D, delta_bias: ``[D]`` or None.
        B_proj_bias, C_proj_bias: ``[N]`` or None, added to what ``x_proj`` gives.
        delta_softplus: whether the step goes through softplus.
        checkpoint_lvl: accepted for mamba-ssm's sake; the backward recomputes the states in any case.
        b_rms_weight, c_rms_weight: ``[N]`` or None.
        dt_rms_weight: ``[D]`` or None.
        b_c_dt_rms_eps: of the norms.
        seq_idx, cu_seqlens, position_ids: boundaries, as in :func:`selective_scan_fn`.

    Returns:
        ``[B, T, H]``, 0 on padding.

    Gradients: every tensor. Made of this package's convolution and scan, which give a sequence the same bits packed or
    alone, with any number of threads, and of PyTorch's matrix products and norms, which may round by the numbers of
    rows and threads.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Source: mamba-ssm, ``mamba_inner_fn``; boundaries are ours.
    """
    op = "mamba_inner_fn"
    check_tensor(op, "xz", xz, 3)
    check_dtype(op, "xz", xz, DTYPES)
    for name, tensor in (("A", A), ("x_proj_weight", x_proj_weight), ("delta_proj_weight", delta_proj_weight)):
        check_tensor(op, name, tensor, 2)
    check_dtype(op, "A", A, DTYPES)
    channels, states = A.shape
    rank = delta_proj_weight.shape[1]
    batch, _, length = xz.shape
    check_shape(op, "xz", xz, (batch, 2 * channels, length), "[B, 2 D, T]")
    check_shape(op, "delta_proj_weight", delta_proj_weight, (channels, rank), "[D, R]")
    from_x = [rank] + [states] * ((B is None) + (C is None))
    check_shape(op, "x_proj_weight", x_proj_weight, (sum(from_x), channels), "[R + states made from x, D]")
    check_tensor(op, "conv1d_weight", conv1d_weight)
    if dt_rms_weight is not None:
        check_shape(op, "dt_rms_weight", dt_rms_weight, (channels,), "[D]")
    for name, given, bias, weight in (("B", B, B_proj_bias, b_rms_weight), ("C", C, C_proj_bias, c_rms_weight)):
        if given is not None and (bias is not None or weight is not None):
            raise value_error(op, name, "be None where its projection's bias or norm is given", "a tensor")
        for tensor in (bias, weight):
            if tensor is not None:
                check_shape(op, f"{name}'s bias and norm", tensor, (states,), "[N]")
    cuts = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    packing = resolve_packing(op, batch, length, xz.device, **cuts)

    x, z = xz.chunk(2, dim=1)
    taps = conv1d_weight[:, 0] if conv1d_weight.dim() == 3 else conv1d_weight
    x = causal_conv1d_fn(x, taps, conv1d_bias, activation="silu", **cuts)
    # Made from x, per token: the steps' low-rank form [B, T, R], then B and C [B, T, N] where they are not given.
    parts = list(F.linear(x.transpose(1, 2), x_proj_weight).split(from_x, dim=-1))
    low_rank = parts.pop(0)
    if B is None:
        B = _projected(parts.pop(0), B_proj_bias, b_rms_weight, b_c_dt_rms_eps)
    if C is None:
        C = _projected(parts.pop(0), C_proj_bias, c_rms_weight, b_c_dt_rms_eps)
    delta = _rms_norm(F.linear(low_rank, delta_proj_weight), dt_rms_weight, b_c_dt_rms_eps)
    y = selective_scan_fn(x, delta.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus, **cuts)
    if out_proj_bias is None:
        return F.linear(y.transpose(1, 2), out_proj_weight)
    out = F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias.to(out_proj_weight.dtype))
    return packing.mask_all_padding(out, time_dim=1)


def _projected(x: Tensor, bias: Optional[Tensor], norm: Optional[Tensor], eps: float) -> Tensor:
    """B or C as the scan takes it, [B, N, T], from [B, T, N]."""
    x = x if bias is None else x + bias.to(x.dtype)
    return _rms_norm(x, norm, eps).transpose(1, 2)


def _rms_norm(x: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.to(accumulation_dtype(x))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _check(op: str, name: str, tensor: Tensor, u: Tensor, shape: Tuple[int, ...], letters: str) -> None:
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, DTYPES)
    check_same_device(op, name, tensor, u.device)
    check_shape(op, name, tensor, shape, letters)


def _coefficients(op: str, name: str, tensor: Tensor, u: Tensor, states: int) -> Tensor:
    """B or C as [D, N] or [B, G, N, T]."""
    check_tensor(op, name, tensor)
    batch, channels, length = u.shape
    if tensor.dim() == 2:
        _check(op, name, tensor, u, (channels, states), "[D, N]")
        return tensor
    if tensor.dim() == 3:
        _check(op, name, tensor, u, (batch, states, length), "[B, N, T]")
        return tensor[:, None]
    if tensor.dim() != 4:
        raise value_error(op, name, "have shape [D, N], [B, N, T] or [B, G, N, T]", tuple(tensor.shape))
    groups = tensor.shape[1]
    _check(op, name, tensor, u, (batch, groups, states, length), "[B, G, N, T]")
    if groups == 0 or channels % groups:
        raise value_error(op, name, f"have a number of groups that divides the {channels} channels", groups)
    return tensor


def _same_groups(op: str, B: Tensor, C: Tensor) -> Tuple[Tensor, Tensor]:
    """One group of the one serves all groups of the other."""
    if B.dim() == 2 or C.dim() == 2 or B.shape[1] == C.shape[1]:
        return B, C
    groups = max(B.shape[1], C.shape[1])
    if min(B.shape[1], C.shape[1]) != 1:
        raise value_error(op, "C", f"have as many groups as B ({B.shape[1]})", C.shape[1])
    return B.expand(-1, groups, -1, -1), C.expand(-1, groups, -1, -1)


def _kernel_dtype(tensor: Tensor, u: Tensor) -> Tensor:
    """float64 where u is, and only there: what is wider than the arithmetic is rounded to it."""
    if (u.dtype == torch.float64) == (tensor.dtype == torch.float64):
        return tensor
    return tensor.to(accumulation_dtype(u))
