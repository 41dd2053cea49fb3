"""Runs of a model under forward hooks that see, and may replace, what its layers get."""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..hooks import internals
from .layers import Place

# (index of a call, its hidden states [T, ...]) -> what the layer gets instead.
Feed = Callable[[int, Tensor], Tensor]


class Call:
    """One call of a layer, or of a mixer inside a layer, in a forward.

    Attributes:
        place: what was called.
        layer: index of the call of its layer, for a mixer; None for a layer.
        given: of a layer, the hidden states it got from the model, ``[T, ...]``, or None where no argument looks like
            them.
        output: the hidden states it returned, ``[T, ...]``, or None likewise.
        boundaries: the boundary keywords that reached it.
    """

    def __init__(self, place: Place, layer: Optional[int], given: Optional[Tensor], boundaries: Tuple[str, ...]):
        self.place = place
        self.layer = layer
        self.given = given
        self.output: Optional[Tensor] = None
        self.boundaries = boundaries


class Run(NamedTuple):
    """One forward.

    Attributes:
        calls: those of the layers, in the order in which they began.
        output: the model's output ``[T, ...]``.
        results: tensors of the output with one or two dimensions, by name; among them what it gives for a sample.
    """

    calls: List[Call]
    output: Optional[Tensor]
    results: Dict[str, Tensor]


class Watch:
    """Records the calls of one forward at a time. ``running`` holds those that have begun and not ended."""

    def __init__(self, layers: Sequence[Place], virtual: int) -> None:
        self._layers = {place.module: place for place in layers}
        self._virtual = virtual
        self._start(0, None)

    def _start(self, length: int, feed: Optional[Feed]) -> None:
        self.calls: List[Call] = []
        self.running: List[Call] = []
        self._length = length
        self._feed = feed

    def run(self, forward: Callable[[], Any], length: int, feed: Optional[Feed] = None) -> Run:
        """Watch ``forward()`` on a row of ``length`` tokens; ``feed`` replaces the hidden states that layers get."""
        self._start(length, feed)
        output = forward()
        return Run(self.calls, self._states(output), flat_results(output))

    def _rows(self, value: Any) -> Optional[Tensor]:
        """The rows of the tokens, without those of virtual tokens that an adapter has put before them."""
        found = rows(value, self._length)
        if found is None and self._virtual:
            found = rows(value, self._length + self._virtual)
            found = None if found is None else found[self._virtual :]
        return found

    def _states(self, output: Any) -> Optional[Tensor]:
        return next((found for found in map(self._rows, _parts(output)) if found is not None), None)

    def modules(self) -> List[nn.Module]:
        """Layers and mixers, each once: layers may share a mixer."""
        places = [part for place in self._layers.values() for part in (place, *place.mixers)]
        return list(dict.fromkeys(part.module for part in places))

    def _place(self, module: nn.Module) -> Optional[Place]:
        """What a call of ``module`` is now, or None if it is neither a layer nor a mixer of the running one."""
        if not self.running:
            return self._layers.get(module)
        if self.running[-1].layer is not None:
            return None
        return next((mixer for mixer in self.running[-1].place.mixers if mixer.module is module), None)

    def enter(self, module: nn.Module, args: Tuple[Any, ...], kwargs: Any) -> Optional[Tuple[Any, Any]]:
        place = self._place(module)
        if place is None:
            return None
        names = tuple(name for name in internals.BOUNDARY_KEYWORDS if kwargs.get(name) is not None)
        if self.running:
            self._begin(Call(place, self.calls.index(self.running[-1]), None, names))
            return None
        key = self._hidden_argument(args, kwargs)
        found = None if key is None else args[key] if isinstance(key, int) else kwargs[key]
        given = copied(self._rows(found))
        self._begin(Call(place, None, given, names))
        if given is None or self._feed is None:
            return None
        fed = self._feed(len(self.calls) - 1, given)
        if found.numel() != fed.numel():
            fed = torch.cat([found.reshape(-1, *fed.shape[1:])[: self._virtual], fed])
        fed = fed.reshape(found.shape)
        if isinstance(key, int):
            return (*args[:key], fed, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: fed}

    def _begin(self, call: Call) -> None:
        self.calls.append(call)
        self.running.append(call)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running and self.running[-1].place.module is module:
            self.running.pop().output = copied(self._states(output))

    def _hidden_argument(self, args: Tuple[Any, ...], kwargs: Any) -> Optional[Union[int, str]]:
        named = [*enumerate(args), ("hidden_states", kwargs.get("hidden_states")), *kwargs.items()]
        return next((key for key, value in named if self._rows(value) is not None), None)


def rows(value: Any, length: int) -> Optional[Tensor]:
    """``value`` as ``[T, ...]`` if it is a float tensor ``[1, T, ...]`` or ``[T, D]`` of T = ``length``, else None."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dim() >= 3 and value.shape[:2] == (1, length):
        return value[0]
    return value if value.dim() == 2 and value.shape[0] == length else None


def _parts(output: Any) -> Sequence[Any]:
    parts = list(output.values()) if isinstance(output, dict) else output
    return parts if isinstance(parts, (tuple, list)) else [parts]


def flat_results(output: Any) -> Dict[str, Tensor]:
    """The float tensors of a model's output with one or two dimensions, by name, without losses and hidden states."""
    named = output if isinstance(output, dict) else dict(enumerate(_parts(output)))
    return {
        str(name): value.clone()
        for name, value in named.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() in (1, 2)
        and not any(word in str(name) for word in ("loss", "hidden", "router"))
    }


def copied(hidden: Optional[Tensor]) -> Optional[Tensor]:
    """A later layer may add to what it is given in place."""
    return None if hidden is None else hidden.clone()


@contextmanager
def watching(model: nn.Module, layers: Sequence[Place], virtual: int = 0) -> Iterator[Watch]:
    """Hooks on ``layers`` and their mixers, evaluation mode and no gradients, until the block ends or fails.

    ``virtual`` is the number of tokens that an adapter puts before a row.
    """
    watch = Watch(layers, virtual)
    # Not model.eval(): in transformers that may exchange the forward of layers (use_kernels), and so would undoing it.
    training = [module for module in model.modules() if module.training]
    handles = []
    try:
        for module in training:
            module.training = False
        for module in watch.modules():
            handles.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(watch.leave))
        with torch.no_grad():
            yield watch
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
