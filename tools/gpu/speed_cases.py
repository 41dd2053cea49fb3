"""Layers of models of some billions of parameters, in bf16, each as this package and as others compute it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.case import Work


@dataclass(frozen=True)
class Case(Work):
    """In bf16; ``ours``, its other ``ways`` and each of ``peers`` give a tensor."""

    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    ways: dict[str, Callable[..., Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Documents:
    """``count`` documents in a row of ``tokens``; lengths as texts have them, a draw from a log-normal distribution."""

    tokens: int
    count: int
    device: str

    @cached_property
    def lengths(self) -> list[int]:
        draw = torch.randn(self.count, generator=torch.Generator().manual_seed(self.count)).mul(0.8).exp()
        offsets = (draw.cumsum(0) / draw.sum() * self.tokens).round().long().clamp(1, self.tokens)
        offsets[-1] = self.tokens
        return torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist()

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths], device=self.device).cumsum(0, dtype=torch.int32)

    @cached_property
    def seq_idx(self) -> Tensor:
        labels = torch.repeat_interleave(torch.arange(self.count, dtype=torch.int32), torch.tensor(self.lengths))
        return labels[None].to(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def leaf(self, *shape: int) -> Tensor:
        return self.random(*shape).requires_grad_()


def attention(kernel: ModuleType, documents: Documents) -> Case:
    """Ours by PyTorch's kernel and by Triton's, whichever of the two a call of this number of documents would get."""
    heads, kv_heads, dim, tokens = 32, 8, 128, documents.tokens
    cu, longest = documents.cu_seqlens, documents.longest
    peers: dict[str, Callable[..., Tensor]] = {}

    def pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        k, v = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v))
        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))

    peers["PyTorch varlen_attn"] = pytorch
    try:
        from flash_attn import flash_attn_varlen_func

        peers["flash-attn"] = lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
    except ImportError:
        pass
    flops = sum(2 * length * (length + 1) * dim * heads for length in documents.lengths)
    choice = importlib.import_module(f"{kernel.__name__}.flash_attn_varlen.cuda")

    def ours(most_sequences: int) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The backward chooses when it runs, which is before the other way is called.
            choice._MOST_SEQUENCES = most_sequences
            return kernel.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

        return run

    return Case(
        "flash_attn_varlen_func",
        f"{heads}/{kv_heads} heads x {dim}",
        (documents.leaf(tokens, heads, dim), *(documents.leaf(tokens, kv_heads, dim) for _ in range(2))),
        ours(documents.count),
        "bf16",
        flops,
        3.5 * flops,
        peers,
        {"ours, Triton": ours(0)},
    )


def _delta_tensors(documents: Documents, heads: int, dim: int, decays: tuple[int, ...]) -> tuple[Tensor, ...]:
    rows = (1, documents.tokens, heads)
    q, k, v = (documents.leaf(*rows, dim) for _ in range(3))
    g = (-torch.rand(*rows, *decays, device=documents.device)).requires_grad_()
    return q, k, v, g, torch.rand(*rows, device=documents.device).to(torch.bfloat16).requires_grad_()


def _delta_rule(kernel: ModuleType, documents: Documents, name: str, peer: str, decays: tuple[int, ...]) -> Case:
    heads, dim, tokens = 16, 128, documents.tokens
    options = dict(cu_seqlens=documents.cu_seqlens, use_qk_l2norm_in_kernel=True)
    peers = {}
    try:
        module = __import__(f"fla.ops.{peer}", fromlist=[name])
        peers["FLA"] = lambda q, k, v, g, beta: getattr(module, name)(q, k, v, g=g, beta=beta, **options)[0]
    except (ImportError, AttributeError):
        pass
    # A token and head: the lower halves of kk, qk, the solve and the chunk's product; three products with the state.
    flops = tokens * heads * (5 * 64 * dim + 6 * dim * dim)
    return Case(
        name,
        f"{heads} heads x {dim}",
        _delta_tensors(documents, heads, dim, decays),
        lambda q, k, v, g, beta: getattr(kernel, name)(q, k, v, g, beta, **options)[0],
        "bf16",
        flops,
        3 * flops,
        peers,
    )


def gated_delta_rule(kernel: ModuleType, documents: Documents) -> Case:
    return _delta_rule(kernel, documents, "chunk_gated_delta_rule", "gated_delta_rule", ())


def kda(kernel: ModuleType, documents: Documents) -> Case:
    return _delta_rule(kernel, documents, "chunk_kda", "kda", (128,))


def mamba2(kernel: ModuleType, documents: Documents) -> Case:
    heads, dim, state, tokens = 64, 64, 128, documents.tokens
    labels, cu = documents.seq_idx, documents.cu_seqlens
    peers = {}
    options = dict(dt_softplus=True)
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        peers["mamba-ssm"] = lambda x, dt, B, C, A: mamba_chunk_scan_combined(
            x, dt, A, B, C, 256, seq_idx=labels, **options
        )
    except ImportError:
        pass
    flops = tokens * heads * (4 * dim * state + 64 * dim) + tokens * 64 * state
    A = (-torch.rand(heads, device=documents.device) - 0.1).requires_grad_()
    return Case(
        "mamba_chunk_scan_combined",
        f"{heads} heads x {dim}, state {state}",
        (
            documents.leaf(1, tokens, heads, dim),
            documents.leaf(1, tokens, heads),
            *(documents.leaf(1, tokens, 1, state) for _ in range(2)),
            A,
        ),
        lambda x, dt, B, C, A: kernel.mamba_chunk_scan_combined(x, dt, A, B, C, 256, cu_seqlens=cu, **options),
        "bf16",
        flops,
        3 * flops,
        peers,
    )


def convolution(kernel: ModuleType, documents: Documents) -> Case:
    channels, width, tokens = 8192, 4, documents.tokens
    cu, labels = documents.cu_seqlens, documents.seq_idx
    x = documents.random(1, tokens, channels).transpose(1, 2).requires_grad_()
    peers = {}
    try:
        from causal_conv1d import causal_conv1d_fn

        peers["causal-conv1d"] = lambda x, weight: causal_conv1d_fn(x, weight, activation="silu", seq_idx=labels)
    except ImportError:
        pass
    size = 2 * channels * tokens
    return Case(
        "causal_conv1d_fn",
        f"{channels} x {width}",
        (x, documents.leaf(channels, width)),
        lambda x, weight: kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=cu),
        "copy",
        2 * size,
        5 * size,
        peers,
    )


def mamba1(kernel: ModuleType, documents: Documents) -> Case:
    """No peer has boundaries: mamba-ssm's scan of the whole row does less and gives another result."""
    channels, states, tokens, cu = 4096, 16, documents.tokens, documents.cu_seqlens
    u, z, delta = (documents.random(1, tokens, channels) for _ in range(3))
    B, C = (documents.random(1, tokens, states).transpose(1, 2) for _ in range(2))
    A = -torch.arange(1.0, states + 1, device=documents.device).repeat(channels, 1)
    by_channel = (u.transpose(1, 2), (delta / 2 - 3).transpose(1, 2), z.transpose(1, 2))
    tensors = tuple(tensor.requires_grad_() for tensor in (*by_channel, B, C, A))
    size = 2 * channels * tokens
    return Case(
        "selective_scan_fn",
        f"{channels} x {states} states",
        tensors,
        lambda u, delta, z, B, C, A: kernel.selective_scan_fn(
            u, delta, A, B, C, None, z, None, delta_softplus=True, cu_seqlens=cu
        ),
        "copy",
        # u, delta, z in, y out; the backward reads these and dy, and writes three gradients.
        4 * size,
        11 * size,
    )


CASES = (attention, gated_delta_rule, kda, mamba2, convolution, mamba1)
