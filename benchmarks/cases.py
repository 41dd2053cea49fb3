"""What is measured: shapes, length distributions, and for each op ours, the peers and the truth.

Each case names up to three ways to the same numbers:

- ours: one call on the whole pack;
- alone: a Python loop of the stock function over the sequences, the fastest alternative that gives the right answer;
- stock pack: the stock function on the whole pack, where one keeps sequences apart: attention under a block mask, which
  is what transformers builds. The stock convolution and delta rule have none: transformers refuses them boundaries.

For decoding, "alone" is the stock step on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import kda_cases
import mamba2_cases
import torch
import torch.nn.functional as F
from case import CHUNK, DTYPES, LENGTHS, Case, leaf, offsets, samples
from torch import Tensor
from transformers.models.mamba import modeling_mamba as stock_mamba
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock


def attention(kernel: ModuleType, dtype: str, head_dim: int, distribution: str) -> Case:
    """Causal attention, 8 query and 2 key heads; q ``[T, 8, K]``, k, v ``[T, 2, K]``."""
    heads, kv_heads, lengths = 8, 2, LENGTHS[distribution]
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    sizes = ((tokens, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, head_dim))
    labels = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (labels[:, None] == labels[None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **keywords)[0].transpose(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([sdpa(*part, is_causal=True) for part in samples((q, k, v), lengths, 0)])

    # Two matmuls over the causal half, 2 flops each; the backward has five.
    flops = sum(4 * length * (length + 1) / 2 * head_dim * heads for length in lengths)
    return Case(
        op="flash_attn_varlen_func",
        dtype=dtype,
        shape=f"{heads}/{kv_heads} heads x {head_dim}",
        distribution=distribution,
        lengths=lengths,
        tensors=tuple(leaf(torch.randn(size), DTYPES[dtype]) for size in sizes),
        ours=ours,
        alone=alone,
        stock_pack=lambda q, k, v: sdpa(q, k, v, attn_mask=mask),
        exact=torch.float64,
        limit=dtype,
        forward_work=flops,
        both_work=3.5 * flops,
    )


def delta_rule(kernel: ModuleType, dtype: str, head_dim: int, distribution: str) -> Case:
    """Gated delta rule, 4 key and 8 value heads, normalised inside; q, k ``[1, T, 4, K]``, v ``[1, T, 8, K]``."""
    heads, value_heads, lengths = 4, 8, LENGTHS[distribution]
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    element = DTYPES[dtype]
    q, k = (leaf(torch.randn(1, tokens, heads, head_dim), element) for _ in range(2))
    v = leaf(torch.randn(1, tokens, value_heads, head_dim), element)
    # transformers keeps the decay in fp32 whatever the model's dtype.
    g = leaf(-torch.rand(1, tokens, value_heads), torch.float32)
    beta = leaf(torch.rand(1, tokens, value_heads), element)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return kernel.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0]

    def alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # The stock function wants as many key heads as value heads; the models repeat them as here.
        tensors = (*(tensor.repeat_interleave(value_heads // heads, 2) for tensor in (q, k)), v, g, beta)
        parts = samples(tensors, lengths, 1)
        return torch.cat(
            [stock.torch_chunk_gated_delta_rule(*part, use_qk_l2norm_in_kernel=True)[0] for part in parts], 1
        )

    # A token and value head: kk, qk, the solve and the product of the chunk (their lower halves), and three products
    # with the K x V state. Each product has two in the backward.
    flops = tokens * value_heads * (5 * CHUNK * head_dim + 6 * head_dim * head_dim)
    return Case(
        op="chunk_gated_delta_rule",
        dtype=dtype,
        shape=f"{heads}/{value_heads} heads x {head_dim}",
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


def convolution(kernel: ModuleType, dtype: str, layout: str, distribution: str) -> Case:
    """Causal convolution with silu, 2,048 channels of width 4, x ``[1, D, T]`` in one of two memory orders."""
    channels, width, lengths = 2048, 4, LENGTHS[distribution]
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    element = DTYPES[dtype]
    if layout == "channel-last":
        x = torch.randn(1, tokens, channels).to(element).transpose(1, 2).requires_grad_()
    else:
        x = leaf(torch.randn(1, channels, tokens), element)
    weight = leaf(torch.randn(channels, width), element)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=cu_seqlens)

    def alone(x: Tensor, weight: Tensor) -> Tensor:
        parts = samples((x,), lengths, 2)
        return torch.cat([stock.causal_conv1d_fn(part, weight, None, activation="silu") for (part,) in parts], 2)

    size = channels * tokens * element.itemsize
    return Case(
        op="causal_conv1d_fn",
        dtype=dtype,
        shape=f"{channels} x {width}, {layout}",
        distribution=distribution,
        lengths=lengths,
        tensors=(x, weight),
        ours=ours,
        alone=alone,
        stock_pack=None,
        exact=torch.float64,
        limit="copy",
        # Forward: x in, y out. Backward: x and dy in, dx out.
        forward_work=2 * size,
        both_work=5 * size,
    )


def selective_scan(kernel: ModuleType, dtype: str, distribution: str) -> Case:
    """Mamba-1's scan, 1,024 channels, 16 states; u, z ``[1, D, T]`` channel-last, delta ``[1, D, T]`` token-last.

    Sequences are a sixteenth as long as elsewhere: the backward of the stock loop writes a tensor of the size of all
    states of a sequence for each of its tokens.
    """
    channels, states, lengths = 1024, 16, tuple(max(4, length // 16) for length in LENGTHS[distribution])
    tokens, cu_seqlens = sum(lengths), offsets(lengths)
    element = DTYPES[dtype]
    u, z = (leaf(torch.randn(1, tokens, channels).transpose(1, 2), element) for _ in range(2))
    delta = leaf(torch.randn(1, channels, tokens) / 2 - 3, element)
    B, C = (leaf(torch.randn(1, tokens, states).transpose(1, 2), element) for _ in range(2))
    # transformers hands the parameters over in fp32 whatever the model's dtype.
    A = leaf(-torch.arange(1.0, states + 1).repeat(channels, 1), torch.float32)
    D, bias = leaf(torch.ones(channels), torch.float32), leaf(torch.randn(channels) / 10, torch.float32)

    def ours(u: Tensor, delta: Tensor, z: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor) -> Tensor:
        return kernel.selective_scan_fn(u, delta, A, B, C, D, z, bias, delta_softplus=True, cu_seqlens=cu_seqlens)

    def alone(*tensors: Tensor) -> Tensor:
        A, D, bias = tensors[5:]
        parts = [
            stock_mamba.mamba_selective_scan(u, delta, A, B, C, D, z, bias, delta_softplus=True)
            for u, delta, z, B, C in samples(tensors[:5], lengths, 2)
        ]
        return torch.cat(parts, 2)

    # A token, channel and state: 17 flops for the exponential, 5 for the recurrence and the output. The backward does
    # the exponentials and the recurrence twice more and has 17 flops of its own.
    count = tokens * channels * states
    return Case(
        op="selective_scan_fn",
        dtype=dtype,
        shape=f"{channels} x {states} states",
        distribution=distribution,
        lengths=lengths,
        tensors=(u, delta, z, B, C, A, D, bias),
        ours=ours,
        alone=alone,
        stock_pack=None,
        exact=torch.float32,
        limit="fp32",
        forward_work=22 * count,
        both_work=(22 + 2 * 20 + 17) * count,
    )


def convolution_update(kernel: ModuleType, dtype: str, batch: int) -> Case:
    """One decoding step of the convolution, x ``[B, D, 1]``, conv_state ``[B, D, W - 1]`` changed in place."""
    channels, width = 2048, 4
    element = DTYPES[dtype]
    x, state = torch.randn(batch, channels, 1).to(element), torch.randn(batch, channels, width - 1).to(element)
    weight = torch.randn(channels, width).to(element)

    def step(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda x, state, weight: (function(x, state, weight, None, activation="silu"), state)

    return Case(
        op="causal_conv1d_update",
        dtype=dtype,
        shape=f"{channels} x {width}",
        distribution=f"batch {batch}",
        lengths=(1,) * batch,
        tensors=(x, state, weight),
        ours=step(kernel.causal_conv1d_update),
        alone=step(stock.causal_conv1d_update),
        stock_pack=None,
        exact=torch.float64,
        limit="copy",
        forward_work=2 * state.nbytes + 2 * x.nbytes + weight.nbytes,
        both_work=0,
    )


def delta_rule_step(kernel: ModuleType, dtype: str, batch: int) -> Case:
    """One decoding step of the gated delta rule, 4 key and 8 value heads of 128, state ``[B, 8, 128, 128]`` fp32."""
    heads, value_heads, head_dim = 4, 8, 128
    element = DTYPES[dtype]
    q, k = (torch.randn(batch, 1, heads, head_dim).to(element) for _ in range(2))
    v = torch.randn(batch, 1, value_heads, head_dim).to(element)
    g, beta = -torch.rand(batch, 1, value_heads), torch.rand(batch, 1, value_heads).to(element)
    state = torch.randn(batch, value_heads, head_dim, head_dim)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> object:
        return kernel.fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    def alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> object:
        q, k = (tensor.repeat_interleave(value_heads // heads, 2) for tensor in (q, k))
        return stock.torch_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return Case(
        op="fused_recurrent_gated_delta_rule",
        dtype=dtype,
        shape=f"{heads}/{value_heads} heads x {head_dim}",
        distribution=f"batch {batch}",
        lengths=(1,) * batch,
        tensors=(q, k, v, g, beta, state),
        ours=ours,
        alone=alone,
        stock_pack=None,
        exact=torch.float32,
        limit="copy",
        forward_work=2 * state.nbytes,
        both_work=0,
    )


def plan(quick: bool, ops: list[str] | None) -> list[tuple[str, Callable[[ModuleType], Case]]]:
    """``(op, maker of the case)`` of everything to measure; cases are made one at a time, for their memory's sake."""
    distributions = ["documents"] if quick else list(LENGTHS)
    return [(op, make) for op, make in _all_cases(distributions, quick) if not ops or op in ops]


def _all_cases(distributions: list[str], quick: bool) -> Iterator[tuple[str, Callable[[ModuleType], Case]]]:
    for distribution in distributions:
        for head_dim in (64, 128) if distribution == "documents" and not quick else (64,):
            for dtype in DTYPES:
                yield "flash_attn_varlen_func", _deferred(attention, dtype, head_dim, distribution)
    for distribution in distributions:
        for head_dim in (128, 64) if distribution == "documents" and not quick else (128,):
            for dtype in DTYPES:
                yield "chunk_gated_delta_rule", _deferred(delta_rule, dtype, head_dim, distribution)
    # The stock functions of these and of selective_scan_fn take seconds a call: fewer length distributions.
    short_list = [distribution for distribution in distributions if distribution in ("documents", "many short")]
    for dtype in DTYPES:
        yield "chunk_kda", _deferred(kda_cases.scan, dtype, "documents")
    for distribution in short_list:
        for dtype in DTYPES:
            yield "mamba_chunk_scan_combined", _deferred(mamba2_cases.scan, dtype, distribution)
    for distribution in distributions:
        for layout in ("token-last", "channel-last"):
            for dtype in DTYPES:
                yield "causal_conv1d_fn", _deferred(convolution, dtype, layout, distribution)
    for distribution in short_list:
        for dtype in DTYPES:
            yield "selective_scan_fn", _deferred(selective_scan, dtype, distribution)
    for batch in (1, 32):
        for dtype in DTYPES:
            yield "causal_conv1d_update", _deferred(convolution_update, dtype, batch)
    for batch in (1, 32):
        for dtype in DTYPES:
            yield "fused_recurrent_gated_delta_rule", _deferred(delta_rule_step, dtype, batch)
    for batch in (1, 32):
        for dtype in DTYPES:
            yield "fused_recurrent_kda", _deferred(kda_cases.step, dtype, batch)
    for batch in (1, 32):
        for dtype in DTYPES:
            yield "selective_state_update", _deferred(mamba2_cases.step, dtype, batch)


def _deferred(make: Callable[..., Case], *arguments: object) -> Callable[[ModuleType], Case]:
    return lambda kernel: make(kernel, *arguments)


OPS = tuple(dict.fromkeys(op for op, _ in _all_cases(["documents"], True)))
