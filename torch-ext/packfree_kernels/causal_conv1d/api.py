"""Public functions of the causal convolution, under the names and argument order of causal-conv1d."""

from typing import Any, Optional, Tuple, Union

import torch
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
from .._dtypes import DTYPES
from .._ops import ops
from ..context_parallel.context import shard_of
from ..context_parallel.halo import conv_halo
from ..packing import Boundaries, resolve_packing
from . import autograd  # noqa: F401  registers the gradient

WIDTHS = range(2, 9)  # of the filter that both functions take
ACTIVATIONS = (None, "silu", "swish")  # what both functions apply


@with_checked_kinds
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    cu_seqlens: Optional[Boundaries] = None,
    position_ids: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Causal depthwise convolution that never looks across the start of a sequence.

    Formula:
        ``y[d, t] = act(bias[d] + sum_k weight[d, k] * x[d, t - (W - 1) + k])``, tokens before the sequence's first
        taken from its initial state.

    Args:
        x: ``[B, D, T]``, any strides. Channel-last memory (a transposed ``[B, T, D]``) and token-contiguous memory both
            run without a copy, and ``y`` comes back in the same order.
        weight: ``[D, W]``, W 2 to 8. May have another float dtype than ``x``, as may ``bias``.
        bias: ``[D]`` or None.
        seq_idx: labels ``[B, T]``, never decreasing along a row; negative labels are tail padding.
        initial_states: ``[N, D, W - 1]`` or None (zeros), the tokens before each of the N sequences, oldest first.
        return_final_states: also return the state after each sequence. A sequence shorter than W - 1 tokens keeps the
            younger part of its initial state.
        final_states_out: ``[N, D, W - 1]`` or None. Receives the final states, which are then returned from it.
        activation: None, ``"silu"`` or ``"swish"`` (the same).
        cu_seqlens: offsets ``[N + 1]`` of packed sequences, int32 or int64, ``B == 1``; tokens after the last are
            padding.
        position_ids: ``[T]``, ``[B, T]`` or 3 or 4 such rows; used where neither of the others is given.
        cp_context: None, or a :class:`ContextParallel`: the tokens are this rank's shard of a pack that is cut over
            ranks. It has the boundaries; initial states are of the samples that begin on this rank, final states of
            those that end on it.

        Without boundaries each row is a sequence and N is B. States beside labels or positions on a GPU wait for their
        values once, and need ``cu_seqlens`` under ``torch.compile``.

    Returns:
        y ``[B, D, T]`` in the dtype of ``x``, 0 on padding; with ``return_final_states`` also the final states
        ``[N, D, W - 1]`` in the dtype of ``x``.

    Gradients: x, weight, bias and initial_states, from y and the final states.
    Precision: products and sums in float32 (float64 for float64), whatever the dtypes.
    Determinism: y and dx are the same bits alone or packed, with any number of threads; dweight and dbias repeat.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Source: causal-conv1d, ``causal_conv1d_fn``; the boundaries beside ``seq_idx`` are ours.
    """
    op = "causal_conv1d_fn"
    _check_filter(op, x, weight, bias, activation)
    batch, channels, length = x.shape
    width = weight.shape[1]
    want_states = return_final_states or final_states_out is not None
    has_states = want_states or initial_states is not None
    shard = None
    if cp_context is not None:
        shard, cu_seqlens = shard_of(op, cp_context, batch, length, x.device, cu_seqlens, seq_idx, position_ids)
    packing = resolve_packing(op, batch, length, x.device, cu_seqlens, seq_idx, position_ids, has_states)
    begins, ends = (packing.num_states,) * 2 if shard is None else (shard.begins, shard.ends)
    if initial_states is not None:
        check_tensor(op, "initial_states", initial_states, 3)
        check_same_device(op, "initial_states", initial_states, x.device)
        check_shape(op, "initial_states", initial_states, (begins, channels, width - 1), "[N, D, W - 1]")
        initial_states = packing.spread_states(initial_states)
    if final_states_out is not None:
        check_tensor(op, "final_states_out", final_states_out, 3)
        check_shape(op, "final_states_out", final_states_out, (ends, channels, width - 1), "[N, D, W - 1]")

    x = packing.mask_padding(x, time_dim=2)
    channels_last = x.stride(1) == 1 and (x.stride(2) != 1 or channels > 1)
    if shard is not None:
        initial_states, (x, weight, bias) = conv_halo(shard, x, width, initial_states, (x, weight, bias))
    inner = x.transpose(1, 2) if channels_last else x
    y, final_states = ops.causal_conv1d_fwd(
        inner, weight, bias, packing.cu_seqlens, initial_states, activation is not None, channels_last, want_states
    )
    y = y.transpose(1, 2) if channels_last else y
    y = packing.mask_padding(y, time_dim=2)
    if not want_states:
        return y
    final_states = packing.gather_states(final_states) if shard is None else final_states[:ends]
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return (y, final_states) if return_final_states else y


@with_checked_kinds
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Union[bool, str, None] = None,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """Continue sequences by one or a few tokens each, from a state that is updated in place.

    Args:
        x: ``[B, D]`` or ``[B, D, T]``, the new tokens.
        conv_state: ``[R, D, L]``, ``L >= W - 1``, the dtype of ``x``; updated in place. Its last W - 1 entries are the
            tokens before ``x``, oldest first.
        weight: ``[D, W]``, W 2 to 8.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``; True and False stand for ``"silu"`` and None.
        cache_seqlens: ``[B]`` integers or None. If given, ``conv_state`` is a circular buffer in which token number p
            of a sequence lies at place ``p % L``, and this is the number of tokens seen before ``x``.
        conv_state_indices: ``[B]`` integers or None: the row of ``conv_state`` that belongs to each row of ``x``; all
            different, but for negative ones: padding slots, whose output is 0 and which touch no state.

    Returns:
        ``[B, D]`` or ``[B, D, T]`` as ``x``.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape.
        NotImplementedError: in the backward pass; call :func:`causal_conv1d_fn` to train. At once where ``conv_state``
            requires gradients.
        RuntimeError: state rows past the end or named twice. On a GPU nobody looks: a row past the end gives NaN.

    Source: causal-conv1d, ``causal_conv1d_update``.
    """
    op = "causal_conv1d_update"
    check_tensor(op, "x", x)
    if x.dim() not in (2, 3):
        raise value_error(op, "x", "have shape [B, D] or [B, D, T]", tuple(x.shape))
    tokens = x if x.dim() == 3 else x[:, :, None]
    if isinstance(activation, bool):
        activation = "silu" if activation else None
    _check_filter(op, tokens, weight, bias, activation)
    check_tensor(op, "conv_state", conv_state, 3)
    check_dtype(op, "conv_state", conv_state, (x.dtype,))
    check_same_device(op, "conv_state", conv_state, x.device)
    rows = conv_state.shape[0] if conv_state_indices is not None else x.shape[0]
    if conv_state.shape[:2] != (rows, x.shape[1]) or conv_state.shape[2] < weight.shape[1] - 1:
        must = f"have shape [{rows}, {x.shape[1]}, at least {weight.shape[1] - 1}]"
        raise value_error(op, "conv_state", must, tuple(conv_state.shape))
    for name, value in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if value is not None:
            check_tensor(op, name, value, 1)
            check_dtype(op, name, value, (torch.int32, torch.int64))
            check_shape(op, name, value, (x.shape[0],), "[B]")
    y = ops.causal_conv1d_update(
        tokens, conv_state, weight, bias, cache_seqlens, conv_state_indices, activation is not None
    )
    return y if x.dim() == 3 else y[:, :, 0]


def _check_filter(op: str, x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str]) -> None:
    check_tensor(op, "x", x, 3)
    check_dtype(op, "x", x, DTYPES)
    check_served(op, "x", x)
    check_tensor(op, "weight", weight, 2)
    check_dtype(op, "weight", weight, DTYPES)
    check_same_device(op, "weight", weight, x.device)
    if weight.shape[0] != x.shape[1]:
        raise value_error(op, "weight", f"have shape [D, W] with D = {x.shape[1]}", tuple(weight.shape))
    if not WIDTHS[0] <= weight.shape[1] <= WIDTHS[-1]:
        raise value_error(op, "weight", f"have a width of {WIDTHS[0]} to {WIDTHS[-1]}", weight.shape[1])
    if bias is not None:
        check_tensor(op, "bias", bias, 1)
        check_dtype(op, "bias", bias, DTYPES)
        check_same_device(op, "bias", bias, x.device)
        check_shape(op, "bias", bias, (x.shape[1],), "[D]")
    check_activation(op, activation)


def check_activation(op: str, activation: Optional[str]) -> None:
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise value_error(op, "activation", "be None, 'silu' or 'swish'", repr(activation)[:80])
