"""Shapes and gradient formula of the attention ops.

The forward keeps its inputs, its output and the log-sum-exp of each row; the backward recomputes the probabilities from
them block by block. A gradient of the log-sum-exp is honoured: it enters where delta = sum(dout * out) does.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._autograd import differentiable
from .._dtypes import accumulation_dtype
from .._ops import add_op_namespace_prefix


@torch.library.register_fake(add_op_namespace_prefix("flash_attn_varlen_fwd"))
def _fwd_fake(
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
    tokens, heads = q.shape[0], q.shape[1]
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((heads, tokens), dtype=accumulation_dtype(q))
    return out, lse


@torch.library.register_fake(add_op_namespace_prefix("flash_attn_varlen_bwd"))
def _bwd_fake(
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
    ds_aux = q.new_empty((q.shape[1] if s_aux is not None else 0,), dtype=accumulation_dtype(q))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), ds_aux


differentiable("flash_attn_varlen", "flash_attn_varlen_func")
