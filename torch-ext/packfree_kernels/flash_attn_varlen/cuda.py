"""What serves attention on CUDA tensors: PyTorch's flash kernel for varlen where it supports the call, else ours.

Both forwards give the same lse (natural logarithm, [H, T]), so either backward goes with either forward. PyTorch's
kernels differ in three things that are set right here: a row that sees no key gets lse +infinity, rows behind the last
offset are left unwritten, and 16 bytes are loaded at a time from addresses that must allow it.

The longest lengths that PyTorch's kernels ask for size their grid, ``blocks of the longest x sequences x heads``: a
number that is too small leaves rows of a longer sequence unwritten, without an error. What callers state is not checked
on a GPU, so it is not used: the number of tokens is a bound that no sequence passes. Most of that grid finds nothing to
do, ``sequences`` times as much as there is, so with more than a few sequences (the static form of boundaries made from
position_ids has one a token) our kernels serve, whose work is listed on the device.

Which kernel serves thus depends on the number of sequences, and PyTorch's backward adds to dq in the order of arrival.
Where a sample must give the same bits packed or alone, forward and backward, ask for it: ``deterministic=True``, which
arrives here as a seed, or ``torch.use_deterministic_algorithms(True)``.

None of this has run on a GPU yet.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._triton.launch import target
from .._triton.padding import clear_padding
from . import triton_bwd, triton_fwd

PYTORCH, TRITON = "PyTorch's flash attention", "Triton"

# Chosen by estimate, for want of a measurement: with more sequences the empty blocks cost what the full ones do.
_MOST_SEQUENCES = 8

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward

# PyTorch's kernels keep a window, and the sums of it with positions, in 32 bits.
_WIDEST = 2**30

# Keys of one sequence are not split by the number of sequences beside it. Not an argument of every torch we support.
_UNSPLIT = {"num_splits": 1} if "num_splits" in str(_forward.default._schema) else {}


def served_by(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    s_aux: Optional[Tensor],
    seed: Optional[Tensor],
    softmax_scale: float,
    softcap: float,
    dlse: Optional[Tensor] = None,
    visible_keys: Optional[Tensor] = None,
) -> str:
    """Which kernel serves a forward, or a backward with these gradients: :data:`PYTORCH` or :data:`TRITON`.

    Looks at shapes, dtypes, the device and PyTorch's deterministic mode, never at a value. ``seed`` is given for
    dropout, whose pattern PyTorch's kernel draws otherwise, and for a call whose bits must repeat.
    """
    dim = q.shape[2]
    supported = (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[2] == dim <= 256
        and dim % 8 == 0
        and min(q.shape[0], k.shape[0]) > 0
        and 1 <= cu_seqlens_q.shape[0] - 1 <= _MOST_SEQUENCES
        and softcap == 0
        and softmax_scale > 0
        and s_aux is None
        and dlse is None
        and visible_keys is None
    )
    if not supported or seed is not None or torch.are_deterministic_algorithms_enabled():
        return TRITON
    on = target(q)
    if 192 < dim <= 224 and on.arch not in (80, 90):
        return TRITON  # PyTorch's backward raises: a tile of these dims wants the shared memory of an A100 or H100
    available = on.backend == "cuda" and on.arch >= 80 and torch.backends.cuda.is_flash_attention_available()
    return PYTORCH if available else TRITON


def flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    s_aux: Optional[Tensor],
    seed: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    visible_keys: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """The op of this name on CUDA tensors; out ``[Tq, H, V]`` and lse ``[H, Tq]`` in float32.

    Raises:
        TypeError: float64.
        ValueError: a head dim above 256.
    """
    if served_by(q, k, v, cu_seqlens_q, s_aux, seed, softmax_scale, softcap, None, visible_keys) == TRITON:
        return triton_fwd.flash_attn_varlen_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, s_aux, seed, dropout_p, softmax_scale, window_left, window_right,
            softcap, visible_keys,
        )  # fmt: skip
    q, k, v = (_aligned(x) for x in (q, k, v))
    left, right = min(window_left, _WIDEST), min(window_right, _WIDEST)
    # Below 2 queries it would take a way that expects no empty sequence, and windows that pass the number of keys would
    # pick another kernel than in a longer pack.
    longest_q, longest_k = max(q.shape[0], 2), max(k.shape[0], left + 1, right + 1)
    out, lse, *_ = _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, 0.0, left < 0 and right == 0, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right, **_UNSPLIT,
    )  # fmt: skip
    live = torch.arange(q.shape[0], device=q.device) < cu_seqlens_q[-1]
    lse = torch.where(live, lse.masked_fill(lse == float("inf"), float("-inf")), 0.0)
    out = out.contiguous()
    clear_padding(cu_seqlens_q, out)
    return out, lse


def flash_attn_varlen_bwd(
    dout: Tensor,
    dlse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    s_aux: Optional[Tensor],
    seed: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    visible_keys: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op of this name on CUDA tensors; dq, dk and dv in the inputs' shapes, ds_aux ``[H]`` or ``[0]``.

    Raises: as the forward.
    """
    if served_by(q, k, v, cu_seqlens_q, s_aux, seed, softmax_scale, softcap, dlse, visible_keys) == TRITON:
        return triton_bwd.flash_attn_varlen_bwd(
            dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, s_aux, seed, dropout_p, softmax_scale,
            window_left, window_right, softcap, visible_keys,
        )  # fmt: skip
    dout, q, k, v, out = (_aligned(x) for x in (dout, q, k, v, out))
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).contiguous()
    left, right = min(window_left, k.shape[0]), min(window_right, k.shape[0])
    unused = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # the state of a generator
    dq, dk, dv = _backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], 0.0, left < 0 and right == 0,
        unused, unused, scale=softmax_scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (x.contiguous() for x in (dq, dk, dv))
    clear_padding(cu_seqlens_q, dq)
    clear_padding(cu_seqlens_k, dk, dv)
    return dq, dk, dv, lse.new_empty((0,))


def _aligned(tensor: Tensor) -> Tensor:
    """``[T, H, K]`` with a contiguous last axis and rows from multiples of 16 bytes, copied if it is not so."""
    fits = tensor.stride(2) == 1 and all(n % 8 == 0 for n in (*tensor.stride()[:2], tensor.storage_offset()))
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
