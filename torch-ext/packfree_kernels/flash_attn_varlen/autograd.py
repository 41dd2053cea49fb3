"""Shapes and gradient formula of the attention ops.

The forward keeps its inputs, its output and the log-sum-exp of each row; the backward recomputes the probabilities from
them block by block. A gradient of the log-sum-exp is honoured: it enters where delta = sum(dout * out) does.
"""

from typing import Any, Tuple

from torch import Tensor

from .._autograd import differentiable
from .._dtypes import accumulation_dtype
from .._tracing import returns, returns_gradients


@returns("flash_attn_varlen_fwd")
def _results(a: Any) -> Tuple[Tensor, Tensor]:
    tokens, heads = a.q.shape[0], a.q.shape[1]
    out = a.q.new_empty((tokens, heads, a.v.shape[2]))
    return out, a.q.new_empty((heads, tokens), dtype=accumulation_dtype(a.q))


returns_gradients("flash_attn_varlen", wide=["s_aux"])
differentiable("flash_attn_varlen", "flash_attn_varlen_func")
