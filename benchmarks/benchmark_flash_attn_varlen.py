"""Workloads of packed attention for ``kernels benchmark``: a pack against PyTorch's attention, sample by sample.

The full comparison, with its length distributions and the limits of the machine, is ``benchmarks/run.py``.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# 1,024 tokens; causal, so 4 x K x H flops for each of 221,351 query-key pairs.
LENGTHS = [300, 1, 149, 574]


class FlashAttnVarlen(Benchmark):
    """q ``[T, 8, 64]``, k and v ``[T, 2, 64]``; the output, followed by dq, dk and dv, is what is verified."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = sum(LENGTHS)
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        self.inputs = [
            torch.randn(tokens, heads, HEAD_DIM, device=self.device).to(dtype).requires_grad_(gradients)
            for heads in sizes
        ]
        self.do = torch.randn(tokens, HEADS, HEAD_DIM, device=self.device).to(dtype)
        self.cu_seqlens = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0, dtype=torch.int32)

    def stock(self) -> torch.Tensor:
        parts = []
        for sample in zip(*(tensor.split(LENGTHS) for tensor in self.inputs)):
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in sample)
            part = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    def ours(self) -> torch.Tensor:
        offsets = self.cu_seqlens
        return self.kernel.flash_attn_varlen_func(
            *self.inputs, offsets, offsets, max(LENGTHS), max(LENGTHS), causal=True
        )

    def with_gradients(self, o: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(o, self.inputs, self.do)
        return torch.cat([tensor.flatten() for tensor in (o.detach(), *gradients)])

    def setup_forward_fp32(self) -> None:
        self.make(torch.float32, gradients=False)

    def benchmark_forward_fp32(self) -> None:
        self.out = self.ours()

    def verify_forward_fp32(self) -> torch.Tensor:
        return self.stock()

    def setup_forward_bf16(self) -> None:
        self.make(torch.bfloat16, gradients=False)

    def benchmark_forward_bf16(self) -> None:
        self.out = self.ours()

    def verify_forward_bf16(self) -> torch.Tensor:
        return self.stock()

    def setup_forward_backward_fp32(self) -> None:
        self.make(torch.float32, gradients=True)

    def benchmark_forward_backward_fp32(self) -> None:
        self.out = self.with_gradients(self.ours())

    def verify_forward_backward_fp32(self) -> torch.Tensor:
        return self.with_gradients(self.stock())
