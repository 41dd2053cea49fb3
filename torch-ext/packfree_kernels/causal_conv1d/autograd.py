"""Shapes and gradient of the causal convolution's ops.

dx is the correlation run backwards inside each sequence, dweight and dbias sum over all tokens, and z is recomputed
from the saved input, so nothing but the inputs is kept.
"""

from typing import Any, Tuple

from torch import Tensor

from .._autograd import differentiable, forward_only
from .._tracing import returns, returns_gradients


@returns("causal_conv1d_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    states = (a.cu_seqlens.shape[0] - 1, a.x.shape[2 if a.channels_last else 1], a.weight.shape[1] - 1)
    return a.x.new_empty(a.x.shape), a.x.new_empty(states if a.want_states else (0,))


@returns("causal_conv1d_update")
def _updated(a: Any) -> Tensor:
    return a.x.new_empty(a.x.shape)


returns_gradients("causal_conv1d", wide=["weight", "bias", "initial_states"])
differentiable("causal_conv1d", "causal_conv1d_fn", states="final_states", asked_by="want_states")
forward_only("causal_conv1d_update", "causal_conv1d_update", "causal_conv1d_fn, which takes initial_states")
