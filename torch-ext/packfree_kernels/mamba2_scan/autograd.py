"""Shapes of the ops for tracing, and the gradient of the scan.

The backward op recomputes the states from the inputs, which are all that is saved.
"""

from typing import Any, Tuple

from torch import Tensor

from .._autograd import differentiable, forward_only
from .._dtypes import accumulation_dtype
from .._tracing import returns, returns_gradients


@returns("mamba2_scan_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    state = (a.cu_seqlens.shape[0] - 1, a.x.shape[1], a.x.shape[2], a.B.shape[2])
    return a.x.new_empty(a.x.shape), a.x.new_empty(state if a.want_state else (0,), dtype=accumulation_dtype(a.x))


@returns("selective_state_update")
def _updated(a: Any) -> Tensor:
    return a.x.new_empty(a.x.shape)


returns_gradients("mamba2_scan", wide=["dt", "A", "D", "dt_bias", "initial_state"])
differentiable("mamba2_scan", "mamba_chunk_scan_combined", states="final_state", asked_by="want_state")
forward_only(
    "selective_state_update",
    "selective_state_update",
    "mamba_chunk_scan_combined or selective_scan_fn, which take initial_states",
)
