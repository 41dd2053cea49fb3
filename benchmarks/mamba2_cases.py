"""Mamba-2's scan and its decoding step, for ``cases.py``."""

from __future__ import annotations

from types import ModuleType

import torch
from case import CHUNK, DTYPES, LENGTHS, Case, leaf, offsets, samples
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2 as stock

HEADS, HEAD_DIM, STATE_DIM = 16, 64, 128
SHAPE = f"{HEADS} heads x {HEAD_DIM}, state {STATE_DIM}"


def scan(kernel: ModuleType, dtype: str, distribution: str) -> Case:
    """x ``[1, T, 16, 64]``, one group, B, C ``[1, T, 1, 128]``; A, D and dt_bias fp32 as transformers keeps A."""
    lengths, element = LENGTHS[distribution], DTYPES[dtype]
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    x = leaf(torch.randn(1, tokens, HEADS, HEAD_DIM), element)
    dt = leaf(torch.randn(1, tokens, HEADS), element)
    B, C = (leaf(torch.randn(1, tokens, 1, STATE_DIM) / STATE_DIM**0.25, element) for _ in range(2))
    A = leaf(-torch.rand(HEADS) - 0.1, torch.float32)
    D, dt_bias = (leaf(torch.randn(HEADS), torch.float32) for _ in range(2))

    def ours(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        return kernel.mamba_chunk_scan_combined(
            x, dt, A, B, C, 256, D, dt_bias=dt_bias, dt_softplus=True, cu_seqlens=cu_seqlens
        )

    def alone(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        def one(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            return stock.mamba2_chunk_scan(
                x, dt, A, B, C, chunk_size=256, D=D, dt_bias=dt_bias, dt_softplus=True
            )

        return torch.cat([one(*part) for part in samples((x, dt, B, C), lengths, 1)], 1)

    # A token and head: two products with the P x S state, its row of M x, and its share of C B^T (their lower halves).
    # Each product has two in the backward.
    flops = tokens * HEADS * (4 * HEAD_DIM * STATE_DIM + CHUNK * HEAD_DIM) + tokens * CHUNK * STATE_DIM
    return Case(
        op="mamba_chunk_scan_combined",
        dtype=dtype,
        shape=SHAPE,
        distribution=distribution,
        lengths=lengths,
        tensors=(x, dt, B, C, A, D, dt_bias),
        ours=ours,
        alone=alone,
        stock_pack=None,
        exact=torch.float32,
        limit="fp32",
        forward_work=flops,
        both_work=3 * flops,
    )


def step(kernel: ModuleType, dtype: str, batch: int) -> Case:
    """One decoding step, state ``[B, 16, 64, 128]`` fp32, in the call form of transformers."""
    element = DTYPES[dtype]
    x = torch.randn(batch, HEADS, HEAD_DIM).to(element)
    dt = torch.randn(batch, HEADS).to(element)
    B, C = (torch.randn(batch, 1, STATE_DIM).to(element) for _ in range(2))
    A, D, dt_bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    state = torch.randn(batch, HEADS, HEAD_DIM, STATE_DIM)

    def by(function):
        def call(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor):
            after = state.clone()
            y = function(
                after,
                x,
                dt[:, :, None].expand(-1, -1, HEAD_DIM),
                A[:, None, None].expand(-1, HEAD_DIM, STATE_DIM),
                B,
                C,
                D[:, None].expand(-1, HEAD_DIM),
                z=None,
                dt_bias=dt_bias[:, None].expand(-1, HEAD_DIM),
                dt_softplus=True,
            )
            return y, after

        return call

    return Case(
        op="selective_state_update",
        dtype=dtype,
        shape=SHAPE,
        distribution=f"batch {batch}",
        lengths=(1,) * batch,
        tensors=(x, dt, B, C, state),
        ours=by(kernel.selective_state_update),
        alone=by(stock.mamba2_selective_state_update),
        stock_pack=None,
        exact=torch.float32,
        limit="copy",
        # The call reads and writes the state, and copies it first so that each run starts from the same one.
        forward_work=4 * state.nbytes,
        both_work=0,
    )
