"""Shapes and gradient of the scan's ops.

The backward op runs the states forward again from the inputs, which are all that is saved. Gradients of u, delta and z
come in y's axis order, those of B and C per token as [B, T, G, N].
"""

from typing import Any, Callable, Dict, Tuple

from torch import Tensor

from .._autograd import differentiable
from .._dtypes import accumulation_dtype
from .._tracing import returns, returns_gradients


def _tokens_shape(a: Any) -> Tuple[int, ...]:
    batch, channels, tokens = a.u.shape
    return (batch, tokens, channels) if a.channels_last else (batch, channels, tokens)


def _rows(name: str) -> Callable[[Any], Tuple[int, ...]]:
    """Of the gradient of B or C: by token where they change with it."""

    def shape(a: Any) -> Tuple[int, ...]:
        fixed_or_not = getattr(a, name).shape
        if len(fixed_or_not) == 2:
            return fixed_or_not
        batch, groups, states, tokens = fixed_or_not
        return batch, tokens, groups, states

    return shape


@returns("mamba1_scan_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    states = (a.cu_seqlens.shape[0] - 1, a.u.shape[1], a.A.shape[1])
    y = a.u.new_empty(_tokens_shape(a))
    return y, a.u.new_empty(states if a.want_states else (0,), dtype=accumulation_dtype(a.u))


def _like_inputs(gradients: Dict[str, Tensor], arguments: Dict[str, Any]) -> Dict[str, Tensor]:
    """Axes in the order of the forward op's inputs."""
    permuted_back = dict(gradients)
    if arguments["channels_last"]:
        for name in ("u", "delta", "z") if arguments["z"] is not None else ("u", "delta"):
            permuted_back[name] = gradients[name].transpose(1, 2)
    for name in ("B", "C"):
        if arguments[name].dim() == 4:
            permuted_back[name] = gradients[name].permute(0, 2, 3, 1)
    return permuted_back


returns_gradients(
    "mamba1_scan",
    wide=["A", "D", "delta_bias", "initial_states"],
    shapes={"u": _tokens_shape, "delta": _tokens_shape, "z": _tokens_shape, "B": _rows("B"), "C": _rows("C")},
)
differentiable("mamba1_scan", "selective_scan_fn", "final_states", "want_states", _like_inputs)
