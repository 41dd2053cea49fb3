"""Where each packed sample ends: three spellings, one meaning.

Every op takes its boundaries as ``cu_seqlens``, ``seq_idx`` or ``position_ids``; :func:`resolve_packing` turns any of
them into one :class:`Packing`, the only form that the kernels know.

What is made of a tensor is kept for the next call with the same one (_sharing.py).

Nothing here reads a value of a GPU tensor unless ``PACKFREE_DEBUG=1``, and nothing does while ``torch.compile`` traces:
there the number of sequences is not known, so the ``cu_seqlens`` made from labels or positions has one entry per token
plus one and ends in empty sequences. Where their values lie on a CPU the same boundaries come out compact. A call with
a state for each sequence must know how many there are: it waits once for labels or positions on a GPU, and a traced one
needs ``cu_seqlens``.
"""

import os
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _sharing
from ._checks import type_error, value_error
from ._dtypes import INTEGER_DTYPES, dtype_name
from ._ops import ops

Boundaries = Union[Tensor, Sequence[int]]



@dataclass(frozen=True)
class Packing:
    """Boundaries of N sequences that lie one after the other in a row of ``tokens`` tokens.

    Attributes:
        cu_seqlens: int32 ``[N + 1]`` on the tensors' device. Starts at 0, never decreases, ends at ``tokens`` or
            before. Sequence ``n`` owns tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1``; equal neighbours are an
            empty sequence; tokens after the last entry are padding.
        tokens: length of the row. A batch ``[B, T]`` is read as one row of ``B * T`` tokens.
        live: bool ``[B * T]`` or None. False marks padding that lies between sequences, which happens only where
            ``seq_idx`` of several rows has negative labels; such a stretch is a sequence of its own in ``cu_seqlens``,
            so that it touches nothing, and the op sets its outputs to 0.
        states: int64 ``[N']`` or None. Where ``live`` is given, the entries of ``cu_seqlens`` that are real sequences.
    """

    cu_seqlens: Tensor
    tokens: int
    live: Optional[Tensor] = None
    states: Optional[Tensor] = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences, empty ones and the padding stretches of ``live`` included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_states(self) -> int:
        """Number of states a caller gives or gets: one for each real sequence."""
        return self.num_sequences if self.states is None else self.states.shape[0]

    def to(self, device: torch.device) -> "Packing":
        if self.cu_seqlens.device == device:
            return self
        cu_seqlens = _sharing.own(self.cu_seqlens.to(device, non_blocking=True), self.tokens)
        moved = (None if x is None else x.to(device, non_blocking=True) for x in (self.live, self.states))
        return Packing(cu_seqlens, self.tokens, *moved)

    def spread_states(self, states: Tensor) -> Tensor:
        """The caller's states ``[N', ...]`` as the kernels want them, ``[N, ...]``: padding stretches get zeros."""
        if self.states is None:
            return states
        return states.new_zeros(self.num_sequences, *states.shape[1:]).index_copy(0, self.states, states)

    def gather_states(self, states: Tensor) -> Tensor:
        """The inverse of :meth:`spread_states`: the states of the real sequences."""
        return states if self.states is None else states[self.states]

    def mask_padding(self, tensor: Tensor, time_dim: int) -> Tensor:
        """``tensor`` ``[B, ..., T, ...]`` with 0 on padding between sequences; T is axis ``time_dim``.

        For what goes into a kernel, where NaN on padding would reach the parameters' gradients, and for what comes out.
        Padding at the end needs no help: the kernels do not read it and write 0 there.
        """
        return tensor if self.live is None else _keep(self.live, tensor, time_dim)

    def mask_all_padding(self, tensor: Tensor, time_dim: int) -> Tensor:
        """``tensor`` ``[B, ..., T, ...]`` with 0 on all padding, for what goes past the kernels."""
        if self.live is None and reads_values(self.cu_seqlens) and int(self.cu_seqlens[-1]) == self.tokens:
            return tensor
        owned = _sharing.of_own(self.cu_seqlens, ("owned", self.tokens), self._owned)
        return _keep(owned if self.live is None else owned & self.live, tensor, time_dim)

    def _owned(self) -> Tensor:
        """bool ``[B * T]``: the tokens before the last offset."""
        return torch.arange(self.tokens, device=self.cu_seqlens.device) < self.cu_seqlens[-1]


def _keep(live: Tensor, tensor: Tensor, time_dim: int) -> Tensor:
    """``tensor`` ``[B, ..., T, ...]`` where ``live`` ``[B * T]``, and 0 elsewhere."""
    shape = [1] * tensor.dim()
    shape[0], shape[time_dim] = tensor.shape[0], tensor.shape[time_dim]
    return torch.where(live.view(shape), tensor, 0)


def _type_of(value: object) -> str:
    return dtype_name(value) if isinstance(value, Tensor) else repr(value)


def has_values(tensor: Tensor) -> bool:
    """Whether there are values to look at: not while tracing. On a GPU a look is a sync."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or torch._subclasses.fake_tensor.is_fake(tensor))


def reads_values(tensor: Tensor) -> bool:
    """Whether boundary values may be looked at: free on a CPU, a sync on a GPU, impossible while tracing."""
    return has_values(tensor) and (tensor.device.type == "cpu" or os.environ.get("PACKFREE_DEBUG") == "1")


def check_cu_seqlens(
    op: str, cu_seqlens: Boundaries, tokens: int, device: torch.device, argument: str = "cu_seqlens"
) -> Tensor:
    """Check explicit offsets and return them as int32 on ``device``.

    Args:
        op: name of the calling function, for the error text.
        cu_seqlens: integer tensor ``[N + 1]`` or a sequence of ints.
        tokens: number of tokens in the row.
        device: where the tokens are.
        argument: name under which the caller received the offsets.

    Raises:
        TypeError: not an integer tensor or a sequence of ints.
        ValueError: wrong shape, offsets that start elsewhere than at 0, decrease, or pass ``tokens``, or a meta tensor
            beside tokens that are none.
    """
    if isinstance(cu_seqlens, Tensor) and _sharing.is_own(cu_seqlens, tokens, device):
        return cu_seqlens
    if not isinstance(cu_seqlens, Tensor):
        listed = isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, (str, bytes))
        if not listed or not all(isinstance(value, int) and not isinstance(value, bool) for value in cu_seqlens):
            raise type_error(op, argument, "be an integer tensor or a list of ints", repr(cu_seqlens))
        if not all(-(2**63) <= value < 2**63 for value in cu_seqlens):
            raise value_error(op, argument, "hold numbers of 64 bits", repr(cu_seqlens))
        cu_seqlens = torch.tensor(list(cu_seqlens), dtype=torch.int64)
    if cu_seqlens.dtype not in INTEGER_DTYPES:
        raise type_error(op, argument, "be an int32 or int64 tensor", dtype_name(cu_seqlens))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise value_error(op, argument, "have shape [N + 1]", tuple(cu_seqlens.shape))
    offsets = cu_seqlens
    return _sharing.of_callers(
        offsets,
        ("offsets", tokens, device),
        lambda: _checked_offsets(op, argument, offsets, tokens, device),
        by_value=_compares_values(offsets),
    )


def _checked_offsets(op: str, argument: str, cu_seqlens: Tensor, tokens: int, device: torch.device) -> Tensor:
    moved = _move(op, argument, cu_seqlens, device)
    # On whichever side looking costs nothing.
    for offsets in (cu_seqlens, moved):
        if reads_values(offsets):
            _check_offset_values(op, argument, offsets, tokens)
            # A copy: what the caller writes into their own later on is checked by nobody.
            return _sharing.own(moved.to(torch.int32, copy=moved is cu_seqlens).contiguous(), tokens)
    if not _is_gpu(device):
        return moved.to(torch.int32).contiguous()
    # Nothing on a GPU looks at the values before kernels use them, so they are brought inside the row and in order:
    # whatever they said, no two sequences share a token.
    return _sharing.own(ops.packing_from_offsets(moved, tokens).cummax(0).values, tokens)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _compares_values(boundaries: Tensor) -> bool:
    """Whether values tell what has been written, also by others than PyTorch, into the memory of an array, say."""
    return boundaries.device.type == "cpu" and reads_values(boundaries)


def _move(op: str, argument: str, boundaries: Tensor, device: torch.device) -> Tensor:
    """``boundaries`` on the tokens' device."""
    if boundaries.is_meta and device.type != "meta":
        raise value_error(op, argument, f"hold values to go with tokens on {device}", "a meta tensor")
    return boundaries if boundaries.device == device else boundaries.to(device)


def _check_offset_values(op: str, argument: str, cu_seqlens: Tensor, tokens: int) -> None:
    first = int(cu_seqlens[0])
    if first != 0:
        raise value_error(op, argument, "start at 0", first)
    falls = cu_seqlens[1:] < cu_seqlens[:-1]  # not by differences, which may leave 64 bits
    if bool(falls.any()):
        index = int(falls.nonzero()[0])
        left, right = int(cu_seqlens[index]), int(cu_seqlens[index + 1])
        raise value_error(op, argument, "never decrease", f"{right} after {left} at index {index + 1}")
    last = int(cu_seqlens[-1])
    if last > tokens:
        raise value_error(op, argument, f"end at the number of tokens ({tokens}) or before", last)


def check_rows_are_cut(
    op: str, cu_seqlens: Tensor, rows: int, length: int, argument: str = "cu_seqlens", hint: str = ""
) -> None:
    """Offsets over ``rows`` rows of ``length`` tokens, read one after the other, cut where each row ends.

    ``hint`` is for the error text: what may have gone wrong before.

    Raises:
        ValueError: they do not (where values may be read).
    """
    if rows > 1 and reads_values(cu_seqlens) and not set(range(0, rows * length, length)) <= set(cu_seqlens.tolist()):
        raise value_error(op, argument, f"cut at the end of each of the {rows} rows{hint}", brief_offsets(cu_seqlens))


def row_of_positions(position_ids: Tensor) -> Tuple[Tensor, bool]:
    """The row ``[B, T]`` that tells where sequences start, and whether only a fall in it does."""
    if position_ids.dim() == 3:
        return position_ids[0], position_ids.shape[0] == 3
    return (position_ids if position_ids.dim() == 2 else position_ids[None]), False


def starts_from_position_ids(position_ids: Tensor) -> Tensor:
    """Mark the first token of each sequence, bool ``[B, T]``, from one of the four layouts of positions.

    ``[T]`` and ``[B, T]`` hold one position a token. ``[4, B, T]`` (text, temporal, height, width) is read by its first
    row. In these a sequence starts where a position is not its predecessor plus one, so positions may start anywhere
    (RoBERTa counts from 2) and one-token sequences are seen. ``[3, B, T]`` (temporal, height, width: multimodal rotary
    positions without a text row) may stand still or jump inside a sample, so there a sequence starts only where the
    temporal row falls.
    """
    row, only_falls = row_of_positions(position_ids)
    step = row[:, 1:] - row[:, :-1]
    inner = step < 0 if only_falls else step != 1
    return torch.cat([torch.ones_like(row[:, :1], dtype=torch.bool), inner], dim=-1)


def _compact_offsets(starts: Tensor) -> Tensor:
    """int32 offsets from the bool marks ``[B, T]`` of first tokens; reads the values."""
    flat = starts.reshape(-1)
    offsets = flat.nonzero().squeeze(-1)
    return _sharing.own(torch.cat([offsets, offsets.new_full((1,), flat.shape[0])]).to(torch.int32), flat.shape[0])


def cu_seqlens_from_position_ids(position_ids: Tensor, wait: bool = False) -> Tensor:
    """int32 offsets of the sequences that ``position_ids`` count; see :func:`starts_from_position_ids`.

    With ``wait`` compact ones from a GPU too.
    """
    if reads_values(position_ids) or (wait and has_values(position_ids)):
        return _compact_offsets(starts_from_position_ids(position_ids))
    row, only_falls = row_of_positions(position_ids)
    return _sharing.own(ops.packing_from_positions(row, only_falls), row.numel())


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Labels int32 ``[1, tokens]``: the sequence of each token, -1 for padding after the last offset."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # The whole tensor, not cu_seqlens[1:]: a slice would make one sequence a special size and cost a recompile.
    labels = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return torch.where(index < cu_seqlens[-1], labels, -1).to(torch.int32)[None]


def _check_position_ids(op: str, position_ids: Tensor, batch: int, length: int) -> None:
    if not isinstance(position_ids, Tensor) or position_ids.dtype not in INTEGER_DTYPES:
        raise type_error(op, "position_ids", "be an int32 or int64 tensor", _type_of(position_ids))
    shape = tuple(position_ids.shape)
    fits = shape == (batch, length) or (batch == 1 and shape == (length,))
    fits = fits or (len(shape) == 3 and shape[0] in (3, 4) and shape[1:] == (batch, length))
    if not fits:
        raise value_error(
            op, "position_ids", f"have shape [{length}], [{batch}, {length}], or 3 or 4 such rows", shape
        )


def _packing_from_seq_idx(
    op: str, seq_idx: Tensor, batch: int, length: int, device: torch.device, wait: bool
) -> Packing:
    """The packing of labels, made once of one tensor of them."""
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in INTEGER_DTYPES:
        raise type_error(op, "seq_idx", "be an int32 or int64 tensor", _type_of(seq_idx))
    if tuple(seq_idx.shape) != (batch, length):
        raise value_error(op, "seq_idx", f"have shape [B, T] = {(batch, length)}", tuple(seq_idx.shape))
    return _sharing.of_callers(
        seq_idx,
        _labels_key(device, wait),
        lambda: _packing_of_labels(op, seq_idx, batch, length, device, wait),
        by_value=_compares_values(seq_idx),
    )


def _labels_key(device: torch.device, wait: bool) -> Tuple[str, torch.device, bool]:
    return "labels", device, wait


def tell_labels(seq_idx: Tensor, cu_seqlens: Tensor) -> None:
    """Let the labels ``[1, T]`` of tokens, made of own offsets, be read as these, as long as no state is asked for."""
    if _sharing.is_own(cu_seqlens, seq_idx.numel(), seq_idx.device):
        key, packing = _labels_key(seq_idx.device, wait=False), Packing(cu_seqlens, seq_idx.numel())
        _sharing.tell(seq_idx, key, packing, by_value=_compares_values(seq_idx))


def _packing_of_labels(op: str, seq_idx: Tensor, batch: int, length: int, device: torch.device, wait: bool) -> Packing:
    moved = _move(op, "seq_idx", seq_idx, device)
    if wait and has_values(seq_idx):
        # All looks at them are free then.
        return _compact_packing(op, seq_idx.cpu()).to(device)
    # On whichever side looking costs nothing.
    for labels in (seq_idx, moved):
        if reads_values(labels):
            return _compact_packing(op, labels).to(device)
    # The op cuts off the tail padding of one row; between rows padding is a sequence of its own.
    live = None if batch == 1 else (moved >= 0).reshape(-1)
    return Packing(_sharing.own(ops.packing_from_labels(moved), batch * length), batch * length, live)


def _compact_packing(op: str, seq_idx: Tensor) -> Packing:
    """The packing of labels ``[B, T]`` that may be looked at."""
    batch, tokens = seq_idx.shape[0], seq_idx.numel()
    if tokens:
        _check_labels(op, seq_idx)
    padding = seq_idx < 0
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    # One stretch of padding is one stretch, whatever negative labels it carries.
    changes = changes & ~(padding[:, 1:] & padding[:, :-1])
    cu_seqlens = _compact_offsets(torch.cat([torch.ones_like(padding[:, :1]), changes], dim=-1))
    if not tokens or not bool(padding.any()):
        return Packing(cu_seqlens, tokens)
    if batch == 1:
        # Tail padding needs no sequence: the offsets stop where it begins.
        return Packing(_sharing.own(cu_seqlens[cu_seqlens <= (~padding).sum()], tokens), tokens)
    live = ~padding.reshape(-1)
    return Packing(cu_seqlens, tokens, live, live[cu_seqlens[:-1].long()].nonzero().squeeze(-1))


def _check_labels(op: str, seq_idx: Tensor) -> None:
    """Labels never decrease along a row, except from the last sequence into negative tail padding."""
    falls = (seq_idx[:, 1:] < seq_idx[:, :-1]) & (seq_idx[:, 1:] >= 0)
    rises_from_padding = (seq_idx[:, :-1] < 0) & (seq_idx[:, 1:] >= 0)
    bad = falls | rises_from_padding
    if bool(bad.any()):
        row, index = (int(value) for value in bad.nonzero()[0])
        raise value_error(
            op,
            "seq_idx",
            "hold labels that never decrease along a row, negative ones only as tail padding (positions: position_ids)",
            f"{int(seq_idx[row, index + 1])} after {int(seq_idx[row, index])} at row {row}, token {index + 1}",
        )


def same_boundaries(left: Tensor, right: Tensor) -> bool:
    """Whether two offset tensors cut the tokens alike; empty sequences make no difference."""
    return torch.equal(torch.unique_consecutive(left), torch.unique_consecutive(right))


def resolve_packing(
    op: str,
    batch: int,
    length: int,
    device: torch.device,
    cu_seqlens: Optional[Boundaries] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
    has_states: bool = False,
) -> Packing:
    """Turn whatever boundaries a function was given into one :class:`Packing`.

    Args:
        op: name of the calling function, for the error text.
        batch: rows B of the token tensor.
        length: tokens T of a row.
        device: where the tokens are; boundaries from elsewhere are moved there once.
        cu_seqlens: offsets ``[N + 1]``, int32 or int64 (on a CPU also a list of ints). Only with ``batch == 1``.
        seq_idx: labels ``[B, T]``, never decreasing along a row; negative labels are tail padding.
        position_ids: ``[T]``, ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; see :func:`starts_from_position_ids`.
        has_states: whether there is a state for each sequence, so that their number must be known. Labels or positions
            on a GPU are then waited for, once; while tracing they are refused.

    Without boundaries each row is one sequence. ``cu_seqlens`` and ``seq_idx`` together must agree; both win over
    ``position_ids``.

    Raises:
        TypeError: a boundary argument of the wrong type or dtype.
        ValueError: a shape that does not fit, offsets or labels that are malformed, explicit ones that disagree, a
            meta tensor beside tokens that are none, or states whose number cannot be known.
    """
    tokens = batch * length
    packing: Optional[Packing] = None
    wait = has_states and cu_seqlens is None
    if wait and torch.compiler.is_compiling() and not (seq_idx is None and position_ids is None):
        must = "be given under torch.compile where there is a state for each sequence, whose number others do not tell"
        raise value_error(op, "cu_seqlens", must, "position_ids" if seq_idx is None else "seq_idx")
    if seq_idx is not None:
        packing = _packing_from_seq_idx(op, seq_idx, batch, length, device, wait)
    if cu_seqlens is not None:
        if batch != 1:
            raise value_error(op, "cu_seqlens", "come with a batch of one packed row", f"a batch of {batch} rows")
        offsets = check_cu_seqlens(op, cu_seqlens, tokens, device)
        if packing is not None and reads_values(offsets) and not same_boundaries(offsets, packing.cu_seqlens):
            must = f"cut the row where cu_seqlens does, at {brief_offsets(offsets)}"
            raise value_error(op, "seq_idx", must, brief_offsets(packing.cu_seqlens))
        packing = Packing(offsets, tokens)
    if packing is not None:
        return packing
    if position_ids is not None:
        _check_position_ids(op, position_ids, batch, length)
        positions = position_ids
        return _sharing.of_callers(
            positions,
            ("positions", device, wait),
            lambda: _packing_of_positions(op, positions, tokens, device, wait),
            by_value=_compares_values(positions),
        )
    return Packing(torch.arange(batch + 1, device=device, dtype=torch.int32) * length, tokens)


def _packing_of_positions(op: str, position_ids: Tensor, tokens: int, device: torch.device, wait: bool) -> Packing:
    if not reads_values(position_ids):
        position_ids = _move(op, "position_ids", position_ids, device)
    return Packing(cu_seqlens_from_position_ids(position_ids, wait), tokens).to(device)


def brief_offsets(offsets: Tensor, most: int = 8) -> str:
    """``offsets`` for an error text, cut after ``most`` of them; reads the values."""
    values: List[int] = offsets.tolist()
    return str(values) if len(values) <= most else f"[{', '.join(map(str, values[:most]))}, ... {len(values)} offsets]"


def sequence_bounds(cu_seqlens: Tensor) -> List[Tuple[int, int]]:
    """``(bos, eos)`` of each sequence as Python ints; reads the values, so for references and tests only."""
    offsets = cu_seqlens.tolist()
    return list(zip(offsets[:-1], offsets[1:]))
