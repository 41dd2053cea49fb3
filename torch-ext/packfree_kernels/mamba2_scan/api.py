"""Mamba-2's scan and its one-token update, under the names and argument order of mamba-ssm."""

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from .._checks import (
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    type_error,
    value_error,
    with_checked_kinds,
)
from .._dtypes import DTYPES, accumulation_dtype, dtype_name
from .._ops import ops
from ..context_parallel import recurrences
from ..context_parallel.carry import carried
from ..context_parallel.context import shard_of
from ..packing import Boundaries, resolve_packing
from . import autograd  # noqa: F401  registers fakes and gradients

Result = Union[Tensor, Tuple[Tensor, ...]]


@with_checked_kinds
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Boundaries] = None,
    dt_softplus: bool = False,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: Optional[torch.dtype] = None,
    *,
    position_ids: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
) -> Result:
    """Mamba-2's state space recurrence, chunk by chunk, each sequence for itself.

    Formula (one head, state ``h`` ``[P, S]``)::

        d_t = clamp(softplus(dt_t + dt_bias), dt_limit)     (softplus with dt_softplus only)
        h_t = exp(d_t A) h_{t-1} + d_t x_t B_t^T
        y_t = (h_t C_t + D x_t) silu(z_t)

    Args:
        x: ``[B, T, H, P]``, fp32, bf16 or fp16 (fp64 runs too, in plain scalar code), any strides.
        dt: step sizes ``[B, T, H]``, any floating dtype, computed with in fp32.
        A: decay rates ``[H]``, any floating dtype. Normally negative; any sign is taken as it is.
        B, C: ``[B, T, G, S]``, x's dtype. H is a multiple of G; head ``h`` reads group ``h // (H / G)``.
        chunk_size: at least 1. The kernel cuts by its own size, so this changes nothing.
        D: what a token passes around the state, ``[H]`` or ``[H, P]``, or None.
        z: gate ``[B, T, H, P]``, x's dtype, or None.
        dt_bias: ``[H]`` or None.
        initial_states: ``[N, H, P, S]``, one state a sequence (B states without boundaries), any floating dtype.
        seq_idx: labels ``[B, T]`` that never decrease along a row; negative labels are tail padding.
        cu_seqlens: offsets ``[N + 1]`` of the sequences packed in one row (B = 1), int32, int64 or a list of ints.
        dt_softplus: whether steps pass through softplus (the identity above 20).
        dt_limit: smallest and largest step. The gradient of a step outside is 0.
        return_final_states: also return the states after each sequence's last token.
        return_varlen_states: the same states once more, as mamba-ssm returns those of packed sequences.
        state_dtype: a floating dtype or None: what the states between chunks are at least kept in. On a CPU they are
            never rounded, so it changes nothing; on a GPU they are kept in x's dtype, and with a wider one all is
            computed in fp32. Returned states are fp32 in any case.
        position_ids: positions ``[T]``, ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; used if neither of the other two is
            given. Without any boundaries each row is one sequence. States beside labels or positions on a GPU wait for
            their values once, and need ``cu_seqlens`` under ``torch.compile``.
        cp_context: None, or a :class:`ContextParallel`: the tokens are this rank's shard of a pack that is cut over
            ranks. It has the boundaries; initial states are of the samples that begin on this rank, final states of
            those that end on it.

    Returns:
        ``y`` ``[B, T, H, P]`` in x's dtype, exactly 0 at padding tokens; with ``return_final_states``, with
        ``return_varlen_states`` or with both a tuple of y and the states ``[N, H, P, S]`` in fp32 (fp64 for fp64), once
        for each. An empty sequence returns its initial state.

    Precision: products, sums and states in fp32, whatever the input dtype; on a GPU, operands of products in x's dtype.
    Gradients: of all tensors but the boundaries, from y and the states, each in its tensor's dtype. Saved for the
    backward pass: the inputs only.
    Determinism: a sequence's results and gradients are the same bits packed or alone, on any number of threads;
    gradients of A, D and dt_bias repeat.
    Devices: CPU; a GPU through Triton, but for fp64.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not named above (complex ones among them).
        ValueError: shapes that do not fit, a chunk_size below 1, a dt_limit that is no range, a tensor on another
            device, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Example:
        >>> # two samples of 5 and 8 tokens in one row
        >>> y, states = mamba_chunk_scan_combined(
        ...     x, dt, A, B, C, 256, D, cu_seqlens=[0, 5, 13], dt_softplus=True, return_final_states=True
        ... )
        >>> states.shape  # [2, H, P, S]

    Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
    Space Duality" (2024); argument order of mamba-ssm's function of this name. Derivation of both passes: README.md in
    this folder.
    """
    op = "mamba_chunk_scan_combined"
    _check_tokens(op, x, dt, A, B, C, z)
    batch, length, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    check_chunk_size(op, chunk_size)
    check_state_dtype(op, state_dtype)
    out_dtype, dtype = x.dtype, dtype_of_states(x.dtype, state_dtype, x.device)
    if dtype != out_dtype:
        x, B, C = x.to(dtype), B.to(dtype), C.to(dtype)
        z = None if z is None else z.to(dtype)
    dt_min, dt_max = _checked_limit(op, dt_limit)
    want_states = return_final_states or return_varlen_states
    has_states = want_states or initial_states is not None
    shard = None
    if cp_context is not None:
        shard, cu_seqlens = shard_of(op, cp_context, batch, length, x.device, cu_seqlens, seq_idx, position_ids)
    packing = resolve_packing(op, batch, length, x.device, cu_seqlens, seq_idx, position_ids, has_states)
    wide = accumulation_dtype(x)
    D = _checked_skip(op, D, x)
    if dt_bias is not None:
        _check_parameter(op, "dt_bias", dt_bias, x)
        check_shape(op, "dt_bias", dt_bias, (heads,), "[H]")
    if initial_states is not None:
        _check_parameter(op, "initial_states", initial_states, x)
        count = packing.num_states if shard is None else shard.begins
        shape = (count, heads, head_dim, state_dim)
        check_shape(op, "initial_states", initial_states, shape, "[N, H, P, S]")
        initial_states = packing.spread_states(initial_states.to(wide))
    x, dt, B, C = (packing.mask_padding(tensor, time_dim=1) for tensor in (x, dt, B, C))
    z = None if z is None else packing.mask_padding(z, time_dim=1)
    inputs = (
        x.reshape(packing.tokens, heads, head_dim),
        dt.reshape(packing.tokens, heads).to(wide),
        A.to(wide),
        B.reshape(packing.tokens, groups, state_dim),
        C.reshape(packing.tokens, groups, state_dim),
        None if D is None else D.to(wide).contiguous(),
        None if z is None else z.reshape(packing.tokens, heads, head_dim),
        None if dt_bias is None else dt_bias.to(wide),
    )
    steps, want_states = (bool(dt_softplus), dt_min, dt_max), bool(want_states)
    if shard is None:
        y, states = ops.mamba2_scan_fwd(*inputs, packing.cu_seqlens, initial_states, *steps, want_states)
    else:
        rule = recurrences.mamba2(ops.mamba2_scan_fwd, inputs, steps, wide)
        y, states = carried(shard, rule, packing.cu_seqlens, initial_states, want_states)
    y = packing.mask_padding(y.reshape(batch, length, heads, head_dim), time_dim=1).to(out_dtype)
    if not want_states:
        return y
    states = packing.gather_states(states)
    return (y,) + (states,) * (bool(return_final_states) + bool(return_varlen_states))


@with_checked_kinds
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    dt_softplus: bool = False,
    state_batch_indices: Optional[Tensor] = None,
) -> Tensor:
    """Continue each sequence of a batch by one token, from a state that is updated in place.

    Formula (one row p of one head)::

        d = softplus(dt_p + dt_bias_p)     (softplus with dt_softplus only)
        state_p = exp(d A_p) state_p + d x_p B,    y_p = (state_p . C + D_p x_p) silu(z_p)

    Args:
        state: ``[B, H, P, S]`` or, without heads, ``[B, P, S]``; x's dtype or fp32. Updated in place, so it must not be
            an expanded view. With ``state_batch_indices`` a cache of any number of rows in place of B.
        x: ``[B, H, P]`` or ``[B, P]``, fp32, bf16 or fp16 (fp64 too).
        dt: the shape of x, any floating dtype; may be expanded from one step a head.
        A: ``[H, P, S]`` or ``[P, S]``, any floating dtype; may be expanded from one rate a head.
        B, C: ``[B, G, S]`` or, without heads, ``[B, S]``, any floating dtype.
        D, dt_bias: ``[H, P]`` or ``[P]``, any floating dtype, or None.
        z: the shape and dtype of x, or None.
        dt_softplus: whether steps pass through softplus (the identity above 20).
        state_batch_indices: ``[B]`` integers or None: the row of ``state`` that belongs to each row of ``x``; all
            different, but for negative ones: padding slots, whose output is 0 and which touch no state.

    Returns:
        ``y``, the shape and dtype of x.

    Precision: fp32 (fp64 for fp64), whatever the dtypes.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, device or shape.
        NotImplementedError: in the backward pass; call :func:`mamba_chunk_scan_combined` or ``selective_scan_fn`` to
            train. At once where ``state`` requires gradients.
        RuntimeError: rows past the end of ``state`` or named twice. On a GPU nobody looks: a row past the end gives NaN

    Source: mamba-ssm, ``selective_state_update``.
    """
    op = "selective_state_update"
    _check_update(op, state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    has_heads, state_dim = x.dim() == 3, state.shape[-1]
    wide = accumulation_dtype(x)
    # The kernel takes B and C in x's dtype or in that of its sums.
    coefficients = x.dtype if B.dtype == C.dtype == x.dtype else wide
    # The kernel writes rows of the state, so its last axis must be dense; any other layout goes through a copy.
    dense = state if state.stride(-1) == 1 or state_dim <= 1 else state.contiguous()

    def with_heads(tensor: Optional[Tensor], axis: int) -> Optional[Tensor]:
        return tensor if tensor is None or has_heads else tensor.unsqueeze(axis)

    y = ops.selective_state_update(
        with_heads(dense, 1),
        with_heads(x, 1),
        with_heads(dt.to(wide), 1),
        with_heads(A.to(wide), 0),
        with_heads(B.to(coefficients), 1),
        with_heads(C.to(coefficients), 1),
        None if D is None else with_heads(D.to(wide), 0),
        with_heads(z, 1),
        None if dt_bias is None else with_heads(dt_bias.to(wide), 0),
        bool(dt_softplus),
        state_batch_indices,
    )
    if dense is not state:
        state.copy_(dense)
    return y if has_heads else y.squeeze(1)


def _check_update(
    op: str,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    dt_bias: Optional[Tensor],
    state_batch_indices: Optional[Tensor],
) -> None:
    """Everything about the tensors of :func:`selective_state_update`."""
    check_tensor(op, "x", x)
    if x.dim() not in (2, 3):
        raise value_error(op, "x", "have shape [B, H, P] or [B, P]", tuple(x.shape))
    check_dtype(op, "x", x, DTYPES)
    check_served(op, "x", x)
    has_heads = x.dim() == 3
    letters = "[B, H, P" if has_heads else "[B, P"
    check_tensor(op, "state", state, x.dim() + 1)
    check_dtype(op, "state", state, (x.dtype, accumulation_dtype(x)))
    check_same_device(op, "state", state, x.device)
    state_dim, rows = state.shape[-1], x.shape[0]
    if state_batch_indices is not None:
        check_tensor(op, "state_batch_indices", state_batch_indices, 1)
        check_dtype(op, "state_batch_indices", state_batch_indices, (torch.int32, torch.int64))
        check_same_device(op, "state_batch_indices", state_batch_indices, x.device)
        check_shape(op, "state_batch_indices", state_batch_indices, (rows,), "[B]")
        rows, letters = state.shape[0], letters.replace("B", "R")
    check_shape(op, "state", state, (rows, *x.shape[1:], state_dim), f"{letters}, S]")
    letters = letters.replace("R", "B")
    if any(stride == 0 and size > 1 for size, stride in zip(state.shape, state.stride())):
        raise value_error(op, "state", "have memory of its own for every element, being updated", "an expanded tensor")
    _check_parameter(op, "dt", dt, x)
    check_shape(op, "dt", dt, x.shape, f"{letters}]")
    _check_parameter(op, "A", A, x)
    check_shape(op, "A", A, (*x.shape[1:], state_dim), "[H, P, S]" if has_heads else "[P, S]")
    for name, tensor in (("B", B), ("C", C)):
        check_tensor(op, name, tensor, x.dim())
        check_dtype(op, name, tensor, DTYPES)
        check_same_device(op, name, tensor, x.device)
        if has_heads and (tensor.shape[1] < 1 or x.shape[1] % tensor.shape[1] != 0):
            raise value_error(op, name, f"have a number of groups that divides the {x.shape[1]} heads", tensor.shape[1])
        shape = (x.shape[0], B.shape[1], state_dim) if has_heads else (x.shape[0], state_dim)
        check_shape(op, name, tensor, shape, "[B, G, S]" if has_heads else "[B, S]")
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            _check_parameter(op, name, tensor, x)
            check_shape(op, name, tensor, x.shape[1:], "[H, P]" if has_heads else "[P]")
    if z is not None:
        check_tensor(op, "z", z)
        check_dtype(op, "z", z, (x.dtype,))
        check_same_device(op, "z", z, x.device)
        check_shape(op, "z", z, x.shape, f"{letters}]")


def check_chunk_size(op: str, chunk_size: int) -> None:
    if chunk_size < 1:
        raise value_error(op, "chunk_size", "be at least 1", chunk_size)


def check_state_dtype(op: str, state_dtype: object) -> None:
    if state_dtype is not None and state_dtype not in DTYPES:
        raise type_error(op, "state_dtype", "be a floating dtype of torch or None", repr(state_dtype))


def dtype_of_states(dtype: torch.dtype, state_dtype: Optional[torch.dtype], device: torch.device) -> torch.dtype:
    """What x, B and C have to be in, so that the kernel keeps the states between chunks in ``state_dtype`` or wider."""
    if state_dtype is None or device.type == "cpu":
        return dtype
    return dtype if torch.promote_types(dtype, state_dtype) == dtype else torch.float32


def _check_tokens(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Optional[Tensor]
) -> None:
    """Everything about the tensors that run along the tokens, and A."""
    check_tensor(op, "x", x, 4)
    check_dtype(op, "x", x, DTYPES)
    check_served(op, "x", x)
    batch, length, heads, head_dim = x.shape
    if heads < 1 or head_dim < 1:
        raise value_error(op, "x", "have at least one head and a head_dim of at least 1", tuple(x.shape))
    _check_parameter(op, "dt", dt, x)
    check_shape(op, "dt", dt, (batch, length, heads), "[B, T, H]")
    _check_parameter(op, "A", A, x)
    check_shape(op, "A", A, (heads,), "[H]")
    for name, tensor in (("B", B), ("C", C)):
        check_tensor(op, name, tensor, 4)
        _check_dtype_of_x(op, name, tensor, x)
        if tensor.shape[:2] != x.shape[:2] or tensor.shape[3] < 1:
            raise value_error(
                op, name, f"have shape [B, T, G, S] with B, T = {(batch, length)}", tuple(tensor.shape)
            )
        if tensor.shape[2] < 1 or heads % tensor.shape[2] != 0:
            raise value_error(op, name, f"have a number of groups that divides the {heads} heads", tensor.shape[2])
    check_shape(op, "C", C, B.shape, "[B, T, G, S]")
    if z is not None:
        check_tensor(op, "z", z, 4)
        _check_dtype_of_x(op, "z", z, x)
        check_shape(op, "z", z, x.shape, "[B, T, H, P]")


def _check_dtype_of_x(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    check_dtype(op, name, tensor, DTYPES)
    if tensor.dtype != x.dtype:
        raise type_error(op, name, f"have x's dtype {dtype_name(x)}", dtype_name(tensor))
    check_same_device(op, name, tensor, x.device)


def _check_parameter(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, DTYPES)
    check_same_device(op, name, tensor, x.device)


def _checked_skip(op: str, D: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """D as ``[H, P]``."""
    if D is None:
        return None
    _check_parameter(op, "D", D, x)
    heads, head_dim = x.shape[2:]
    if D.dim() == 1:
        check_shape(op, "D", D, (heads,), "[H]")
        return D[:, None].expand(heads, head_dim)
    check_shape(op, "D", D, (heads, head_dim), "[H] or [H, P]")
    return D


def _checked_limit(op: str, dt_limit: Tuple[float, float]) -> Tuple[float, float]:
    low, high = (float(value) for value in dt_limit)
    if not low <= high:
        raise value_error(op, "dt_limit", "be (smallest, largest)", dt_limit)
    return low, high
