"""The one harness that every packed op goes through: against the reference, and packed against alone.

An op joins by an :class:`OpUnderTest`. Its tensors fall into three kinds: tokens (an axis of length T, cut into
sequences), states (axis 0 of length N, one entry a sequence) and parameters (neither).
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from .packings import Pack
from .tolerance import DRAWS, check_close, nudged

Tensors = Dict[str, Tensor]


@dataclass
class OpUnderTest:
    """How the harness builds inputs for an op and calls it.

    Attributes:
        name: the op's name.
        make: ``(pack, dtype) -> inputs``, random leaf tensors, B = 1. Floating inputs get gradients.
        run: ``(inputs, boundaries) -> outputs``: our function; ``boundaries`` are the keyword arguments that say where
            sequences end, none for a single sequence.
        reference: ``(inputs, cu_seqlens) -> outputs``: the reference, in the dtype of the inputs.
        token_axis: for each input and output that runs along the tokens, its token axis.
        states: inputs and outputs with one entry for each sequence.
        spellings: which of cu_seqlens, seq_idx and position_ids the function takes.
        rename: boundary keyword -> the names under which this function takes it.
    """

    name: str
    make: Callable[[Pack, torch.dtype], Tensors]
    run: Callable[..., Tensors]
    reference: Callable[[Tensors, Tensor], Tensors]
    token_axis: Dict[str, int]
    states: Sequence[str] = ()
    spellings: Sequence[str] = ("cu_seqlens", "seq_idx", "position_ids")
    rename: Dict[str, Sequence[str]] = field(default_factory=dict)

    def boundaries(self, pack: Pack, spelling: str = "cu_seqlens") -> Dict[str, Tensor]:
        value = getattr(pack, spelling)
        return {keyword: value for keyword in self.rename.get(spelling, (spelling,))}

    def base(self, name: str) -> str:
        """The tensor that ``name`` is the gradient of, or ``name`` itself."""
        known = name in self.token_axis or name in self.states
        return name if known or not name.startswith("d") else name[1:]

    def kind(self, name: str) -> str:
        """tokens, states or parameter; a gradient is of the kind of its tensor."""
        base = self.base(name)
        return "tokens" if base in self.token_axis else "states" if base in self.states else "parameter"


def cotangents(outputs: Tensors, seed: int = 1) -> Tensors:
    """Fixed random weights, one for each element of each output; the loss is the weighted sum."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(output.shape, generator=generator, dtype=torch.float64) for name, output in outputs.items()
    }


def run_with_gradients(
    call: Callable[[Tensors], Tensors], inputs: Tensors, weights: Optional[Tensors] = None
) -> Tensors:
    """Outputs of ``call`` and, as ``d<input>``, the gradient of the weighted sum of all of them, if they have one."""
    leaves = {
        name: value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.is_floating_point())
        for name, value in inputs.items()
    }
    outputs = call(leaves)
    if not any(output.requires_grad for output in outputs.values()):
        return outputs  # a function for decoding has no gradients
    weights = cotangents(outputs) if weights is None else weights
    loss = sum((outputs[name] * weights[name].to(outputs[name].dtype)).sum() for name in outputs)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    results = {name: output.detach() for name, output in outputs.items()}
    for (name, leaf), gradient in zip(wanted.items(), gradients):
        results[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def cast(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _slice(op: OpUnderTest, name: str, tensor: Tensor, pack: Pack, sequence: int) -> Tensor:
    """What belongs to one sequence: its tokens, its state, or the whole parameter."""
    if op.kind(name) == "tokens":
        return tensor.narrow(op.token_axis[op.base(name)], pack.offsets[sequence], pack.lengths[sequence])
    if op.kind(name) == "states":
        return tensor[sequence : sequence + 1]
    return tensor


def check_against_reference(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Outputs and every gradient lie within the budget of tolerance.py."""
    inputs = op.make(pack, dtype)
    boundaries = op.boundaries(pack)

    def reference(values: Tensors) -> Tensors:
        return run_with_gradients(lambda leaves: op.reference(leaves, pack.cu_seqlens), values)

    truth = reference(cast(inputs, torch.float64))
    working = reference(inputs)
    ours = run_with_gradients(lambda leaves: op.run(leaves, **boundaries), inputs)
    assert ours.keys() == truth.keys()

    @functools.lru_cache(maxsize=None)
    def others() -> List[Tensors]:
        return [reference(nudged(inputs, draw)) for draw in range(DRAWS)]

    for name in truth:
        summands = max(pack.tokens, 1) if op.kind(name) == "parameter" else 1
        check_close(
            op.name,
            name,
            ours[name],
            working[name],
            truth[name],
            summands,
            lambda name=name: [(other[name].double() - truth[name]).abs() for other in others()],
        )


def assert_same_bits(what: str, left: Tensor, right: Tensor) -> None:
    assert left.shape == right.shape, f"{what}: shapes {tuple(left.shape)} and {tuple(right.shape)}"
    if torch.equal(left, right):
        return
    same = (left == right) | (left.isnan() & right.isnan())
    if not bool(same.all()):
        place = int((~same).flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.numel()} elements differ, first at flat index {place}: "
            f"{float(left.flatten()[place])!r} and {float(right.flatten()[place])!r}"
        )


def check_packed_equals_alone(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Outputs, per-token gradients and states of a sequence are the same bits packed or alone; padding is 0."""
    inputs = op.make(pack, dtype)
    boundaries = op.boundaries(pack)
    with torch.no_grad():
        weights = cotangents(op.run(inputs, **boundaries))
    packed = run_with_gradients(lambda leaves: op.run(leaves, **boundaries), inputs, weights)
    for sequence in range(len(pack.lengths)):
        own = {name: _slice(op, name, value, pack, sequence) for name, value in inputs.items()}
        own_weights = {name: _slice(op, name, value, pack, sequence) for name, value in weights.items()}
        single = op.boundaries(Pack("alone", (pack.lengths[sequence],)))
        alone = run_with_gradients(lambda leaves, b=single: op.run(leaves, **b), own, own_weights)
        for name, value in alone.items():
            if op.kind(name) == "parameter":
                continue
            where = f"{op.name}: {name} of sequence {sequence}, packed and alone"
            assert_same_bits(where, _slice(op, name, packed[name], pack, sequence), value)
    if pack.padding:
        for name, value in packed.items():
            if op.kind(name) == "tokens":
                tail = value.narrow(op.token_axis[op.base(name)], pack.offsets[-1], pack.padding)
                assert bool((tail == 0).all()), f"{op.name}: {name} is not 0 on padding"


def check_spellings(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Every spelling of the boundaries gives the same bits, outputs and gradients."""
    inputs = op.make(pack, dtype)
    results: List[Tensors] = []
    for spelling in op.spellings:
        boundaries = op.boundaries(pack, spelling)
        results.append(run_with_gradients(lambda leaves, b=boundaries: op.run(leaves, **b), inputs))
    for spelling, result in zip(op.spellings[1:], results[1:]):
        for name, value in result.items():
            assert_same_bits(f"{op.name}: {name} by {op.spellings[0]} and {spelling}", results[0][name], value)


def check_isolation(
    op: OpUnderTest,
    pack: Pack,
    dtype: torch.dtype,
    poisons: Sequence[float] = (math.nan,),
    victims: Optional[Sequence[int]] = None,
) -> None:
    """NaN or infinity in one sequence changes no bit of another's outputs and per-token gradients.

    ``victims`` are the sequences to spoil, one after the other; by default each of them.
    """
    inputs = op.make(pack, dtype)
    boundaries = op.boundaries(pack)
    clean = run_with_gradients(lambda leaves: op.run(leaves, **boundaries), inputs)
    for victim in range(len(pack.lengths)) if victims is None else victims:
        for poison in poisons if pack.lengths[victim] else ():
            spoiled = {name: value.clone(memory_format=torch.preserve_format) for name, value in inputs.items()}
            for name, value in spoiled.items():
                if op.kind(name) != "parameter" and value.is_floating_point():
                    _slice(op, name, value, pack, victim).fill_(poison)
            dirty = run_with_gradients(lambda leaves: op.run(leaves, **boundaries), spoiled)
            _check_others(op, pack, clean, dirty, victim, poison)


def _check_others(op: OpUnderTest, pack: Pack, clean: Tensors, dirty: Tensors, victim: int, poison: float) -> None:
    for other in range(len(pack.lengths)):
        for name in clean if other != victim else ():
            if op.kind(name) != "parameter":
                before, after = (_slice(op, name, result[name], pack, other) for result in (clean, dirty))
                where = f"{op.name}: {name} of sequence {other} beside {poison} in sequence {victim}"
                assert_same_bits(where, before, after)


def check_permutation(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Packing the sequences in another order gives the same bits in that order."""
    inputs = op.make(pack, dtype)
    with torch.no_grad():
        weights = cotangents(op.run(inputs, **op.boundaries(pack)))
    order = list(reversed(range(len(pack.lengths))))
    turned = Pack("permuted", tuple(pack.lengths[n] for n in order), pack.padding)

    def permute(tensors: Tensors) -> Tensors:
        result = {}
        for name, value in tensors.items():
            if op.kind(name) == "tokens":
                axis = op.token_axis[name]
                pieces = [_slice(op, name, value, pack, n) for n in order]
                pieces.append(value.narrow(axis, pack.offsets[-1], pack.padding))
                result[name] = torch.cat(pieces, dim=axis)
            else:
                result[name] = value[order] if op.kind(name) == "states" else value
        return result

    straight = run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), inputs, weights)
    permuted = run_with_gradients(
        lambda leaves: op.run(leaves, **op.boundaries(turned)), permute(inputs), permute(weights)
    )
    for name in straight:
        if op.kind(name) == "parameter":
            continue
        for place, n in enumerate(order):
            before, after = _slice(op, name, straight[name], pack, n), _slice(op, name, permuted[name], turned, place)
            assert_same_bits(f"{op.name}: {name} of sequence {n} at place {place}", before, after)


def check_repeatable(op: OpUnderTest, pack: Pack, dtype: torch.dtype, threads: Sequence[int] = (1, 2, 3)) -> None:
    """Every output and gradient, parameters' too, is the same bits in each run and with any number of threads."""
    inputs = op.make(pack, dtype)
    boundaries = op.boundaries(pack)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (*threads, threads[0]):
            torch.set_num_threads(count)
            results.append(run_with_gradients(lambda leaves: op.run(leaves, **boundaries), inputs))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, value in result.items():
            assert_same_bits(f"{op.name}: {name} with another number of threads", results[0][name], value)


def check_memory_forms(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Strided, misaligned and otherwise laid-out inputs give the bits of contiguous ones."""
    inputs = op.make(pack, dtype)
    boundaries = op.boundaries(pack)
    plain = run_with_gradients(lambda leaves: op.run(leaves, **boundaries), inputs)
    for form in (_every_second, _misaligned, _axes_swapped):
        def call(leaves: Tensors, form: Callable[[Tensor], Tensor] = form) -> Tensors:
            return op.run({name: form(value) for name, value in leaves.items()}, **boundaries)

        result = run_with_gradients(call, inputs)
        for name, value in result.items():
            if op.kind(name) == "parameter":
                continue  # may be summed in another order where the layout picks another path
            assert_same_bits(f"{op.name}: {name} from {form.__name__.strip('_')} inputs", plain[name], value)


def _every_second(tensor: Tensor) -> Tensor:
    """A view with a gap after every element of the last axis."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], dim=-1)[..., 0]


def _misaligned(tensor: Tensor) -> Tensor:
    """The same elements, one element behind an aligned address."""
    flat = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
    return flat[1:].view(tensor.shape)


def _axes_swapped(tensor: Tensor) -> Tensor:
    """The same elements with the last two axes swapped in memory."""
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def check_all_properties(op: OpUnderTest, pack: Pack, dtype: torch.dtype) -> None:
    """Every property of this file that a packing admits."""
    check_packed_equals_alone(op, pack, dtype)
    check_permutation(op, pack, dtype)
    check_isolation(op, pack, dtype)
    check_repeatable(op, pack, dtype)
    if pack.padding == 0 and 0 not in pack.lengths:
        check_spellings(op, pack, dtype)
