"""The object that callers build for a pack that is cut over ranks, and what the functions read of it."""

import hashlib
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import is_integer, type_error, value_error
from ..packing import Boundaries, brief_offsets, check_cu_seqlens, reads_values, same_boundaries
from .cut import Cut
from .exchange import gather_numbers

_NAME = "ContextParallel"
# What flash-linear-attention's context has, and all that is read of it.
_FOREIGN = ("group", "cu_seqlens", "is_first_rank", "is_last_rank")
_converted: Dict[int, Tuple[Any, "ContextParallel"]] = {}


class ContextParallel:
    """One pack, cut over the ranks of a process group at any tokens. Built once a pack, on every rank alike.

    Args:
        group: the process group; None is the default one.
        cu_seqlens: offsets ``[N + 1]`` of the samples of the whole pack, int32, int64 or a list of ints; the same on
            every rank. They are read, which waits for a GPU that holds them.
        lengths: tokens of each rank's shard, in the order of the ranks, 0 or more; tokens after the last offset are
            padding. None: equal shards without padding.
        attention: ``"keys"``: queries stay and fetch the keys that they see; ``"heads"``: attention alone is shared out
            by heads, which all ranks have the same number of, each for all tokens.

    Attributes:
        cu_seqlens: int32 offsets of this rank's samples and parts of samples, counted from its first token. A sample
            without tokens is where the next token is, or on the last rank.
        lengths: tokens of each rank's shard; tokens: of this rank's.
        begins, ends: how many samples begin on this rank, and end on it. A function takes initial states of the first
            and returns final states of the second; those of all ranks, one after the other, are the whole pack's.

    Raises (on every rank, as all compare what they were told):
        TypeError, ValueError: malformed offsets or lengths, or others than on another rank.
    """

    def __init__(
        self, group: Any, cu_seqlens: Boundaries, lengths: Optional[Sequence[int]] = None, attention: str = "keys"
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        try:
            check_attention(_NAME, attention)
            cut = _checked_cut(cu_seqlens, lengths, self.world_size)
        except (TypeError, ValueError):
            gather_numbers(self.group, _summary(None, ""))  # the others wait for it, and learn why
            raise
        self._compare(cut, attention)
        self._set(cut, attention)

    @classmethod
    def of_cut(cls, group: Any, cut: Cut, attention: str) -> "ContextParallel":
        """One of a cut that the ranks have agreed upon."""
        self = cls.__new__(cls)
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self._set(cut, attention)
        return self

    def _set(self, cut: Cut, attention: str) -> None:
        self.attention = attention
        self.cut, self.lengths, self.tokens = cut, cut.lengths, cut.lengths[self.rank]
        self.entering, self.leaving = cut.entering(self.rank), cut.leaving(self.rank)
        self.offsets: List[int] = cut.local_offsets(self.rank)
        self.cu_seqlens = torch.tensor(self.offsets, dtype=torch.int32)
        self.begins = len(self.offsets) - 1 - (self.entering is not None)
        self.ends = len(self.offsets) - 1 - (self.leaving is not None)
        self._on_device: Dict[torch.device, Tensor] = {self.cu_seqlens.device: self.cu_seqlens}
        self._whole: Dict[torch.device, Tensor] = {}
        self._tag = 0

    def _compare(self, cut: Cut, attention: str) -> None:
        """Every rank has the same cut, or every rank raises."""
        everyone = gather_numbers(self.group, _summary(cut, attention))
        wrong = [rank for rank, (well, *_) in enumerate(everyone) if not well]
        if wrong:
            raise value_error(_NAME, "cu_seqlens", "be the same on every rank", f"malformed ones on rank {wrong[0]}")
        for rank, told in enumerate(everyone):
            if told != everyone[0]:
                got = f"{_told(everyone[0])} on rank 0 and {_told(told)} on rank {rank}"
                raise value_error(_NAME, "cu_seqlens", "be the same on every rank, as must lengths and attention", got)

    def offsets_on(self, device: torch.device) -> Tensor:
        """``cu_seqlens`` where the tokens are."""
        if device not in self._on_device:
            self._on_device[device] = self.cu_seqlens.to(device)
        return self._on_device[device]

    def whole_on(self, device: torch.device) -> Tensor:
        """int32 offsets of the samples of all ranks, where the tokens are."""
        if device not in self._whole:
            self._whole[device] = torch.tensor(self.cut.offsets, dtype=torch.int32).to(device)
        return self._whole[device]

    def next_tag(self) -> int:
        """A number for one call's messages and, plus 1, for those of its backward pass.

        Every rank draws one in every call, so ranks whose calls come in another order wait and fail instead of taking
        each other's messages (with NCCL, which knows no tags, only their order tells them apart).
        """
        self._tag = (self._tag + 2) % 2**30
        return self._tag


def _told(numbers: Sequence[int]) -> str:
    _, count, tokens, digest = numbers
    return f"{count} offsets over {tokens} tokens (checksum {digest % 2**24:06x})"


def check_attention(op: str, attention: Any) -> None:
    if attention not in ("keys", "heads"):
        raise value_error(op, "attention", "be 'keys' or 'heads'", repr(attention))


def _summary(cut: Optional[Cut], attention: str) -> List[int]:
    """What ranks compare: whether there is a cut, its number of offsets and of tokens, and a checksum of all."""
    if cut is None:
        return [0, 0, 0, 0]
    return [1, len(cut.offsets), cut.starts[-1], checksum((cut.offsets, cut.lengths, attention))]


def checksum(numbers: Any) -> int:
    """56 bits of what ``numbers`` are, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


def _checked_cut(cu_seqlens: Boundaries, lengths: Optional[Sequence[int]], ranks: int) -> Cut:
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = cu_seqlens.cpu()
    if lengths is None:
        offsets = check_cu_seqlens(_NAME, cu_seqlens, 2**31 - 1, torch.device("cpu")).tolist()
        if offsets[-1] % ranks:
            must = f"end at a multiple of the {ranks} ranks, or come with lengths"
            raise value_error(_NAME, "cu_seqlens", must, offsets[-1])
        return Cut(offsets, [offsets[-1] // ranks] * ranks)
    listed = isinstance(lengths, (list, tuple)) and all(is_integer(length) for length in lengths)
    if not listed:
        raise type_error(_NAME, "lengths", "be a list of ints", type(lengths).__name__)
    if len(lengths) != ranks or any(length < 0 for length in lengths):
        raise value_error(_NAME, "lengths", f"hold 0 or more tokens for each of the {ranks} ranks", list(lengths)[:8])
    offsets = check_cu_seqlens(_NAME, cu_seqlens, sum(lengths), torch.device("cpu")).tolist()
    return Cut(offsets, [int(length) for length in lengths])


# ---- what a function is given ---------------------------------------------------------------------------------------


def context_of(op: str, given: Any) -> ContextParallel:
    """``given`` as a :class:`ContextParallel`; flash-linear-attention's own object is read by the names it has.

    That one tells a rank its own boundaries only: at its first use the ranks tell one another theirs.
    """
    if isinstance(given, ContextParallel):
        return given
    if not all(hasattr(given, name) for name in _FOREIGN):
        must = "be a ContextParallel, or an object with group, cu_seqlens, is_first_rank and is_last_rank"
        raise type_error(op, "cp_context", must, type(given).__name__)
    if given.group is None or given.cu_seqlens is None:
        name = "group" if given.group is None else "cu_seqlens"
        raise value_error(op, "cp_context", f"have a {name}", None)
    known = _converted.get(id(given))
    if known is None or known[0]() is not given:
        key = id(given)
        known = (weakref.ref(given, lambda _: _converted.pop(key, None)), _from_local(op, given))
        _converted[key] = known
    return known[1]


def _from_local(op: str, given: Any) -> ContextParallel:
    host = getattr(given, "cu_seqlens_cpu", None)
    own = [int(offset) for offset in (given.cu_seqlens if host is None else host).tolist()]
    heads = gather_numbers(given.group, [len(own), not given.is_first_rank, not given.is_last_rank])
    most = max(count for count, _, _ in heads)
    rows = gather_numbers(given.group, own + [0] * (most - len(own)))
    offsets, lengths, goes_on = [0], [], 0
    for rank, ((count, enters, leaves), row) in enumerate(zip(heads, rows)):
        if enters != goes_on:
            must = "say alike on neighbours whether a sample goes on"
            raise value_error(op, "cp_context", must, f"other answers of rank {rank} and the one before it")
        begin, goes_on = sum(lengths), leaves
        if enters:
            offsets.pop()
        offsets += [begin + offset for offset in row[1:count]]
        lengths.append(row[count - 1])
    if goes_on:
        must = "say alike on neighbours whether a sample goes on"
        raise value_error(op, "cp_context", must, "one behind the last rank")
    return ContextParallel(given.group, offsets, lengths)


def shard_of(
    op: str,
    cp_context: Any,
    batch: int,
    length: int,
    device: torch.device,
    cu_seqlens: Optional[Boundaries] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
    argument: str = "cu_seqlens",
) -> Tuple[ContextParallel, Tensor]:
    """The context of a call whose tokens are ``batch`` rows of ``length``, and the offsets of its shard.

    Raises:
        TypeError, ValueError: no context, tokens that are not its shard, or boundaries of their own beside it.
        NotImplementedError: while ``torch.compile`` traces.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: cp_context must be None under torch.compile, got {type(cp_context).__name__}: messages between "
            "ranks are not traced; keep the layer out of the graph by torch.compiler.disable"
        )
    shard = context_of(op, cp_context)
    if batch != 1:
        raise value_error(op, "cp_context", "come with a batch of one packed row", f"a batch of {batch} rows")
    if length != shard.tokens:
        raise value_error(op, "cp_context", f"come with the {shard.tokens} tokens of rank {shard.rank}", length)
    for name, value in (("seq_idx", seq_idx), ("position_ids", position_ids)):
        if value is not None:
            raise value_error(op, name, "be None beside cp_context, which has the boundaries", "a tensor")
    offsets = shard.offsets_on(device)
    if cu_seqlens is not None:
        given = check_cu_seqlens(op, cu_seqlens, length, device, argument)
        if reads_values(given) and not same_boundaries(given, offsets):
            must = f"be cp_context's of this rank, {brief_offsets(offsets)}"
            raise value_error(op, argument, must, brief_offsets(given))
    return shard, offsets
