"""Public attention functions, under flash-attn's names, argument order and layouts."""

import numbers
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .._checks import (
    check_dtype,
    check_same_device,
    check_served,
    check_shape,
    check_tensor,
    is_integer,
    type_error,
    value_error,
    with_checked_kinds,
)
from .._dtypes import DTYPES
from .._ops import ops
from .._sharing import of_own
from ..context_parallel.attention import shard_of_attention, with_far_keys
from ..context_parallel.heads import from_heads, to_heads
from ..packing import Boundaries, check_cu_seqlens, has_values, reads_values
from . import autograd  # noqa: F401  (registers shapes and gradients)
from .visible import check_ranges_are_inside, check_visible_keys

_LARGEST_HEAD_DIM = 512

Attended = Union[Tensor, Tuple[Tensor, Tensor, None]]
Window = Union[Tensor, Sequence[int]]

# Arguments of flash-attn that are refused, and what to do instead.
_INSTEAD = {
    "alibi_slopes": "biases by distance are not computed; keep such a model on eager attention",
    "block_table": "keys and values in pages are read by flash_attn_with_kvcache",
    "cache_leftpad": "leave out the padding and tell cache_seqlens",
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
}


@with_checked_kinds
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Optional[Boundaries] = None,
    max_seqlen_q: Optional[Union[int, Tensor]] = None,
    max_seqlen_k: Optional[Union[int, Tensor]] = None,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
    *,
    s_aux: Optional[Tensor] = None,
    visible_keys: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
) -> Attended:
    """Attention in which each packed sequence sees only its own keys.

    Formula:
        ``out_i = sum_j softmax_j(score_ij) v_j`` over the keys ``j`` that query ``i`` sees, with
        ``score_ij = softmax_scale * q_i . k_j``, or ``softcap * tanh(score_ij / softcap)`` if ``softcap > 0``. A sink
        ``s_aux`` adds ``exp(s_aux)`` to the softmax's denominator. In a sequence of Lq queries and Lk keys, query ``i``
        sees ``i + Lk - Lq - left <= j <= i + Lk - Lq + right`` with ``(left, right) = window_size``; -1 is unbounded,
        and ``causal`` sets ``right`` to 0 (so the last query is aligned with the last key).

    Args:
        q: ``[Tq, H, K]``, Tq query tokens of all sequences one after the other, H heads. Any strides; the last axis
            is copied if it is not contiguous.
        k: ``[Tk, HK, K]``, HK key/value heads; H must be a multiple of HK (query head ``h`` uses ``h // (H / HK)``).
        v: ``[Tk, HK, V]``; V may differ from K. Both lie in 1 .. 512.
        cu_seqlens_q: offsets ``[N + 1]`` of the sequences in ``q``: int32 or int64, or a list of ints. Equal neighbours
            are an empty sequence.
        cu_seqlens_k: the same in ``k`` and ``v``, for as many sequences; None: ``cu_seqlens_q``.
        max_seqlen_q, max_seqlen_k: longest sequence, as int, 0-d tensor or None. Not needed and not relied upon.
        dropout_p: share of attention weights dropped, in ``[0, 1)``. The pattern is a hash of a seed drawn from torch's
            generator of q's device and of (index of the sequence, head, query, key), positions counted inside the
            sequence; so it repeats under ``torch.manual_seed`` and in a checkpoint's recompute, depends on the
            sequence's index, and is another in each replay of a CUDA graph.
        softmax_scale: default ``K ** -0.5``.
        window_size: ``(left, right)``, as a tuple, a list or an integer tensor of two on the CPU.
        softcap: 0 is off.
        deterministic: on a GPU, every bit repeats and a sequence's results are the same packed or alone, gradients
            included; PyTorch's kernels, which serve some calls there (see Devices), promise less. Without effect on a
            CPU, where that always holds.
        return_attn_probs: also return the log-sum-exp of each row.
        alibi_slopes, block_table: refused. Pages are for :func:`flash_attn_with_kvcache`.
        s_aux: ``[H]`` or None, one learnable logit a head; any float dtype.
        visible_keys: ``[Tq, 2]`` int32 or int64, or None: the first and the last key that each query sees, counted from
            its sequence's first key, in place of ``causal`` and ``window_size``. Any range may stand beside any other:
            a prefix or an image whose tokens see each other both ways, also with a window. ``last < first`` sees
            nothing. Rows after the last offset are not read. Values are checked on a CPU in eager mode; elsewhere a
            range is cut to its sequence, so that no read leaves it.
        cp_context: None, or a :class:`ContextParallel`: q, k and v are this rank's shard of a pack that is cut over
            ranks, and ``cu_seqlens_q`` is the context's. Keys and values of samples that cross the cut come from the
            other ranks, or (its ``attention="heads"``) each rank has all tokens of a share of the heads. Without
            dropout; by heads without ``visible_keys``.

    Returns:
        out ``[Tq, H, V]`` in ``q``'s dtype; with ``return_attn_probs`` the tuple ``(out, softmax_lse, None)``, where
        softmax_lse ``[H, Tq]`` is the log of the softmax's denominator in float32 (float64 for float64 inputs), sink
        included. A query that sees no key gives 0 and, without a sink, -infinity. Rows after the last offset give 0.

    Precision: computed in float32 whatever the dtype (float64 in float64). Gradients of q, k, v, s_aux and softmax_lse.
    A sequence's results are the same bits packed or alone, with any number of threads. Nothing of size T^2 is kept.
    NaN and infinities stay inside their own sequence.

    Devices and dtypes: CPU; float32, bfloat16, float16, and float64 for numerical checks (slow). CUDA; float32,
    bfloat16, float16, head dims to 256, by kernels in Triton. There up to 8 sequences in bfloat16 or float16 with one
    head dim for q, k and v, a multiple of 8, are served by PyTorch's flash attention if neither dropout, softcap,
    sinks, visible_keys nor the gradient of softmax_lse is asked for, and neither ``deterministic`` nor PyTorch's
    deterministic mode.

    Raises:
        TypeError: a dtype or type not listed above, or q, k, v of different dtypes.
        ValueError: shapes that do not fit, malformed offsets, a head dim above 512, ``dropout_p`` outside ``[0, 1)``, a
            negative ``softcap``, ``visible_keys`` beside ``causal`` or a window, or (eager mode) a ``max_seqlen_*``
            below the longest sequence, or a range that leaves its sequence.
        NotImplementedError: ``alibi_slopes`` or ``block_table`` given, a second derivative, or one in forward mode.

    Example:
        >>> q, k, v = torch.randn(10, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
        >>> out = flash_attn_varlen_func(q, k, v, torch.tensor([0, 3, 10]), causal=True)  # 3 and 7 tokens

    Source: Dao, "FlashAttention-2", 2023 (algorithm) and the function of this name in the flash-attn package
    (interface); sinks as in gpt-oss, softcap as in Gemma 2.
    """
    op = "flash_attn_varlen_func"
    _refuse(op, alibi_slopes=alibi_slopes, block_table=block_table)
    _check_heads(op, q, k, v, 3)
    shard = None
    if cp_context is not None:
        shard, cu_seqlens_q = shard_of_attention(op, cp_context, q, k, cu_seqlens_q, cu_seqlens_k)
        cu_seqlens_k = None
    offsets_q = check_cu_seqlens(op, cu_seqlens_q, q.shape[0], q.device, "cu_seqlens_q")
    if cu_seqlens_k is None:
        offsets_k = check_cu_seqlens(op, offsets_q, k.shape[0], k.device, "cu_seqlens_q")
    else:
        offsets_k = check_cu_seqlens(op, cu_seqlens_k, k.shape[0], k.device, "cu_seqlens_k")
    if offsets_q.shape[0] != offsets_k.shape[0]:
        must = f"list as many sequences as cu_seqlens_q ({offsets_q.shape[0] - 1})"
        raise value_error(op, "cu_seqlens_k", must, offsets_k.shape[0] - 1)
    _check_longest(op, "max_seqlen_q", max_seqlen_q, offsets_q)
    _check_longest(op, "max_seqlen_k", max_seqlen_k, offsets_k)
    if visible_keys is not None:
        visible_keys = check_visible_keys(op, visible_keys, q, causal, checked_window(op, window_size), "[Tq, 2]")
    by_heads = shard is not None and shard.attention == "heads"
    if by_heads:
        q, k, v, s_aux, offsets_q = to_heads(op, shard, q, k, v, s_aux, visible_keys, dropout_p)
        offsets_k = offsets_q
    elif shard is not None:
        window_size = checked_window(op, window_size)
        q, k, v, offsets_k, s_aux, causal, window_size, visible_keys = with_far_keys(
            op, shard, q, k, v, s_aux, causal, window_size, visible_keys, dropout_p
        )
    if visible_keys is not None:
        check_ranges_are_inside(op, visible_keys, offsets_q, offsets_k)
    out, lse = _attend(
        op, q, k, v, offsets_q, offsets_k, dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic,
        visible_keys,
    )  # fmt: skip
    if by_heads:
        out, lse = from_heads(shard, out), from_heads(shard, lse.T).T if return_attn_probs else lse
    return (out, lse, None) if return_attn_probs else out


@with_checked_kinds
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    visible_keys: Optional[Tensor] = None,
) -> Attended:
    """Attention over a batch in which every row is one sequence.

    Shapes: q ``[B, Tq, H, K]``, k ``[B, Tk, HK, K]``, v ``[B, Tk, HK, V]``, visible_keys ``[B, Tq, 2]``; returns out
    ``[B, Tq, H, V]``, with ``return_attn_probs`` the tuple ``(out, softmax_lse [B, H, Tq], None)``. Everything else,
    errors included, as :func:`flash_attn_varlen_func`.
    """
    op = "flash_attn_func"
    _refuse(op, alibi_slopes=alibi_slopes)
    _check_heads(op, q, k, v, 4)
    batch, query_length = q.shape[0], q.shape[1]
    rows = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    offsets_q, offsets_k = rows * query_length, rows * k.shape[1]
    if visible_keys is not None:
        visible_keys = check_visible_keys(op, visible_keys, q, causal, checked_window(op, window_size), "[B, Tq, 2]")
        check_ranges_are_inside(op, visible_keys, offsets_q, offsets_k)
    out, lse = _attend(
        op, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), offsets_q, offsets_k, dropout_p, softmax_scale, causal,
        window_size, softcap, s_aux, deterministic, visible_keys,
    )  # fmt: skip
    out = out.unflatten(0, (batch, query_length))
    if not return_attn_probs:
        return out
    return out, lse.unflatten(1, (batch, query_length)).transpose(0, 1), None


def _refuse(op: str, **arguments: Optional[Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{op}: {name} is not supported, got {type(value).__name__}: {_INSTEAD[name]}")


def checked_window(op: str, window_size: Window) -> Tuple[int, int]:
    if isinstance(window_size, Tensor):
        check_dtype(op, "window_size", window_size, (torch.int32, torch.int64))
        if window_size.device.type != "cpu":
            must = "be two numbers, or a tensor on the CPU (a look at another would wait for the GPU)"
            raise value_error(op, "window_size", must, f"a tensor on {window_size.device}")
        if not has_values(window_size):
            raise value_error(op, "window_size", "be two numbers where values cannot be read", "a tensor")
        window_size = window_size.tolist()
    if not (isinstance(window_size, (tuple, list)) and all(map(is_integer, window_size))):
        raise type_error(op, "window_size", "be two ints (left, right)", repr(window_size)[:80])
    if len(window_size) != 2:
        raise value_error(op, "window_size", "be (left, right)", window_size)
    left, right = window_size
    return left, right


def _check_heads(op: str, q: Tensor, k: Tensor, v: Tensor, ndim: int) -> None:
    """Types, dtypes, devices and shapes of q, k and v, ``[T, H, K]`` or ``[B, T, H, K]``."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, tensor, ndim)
        check_dtype(op, name, tensor, DTYPES)
        check_served(op, name, tensor)
        check_same_device(op, name, tensor, q.device)
        if tensor.dtype != q.dtype:
            raise type_error(op, name, f"have q's dtype {q.dtype}", tensor.dtype)
    letters = "[Tk, HK, K]" if ndim == 3 else "[B, Tk, HK, K]"
    check_shape(op, "k", k, (*q.shape[: ndim - 3], *k.shape[ndim - 3 : -1], q.shape[-1]), letters)
    check_shape(op, "v", v, (*k.shape[:-1], v.shape[-1]), letters.replace("K]", "V]"))
    if k.shape[-2] == 0 or q.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise value_error(op, "num_heads", f"be a multiple of k's {k.shape[-2]} heads", q.shape[-2])
    for name, dim in (("q and k", q.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= dim <= _LARGEST_HEAD_DIM:
            raise value_error(op, f"head_dim of {name}", f"lie in 1 .. {_LARGEST_HEAD_DIM}", dim)


def _check_longest(op: str, argument: str, longest: Optional[Union[int, Tensor]], cu_seqlens: Tensor) -> None:
    """A stated longest length covers the true one. Looked at only where that costs no sync and breaks no graph."""
    if longest is None or torch.compiler.is_compiling() or not reads_values(cu_seqlens):
        return
    if isinstance(longest, Tensor):
        check_dtype(op, argument, longest, (torch.int32, torch.int64))
        if longest.numel() != 1:
            raise value_error(op, argument, "be an int or a tensor of one element", f"shape {tuple(longest.shape)}")
        if not reads_values(longest):
            return
        longest = int(longest)
    elif isinstance(longest, bool) or not isinstance(longest, numbers.Integral):
        raise type_error(op, argument, "be an int, a tensor of one or None", repr(longest))
    true_longest = of_own(cu_seqlens, "longest", lambda: int(max(torch.diff(cu_seqlens).tolist(), default=0)))
    if longest < true_longest:
        raise value_error(op, argument, f"be at least the longest sequence ({true_longest})", longest)


def _attend(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size: Window,
    softcap: float,
    s_aux: Optional[Tensor],
    deterministic: bool = False,
    visible_keys: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """The op on checked q, k, v, offsets and ranges; returns out ``[Tq, H, V]`` and lse ``[H, Tq]``."""
    if not 0 <= dropout_p < 1:
        raise value_error(op, "dropout_p", "lie in [0, 1)", dropout_p)
    if softcap < 0:
        raise value_error(op, "softcap", "be 0 (off) or positive", softcap)
    left, right = checked_window(op, window_size)
    if s_aux is not None:
        check_tensor(op, "s_aux", s_aux, 1)
        check_dtype(op, "s_aux", s_aux, DTYPES)
        check_same_device(op, "s_aux", s_aux, q.device)
        check_shape(op, "s_aux", s_aux, (q.shape[1],), "[H]")
        s_aux = s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()
    seed = None
    if dropout_p > 0:
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    elif deterministic:
        # To the op a seed means: results that repeat. Without dropout its value is not read.
        seed = torch.zeros((1,), dtype=torch.int64, device=q.device)
    scale = float(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    return ops.flash_attn_varlen_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, s_aux, seed, float(dropout_p), scale,
        left, 0 if causal else right, float(softcap), visible_keys,
    )  # fmt: skip
