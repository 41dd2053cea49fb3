"""A range of visible keys for each query: the argument ``visible_keys`` of the attention functions."""

from typing import Tuple

import torch
from torch import Tensor

from .._checks import check_dtype, check_same_device, check_shape, check_tensor, value_error
from ..packing import reads_values, seq_idx_from_cu_seqlens

_LARGEST = 2**31 - 1


def check_visible_keys(
    op: str, visible_keys: Tensor, q: Tensor, causal: bool, window_size: Tuple[int, int], letters: str
) -> Tensor:
    """Check the form of ``visible_keys``, whose leading axes are those of ``q``; returns it as int32 ``[Tq, 2]``.

    Raises:
        TypeError: not an int32 or int64 tensor.
        ValueError: another shape (``letters`` names its axes) or device, or beside ``causal`` or a window.
    """
    check_tensor(op, "visible_keys", visible_keys, q.dim() - 1)
    check_dtype(op, "visible_keys", visible_keys, (torch.int32, torch.int64))
    check_same_device(op, "visible_keys", visible_keys, q.device)
    check_shape(op, "visible_keys", visible_keys, (*q.shape[:-2], 2), letters)
    if causal or tuple(window_size) != (-1, -1):
        got = "causal=True" if causal else f"window_size={tuple(window_size)}"
        raise value_error(op, "visible_keys", "come without causal and window_size, which it replaces", got)
    visible_keys = visible_keys.flatten(0, -2)
    if visible_keys.dtype == torch.int64:
        # Nothing beyond int32 is the index of a key, and wrapping around could make it one.
        visible_keys = visible_keys.clamp(-1, _LARGEST).to(torch.int32)
    return visible_keys.contiguous()


def check_ranges_are_inside(op: str, visible_keys: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Ranges name keys of their own sequence, or none by ``last < first``. Looked at where that costs no sync.

    Raises:
        ValueError: a query in front of the last offset whose range leaves its sequence.
    """
    if visible_keys.shape[0] == 0 or not (reads_values(visible_keys) and reads_values(cu_seqlens_q)):
        return
    sequence = seq_idx_from_cu_seqlens(cu_seqlens_q, visible_keys.shape[0])[0]
    lengths = torch.diff(cu_seqlens_k, append=cu_seqlens_k[-1:])  # label -1 of padding reads the 0 at the end
    first, last = visible_keys.unbind(-1)
    outside = (first <= last) & (sequence >= 0) & ((first < 0) | (last >= lengths[sequence.long()]))
    if bool(outside.any()):
        query = int(outside.nonzero()[0])
        keys = int(lengths[sequence[query]])
        got = f"{visible_keys[query].tolist()} for query {query}"
        raise value_error(op, "visible_keys", f"lie in 0 .. {keys - 1}, the keys of the query's sequence", got)


def visible_mask(visible_keys: Tensor, key_length: int) -> Tensor:
    """What one sequence's ranges ``[Tq, 2]`` show, as bool ``[Tq, key_length]``. For references and tests."""
    key = torch.arange(key_length, device=visible_keys.device)
    return (key >= visible_keys[:, :1]) & (key <= visible_keys[:, 1:])
