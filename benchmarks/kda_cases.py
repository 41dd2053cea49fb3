"""Kimi delta attention and its decoding step, for ``cases.py``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from case import CHUNK, DTYPES, LENGTHS, Case, leaf, offsets, samples
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as stock


def scan(kernel: ModuleType, dtype: str, distribution: str) -> Case:
    """Kimi delta attention, 4 heads of 128, normalised inside; q, k, v, g ``[1, T, 4, 128]``.

    Lengths are an eighth of the others', because the stock function takes seconds.
    """
    heads, head_dim, lengths = 4, 128, tuple(max(4, length // 8) for length in LENGTHS[distribution])
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    element = DTYPES[dtype]
    q, k, v = (leaf(torch.randn(1, tokens, heads, head_dim), element) for _ in range(3))
    g = leaf(-torch.rand(1, tokens, heads, head_dim), torch.float32)
    beta = leaf(torch.rand(1, tokens, heads), element)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return kernel.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0]

    def alone(*tensors: Tensor) -> Tensor:
        parts = samples(tensors, lengths, 1)
        options = dict(use_qk_l2norm_in_kernel=True)
        return torch.cat([stock.chunk_kimi_delta_attention(*part, **options)[0] for part in parts], 1)

    # A token and head: kk, qk, the solve and the product of the chunk (their lower halves), and three products with the
    # K x V state. Each product has two in the backward.
    flops = tokens * heads * (5 * CHUNK * head_dim + 6 * head_dim * head_dim)
    return Case(
        op="chunk_kda",
        dtype=dtype,
        shape=f"{heads} heads x {head_dim}",
        distribution=distribution,
        lengths=lengths,
        tensors=(q, k, v, g, beta),
        ours=ours,
        alone=alone,
        stock_pack=None,
        exact=torch.float32,
        limit="fp32",
        forward_work=flops,
        both_work=3 * flops,
    )


def step(kernel: ModuleType, dtype: str, batch: int) -> Case:
    """One decoding step, 8 heads of 128, state ``[B, 8, 128, 128]`` fp32."""
    heads, head_dim = 8, 128
    element = DTYPES[dtype]
    q, k, v = (torch.randn(batch, 1, heads, head_dim).to(element) for _ in range(3))
    g, beta = -torch.rand(batch, 1, heads, head_dim), torch.rand(batch, 1, heads).to(element)
    state = torch.randn(batch, heads, head_dim, head_dim)

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda q, k, v, g, beta, state: function(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return Case(
        op="fused_recurrent_kda",
        dtype=dtype,
        shape=f"{heads} heads x {head_dim}",
        distribution=f"batch {batch}",
        lengths=(1,) * batch,
        tensors=(q, k, v, g, beta, state),
        ours=run(kernel.fused_recurrent_kda),
        alone=run(stock.recurrent_kimi_delta_attention),
        stock_pack=None,
        exact=torch.float32,
        limit="copy",
        forward_work=2 * state.nbytes,
        both_work=0,
    )
