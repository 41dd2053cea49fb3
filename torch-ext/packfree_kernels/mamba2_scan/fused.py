"""Mamba-2's whole inner layer: convolution, scan, gated norm and output projection."""

from typing import Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import (
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    value_error,
    with_checked_kinds,
)
from .._dtypes import accumulation_dtype
from ..causal_conv1d import causal_conv1d_fn
from ..causal_conv1d.api import check_activation
from ..packing import Boundaries, resolve_packing
from .api import check_chunk_size, check_state_dtype, mamba_chunk_scan_combined

_OP = "mamba_split_conv1d_scan_combined"


@with_checked_kinds
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Optional[Tensor],
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: Optional[str] = "silu",
    rmsnorm_weight: Optional[Tensor] = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Optional[Tensor] = None,
    outproj_bias: Optional[Tensor] = None,
    headdim: Optional[int] = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: Optional[torch.dtype] = None,
    *,
    cu_seqlens: Optional[Boundaries] = None,
    position_ids: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """What a Mamba-2 layer does between its two projections, and the second of them; sequences apart.

    ``zxbcdt`` holds along its last axis ``2 M`` channels of a gated MLP beside the scan (M is 0 in most models),
    the gate z of ``H P``, the convolved x of ``H P``, B and C of ``G S`` each, and the step sizes of H::

        x, B, C = act(causal_conv(xBC));    y = scan(x, softplus(dt + dt_bias), A, B, C) + D x
        without rmsnorm_weight:   out = y silu(z)
        norm_before_gate:         out = norm(y) rmsnorm_weight silu(z)
        else:                     out = norm(y silu(z)) rmsnorm_weight
        out = [MLP | out] outproj_weight^T + outproj_bias

    ``norm`` divides the ``H P / G`` channels of each group by ``sqrt(mean square + rmsnorm_eps)``; the MLP's M
    channels are ``silu(first half) * second half``.

    Args:
        zxbcdt: ``[B, T, 2 M + 2 H P + 2 G S + H]``, fp32, bf16 or fp16.
        conv1d_weight: ``[H P + 2 G S, W]``, W 2 to 8.
        conv1d_bias: ``[H P + 2 G S]`` or None.
        dt_bias, A: ``[H]``.
        D: ``[H]``, with ``headdim``, or ``[H, P]``.
        chunk_size: at least 1; changes nothing (see :func:`mamba_chunk_scan_combined`).
        initial_states: of the scan, ``[N, H, P, S]`` or None. The convolution starts each sequence from zeros.
        seq_idx, cu_seqlens, position_ids: boundaries, as in :func:`mamba_chunk_scan_combined`.
        dt_limit: smallest and largest step.
        return_final_states: also return the scan's final states.
        activation: of the convolution: None, ``"silu"`` or ``"swish"``.
        rmsnorm_weight: ``[H P]`` or None (no norm).
        rmsnorm_eps: added to the mean square.
        outproj_weight: ``[E, M + H P]`` or None (no projection).
        outproj_bias: ``[E]`` or None.
        headdim: P; needed where D has one entry a head.
        ngroups: G, a divisor of H.
        norm_before_gate: whether the gate multiplies the normed output or what is normed.
        state_dtype: of the states between chunks (see :func:`mamba_chunk_scan_combined`).

    Returns:
        ``[B, T, E]``, or ``[B, T, M + H P]`` without a projection; with ``return_final_states`` also the states
        ``[N, H, P, S]`` in fp32. Padding tokens give 0.

    Precision: the scan and the norm compute in fp32; tensors between the steps have the dtype of ``zxbcdt``.
    Determinism: convolution and scan give a sequence the same bits packed or alone, with any number of threads. The
    norm and the output projection are PyTorch's, which may round by the numbers of rows and threads.
    Gradients: of every tensor but the boundaries.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Source: mamba-ssm, ``mamba_split_conv1d_scan_combined``.
    """
    heads, head_dim = _checked_heads(D, headdim, ngroups)
    inner = heads * head_dim
    state_dim = _checked_state_dim(conv1d_weight, inner, ngroups)
    check_activation(_OP, activation)
    check_chunk_size(_OP, chunk_size)
    check_state_dtype(_OP, state_dtype)
    check_tensor(_OP, "zxbcdt", zxbcdt, 3)
    check_dtype(_OP, "zxbcdt", zxbcdt, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    batch, length, width = zxbcdt.shape
    convolved = inner + 2 * ngroups * state_dim
    beside = width - inner - convolved - heads
    if beside < 0 or beside % 2 != 0:
        least = inner + convolved + heads
        must = f"have {least} channels (2 H P + 2 G S + H), or an even number more"
        raise value_error(_OP, "zxbcdt", must, width)
    _check_norm(rmsnorm_weight, inner, zxbcdt)
    _check_projection(outproj_weight, outproj_bias, beside // 2 + inner, zxbcdt)

    boundaries = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    packing = resolve_packing(_OP, batch, length, zxbcdt.device, **boundaries)
    # Unlike the rest, the MLP and the norm's gate go past the kernels.
    mlp, z, xBC, dt = torch.split(zxbcdt, [beside, inner, convolved, heads], dim=-1)
    xBC = causal_conv1d_fn(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation, **boundaries
    ).transpose(1, 2)
    x, B, C = torch.split(xBC, [inner, ngroups * state_dim, ngroups * state_dim], dim=-1)
    by_head = (batch, length, heads, head_dim)
    by_group = (batch, length, ngroups, state_dim)
    scanned = mamba_chunk_scan_combined(
        x.reshape(by_head),
        dt,
        A,
        B.reshape(by_group),
        C.reshape(by_group),
        chunk_size,
        D,
        z.reshape(by_head) if rmsnorm_weight is None else None,
        dt_bias,
        initial_states,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
        state_dtype=state_dtype,
        **boundaries,
    )
    out, states = scanned if return_final_states else (scanned, None)
    out = out.reshape(batch, length, inner)
    if rmsnorm_weight is not None:
        z = packing.mask_all_padding(z, time_dim=1)
        out = _gated_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if beside:
        gate, value = packing.mask_all_padding(mlp, time_dim=1).chunk(2, dim=-1)
        out = torch.cat([F.silu(gate) * value, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
        if outproj_bias is not None:
            out = packing.mask_all_padding(out, time_dim=1)
    return (out, states) if return_final_states else out


def _gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, before_gate: bool) -> Tensor:
    """RMS norm of each group's channels, times weight and silu(z), in fp32 (fp64 for fp64)."""
    wide = accumulation_dtype(y)
    out, gate = y.to(wide), F.silu(z.to(wide))
    if not before_gate:
        out = out * gate
    grouped = out.unflatten(-1, (groups, y.shape[-1] // groups))
    grouped = grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
    out = grouped.flatten(-2) * weight.to(wide)
    if before_gate:
        out = out * gate
    return out.to(y.dtype)


def _checked_heads(D: Tensor, headdim: Optional[int], ngroups: int) -> Tuple[int, int]:
    """H and P from D and headdim."""
    check_tensor(_OP, "D", D)
    if D.dim() not in (1, 2):
        raise value_error(_OP, "D", "have shape [H] or [H, P]", tuple(D.shape))
    if D.dim() == 1 and headdim is None:
        raise value_error(_OP, "headdim", "be given where D has shape [H]", None)
    heads = D.shape[0]
    head_dim = D.shape[1] if D.dim() == 2 else headdim
    if headdim is not None and headdim != head_dim:
        raise value_error(_OP, "headdim", f"be the {head_dim} columns of D", headdim)
    if head_dim < 1 or heads < 1:
        raise value_error(_OP, "headdim", "be at least 1, with at least one head", (heads, head_dim))
    if ngroups < 1 or heads % ngroups != 0:
        raise value_error(_OP, "ngroups", f"divide the {heads} heads", ngroups)
    return heads, head_dim


def _checked_state_dim(conv1d_weight: Tensor, inner: int, groups: int) -> int:
    """S from the number of convolved channels, H P + 2 G S."""
    check_tensor(_OP, "conv1d_weight", conv1d_weight, 2)
    both = conv1d_weight.shape[0] - inner
    if both < 1 or both % (2 * groups) != 0:
        must = f"have {inner} + 2 * {groups} * S channels (H P + 2 G S)"
        raise value_error(_OP, "conv1d_weight", must, conv1d_weight.shape[0])
    return both // (2 * groups)


def _check_norm(weight: Optional[Tensor], inner: int, zxbcdt: Tensor) -> None:
    if weight is not None:
        check_tensor(_OP, "rmsnorm_weight", weight)
        check_same_device(_OP, "rmsnorm_weight", weight, zxbcdt.device)
        check_shape(_OP, "rmsnorm_weight", weight, (inner,), "[H P]")


def _check_projection(weight: Optional[Tensor], bias: Optional[Tensor], channels: int, zxbcdt: Tensor) -> None:
    if weight is None:
        if bias is not None:
            raise value_error(_OP, "outproj_bias", "come with an outproj_weight", "one alone")
        return
    check_tensor(_OP, "outproj_weight", weight, 2)
    check_same_device(_OP, "outproj_weight", weight, zxbcdt.device)
    check_shape(_OP, "outproj_weight", weight, (weight.shape[0], channels), "[E, M + H P]")
    if bias is not None:
        check_tensor(_OP, "outproj_bias", bias)
        check_shape(_OP, "outproj_bias", bias, (weight.shape[0],), "[E]")
