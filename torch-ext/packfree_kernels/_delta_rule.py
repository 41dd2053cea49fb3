"""What the public functions of the delta rules share: argument checks, and the call of an op on packed tokens."""

import math
import warnings
from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._checks import (
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    value_error,
)
from ._dtypes import DTYPES, accumulation_dtype
from ._gates import sigmoid
from .context_parallel import recurrences
from .context_parallel.carry import carried
from .context_parallel.context import shard_of
from .packing import Boundaries, Packing, check_cu_seqlens, reads_values, resolve_packing

MAX_HEAD_DIM = 256


class Options(NamedTuple):
    """What each function may be told beside its tokens and its gate; see ``chunk_gated_delta_rule``."""

    scale: Optional[float]
    initial_state: Optional[Tensor]
    output_final_state: bool
    l2norm: bool
    beta_sigmoid: bool
    allow_neg_eigval: bool
    state_v_first: bool
    cu_seqlens: Optional[Boundaries]
    cu_seqlens_cpu: Optional[Tensor]
    seq_idx: Optional[Tensor]
    position_ids: Optional[Tensor]
    cp_context: Optional[Any] = None


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Everything about queries, keys and values."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, tensor, 4)
        check_dtype(op, name, tensor, DTYPES)
        check_same_device(op, name, tensor, q.device)
        check_served(op, name, tensor)
    batch, length, key_heads, key_dim = q.shape
    if key_heads < 1 or not 1 <= key_dim <= MAX_HEAD_DIM:
        raise value_error(op, "q", f"have at least one head and a head_dim of 1 to {MAX_HEAD_DIM}", tuple(q.shape))
    check_shape(op, "k", k, q.shape, "[B, T, H, K]")
    value_heads, value_dim = v.shape[2:]
    if v.shape[:2] != q.shape[:2]:
        raise value_error(op, "v", f"have shape [B, T, HV, V] with B, T = {(batch, length)}", tuple(v.shape))
    if value_heads < 1 or value_heads % key_heads != 0:
        raise value_error(op, "v", f"have a num_heads that is a multiple of q's {key_heads}", value_heads)
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        raise value_error(op, "v", f"have a head_dim of 1 to {MAX_HEAD_DIM}", value_dim)


def check_by_token(op: str, name: str, tensor: Tensor, v: Tensor, channels: str = "", size: int = 0) -> None:
    """A number for each token and value head, ``[B, T, HV]``, or ``size`` of them, named by the letter ``channels``."""
    shape, letters = tuple(v.shape[:3]), "[B, T, HV"
    if channels:
        shape, letters = (*shape, size), f"{letters}, {channels}"
    check_tensor(op, name, tensor, len(shape))
    check_dtype(op, name, tensor, DTYPES)
    check_same_device(op, name, tensor, v.device)
    check_shape(op, name, tensor, shape, f"{letters}]")


def checked_finite(op: str, argument: str, value: float) -> float:
    if not -math.inf < value < math.inf:  # math.isfinite breaks the graph of a number that is an input
        raise value_error(op, argument, "be finite", value)
    return float(value)


def widest_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)


def sum_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """What sums, states, decays and strengths are in."""
    return accumulation_dtype(q, k, v)


def checked_rate(op: str, A_log: Tensor, v: Tensor, wide: torch.dtype) -> Tensor:
    """A gate's A_log as ``[HV]``."""
    check_tensor(op, "A_log", A_log)
    check_dtype(op, "A_log", A_log, DTYPES)
    check_same_device(op, "A_log", A_log, v.device)
    if A_log.numel() != v.shape[2]:
        raise value_error(op, "A_log", f"have HV = {v.shape[2]} elements", f"shape {tuple(A_log.shape)}")
    return A_log.reshape(v.shape[2]).to(wide)


def check_no_gate(op: str, **arguments: Optional[Tensor]) -> None:
    """Parameters of a gate that is not asked for would be left out of the result without a word."""
    for name, value in arguments.items():
        if value is not None:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise value_error(op, name, "be None without use_gate_in_kernel", got)


def check_chunks(op: str, chunk_size: object, sizes: Tuple[int, ...]) -> None:
    """Upstream's size of a chunk, one of its ``sizes``."""
    if isinstance(chunk_size, bool) or chunk_size not in sizes:
        raise value_error(op, "chunk_size", f"be one of {', '.join(map(str, sizes))}", repr(chunk_size))


def check_chunk_indices(op: str, chunk_indices: Optional[Tensor], cu_seqlens: Optional[Boundaries]) -> None:
    if chunk_indices is None:
        return
    check_tensor(op, "chunk_indices", chunk_indices, 2)
    check_dtype(op, "chunk_indices", chunk_indices, (torch.int32, torch.int64))
    if chunk_indices.shape[1] != 2:
        raise value_error(op, "chunk_indices", "have shape [chunks, 2]", tuple(chunk_indices.shape))
    if cu_seqlens is None:
        raise value_error(op, "chunk_indices", "come with cu_seqlens, whose chunks they count", "them alone")


def states_lie_v_first(op: str, state_v_first: bool, transpose_state_layout: Optional[bool]) -> bool:
    """Whether states are ``[V, K]``, by the argument of today or by its old name."""
    if transpose_state_layout is None:
        return bool(state_v_first)
    if state_v_first:
        raise value_error(op, "transpose_state_layout", "be left out beside state_v_first, its new name", "both")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return bool(transpose_state_layout)


def _check_host_offsets(op: str, host: Optional[Tensor], given: Optional[Boundaries], packing: Packing) -> None:
    """``cu_seqlens_cpu`` is a copy of ``cu_seqlens``, as far as that may be looked at."""
    if host is None:
        return
    check_tensor(op, "cu_seqlens_cpu", host)
    if host.device.type == "cuda":
        raise value_error(op, "cu_seqlens_cpu", "be on a CPU", host.device)
    if given is None:
        raise value_error(op, "cu_seqlens_cpu", "come with cu_seqlens, whose copy it is", "it alone")
    host = check_cu_seqlens(op, host, packing.tokens, host.device, "cu_seqlens_cpu")
    if host.shape != packing.cu_seqlens.shape:
        raise value_error(op, "cu_seqlens_cpu", f"have {packing.num_sequences + 1} offsets like cu_seqlens", len(host))
    if reads_values(host) and reads_values(packing.cu_seqlens) and not torch.equal(host, packing.cu_seqlens.cpu()):
        raise value_error(op, "cu_seqlens_cpu", f"equal cu_seqlens, {packing.cu_seqlens.tolist()}", host.tolist())


def _checked_states(
    op: str, options: Options, count: int, shape: Tuple[int, int, int], device: torch.device
) -> Tensor:
    """The caller's ``count`` states as ``[N, HV, K, V]``; ``shape`` is ``(HV, K, V)``."""
    state, (value_heads, key_dim, value_dim) = options.initial_state, shape
    check_tensor(op, "initial_state", state, 4)
    check_dtype(op, "initial_state", state, DTYPES)
    check_same_device(op, "initial_state", state, device)
    if options.state_v_first:
        expected = (count, value_heads, value_dim, key_dim)
        check_shape(op, "initial_state", state, expected, "[N, HV, V, K]")
        state = state.transpose(-1, -2)
    else:
        check_shape(op, "initial_state", state, (count, *shape), "[N, HV, K, V]")
    return state


# ---- the call -------------------------------------------------------------------------------------------------------


def run_packed(
    op: str,
    kernel: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: tuple,
    options: Options,
    decay: Optional[Callable[[Tensor], Tensor]] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """What the public function ``op`` returns, by ``kernel``, from tokens that have been checked.

    ``gate`` holds the arguments that the op takes behind beta; ``decay`` makes the log-decay of ``g`` where the op does
    not.
    """
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    boundaries, shard = (options.cu_seqlens, options.seq_idx, options.position_ids), None
    if options.cp_context is not None:
        shard, offsets = shard_of(op, options.cp_context, batch, length, q.device, *boundaries)
        boundaries = (offsets, None, None)
    has_states = options.initial_state is not None or options.output_final_state
    packing = resolve_packing(op, batch, length, q.device, *boundaries, has_states)
    _check_host_offsets(op, options.cu_seqlens_cpu, boundaries[0], packing)
    scale = key_dim**-0.5 if options.scale is None else checked_finite(op, "scale", options.scale)
    out_dtype, dtype, wide = q.dtype, widest_dtype(q, k, v), sum_dtype(q, k, v)
    initial_state = None
    if options.initial_state is not None:
        shape = (value_heads, key_dim, value_dim)
        count = packing.num_states if shard is None else shard.begins
        initial_state = packing.spread_states(_checked_states(op, options, count, shape, q.device)).to(wide)
    g, beta = _finished(op, packing, g.to(wide), beta.to(wide), decay, options)
    q, k, v, g, beta = (packing.mask_padding(tensor, time_dim=1) for tensor in (q, k, v, g, beta))
    tokens = (
        q.to(dtype).reshape(packing.tokens, key_heads, key_dim),
        k.to(dtype).reshape(packing.tokens, key_heads, key_dim),
        v.to(dtype).reshape(packing.tokens, value_heads, value_dim),
        g.reshape(packing.tokens, *g.shape[2:]),
        beta.reshape(packing.tokens, value_heads),
    )
    l2norm, want_state = bool(options.l2norm), bool(options.output_final_state)
    if shard is None:
        o, final_state = kernel(*tokens, *gate, packing.cu_seqlens, initial_state, scale, l2norm, want_state)
    else:
        rule = recurrences.delta_rule(kernel, tokens, gate, scale, l2norm)
        o, final_state = carried(shard, rule, packing.cu_seqlens, initial_state, want_state)
    o = packing.mask_padding(o.reshape(batch, length, value_heads, value_dim), time_dim=1).to(out_dtype)
    if not options.output_final_state:
        return o, None
    final_state = packing.gather_states(final_state)
    return o, final_state.transpose(-1, -2).contiguous() if options.state_v_first else final_state


def _finished(
    op: str,
    packing: Packing,
    g: Tensor,
    beta: Tensor,
    decay: Optional[Callable[[Tensor], Tensor]],
    options: Options,
) -> Tuple[Tensor, Tensor]:
    """Log-decays and strengths from what the model projects."""
    if options.allow_neg_eigval and not options.beta_sigmoid:
        raise value_error(op, "allow_neg_eigval", "come with use_beta_sigmoid_in_kernel, whose result it doubles", True)
    # The kernels do not read what is padding; here NaN there would reach the gradients of a gate's parameters.
    if decay is not None:
        g = decay(packing.mask_all_padding(g, time_dim=1))
    if options.beta_sigmoid:
        beta = sigmoid(packing.mask_all_padding(beta, time_dim=1))
        beta = 2 * beta if options.allow_neg_eigval else beta
    return g, beta
