"""Workloads of the causal convolution for ``kernels benchmark``: a pack against PyTorch, sample by sample.

The full comparison, with its length distributions and the limits of the machine, is ``benchmarks/run.py``.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

CHANNELS, WIDTH = 1024, 4
# 1,024 tokens; forward moves x and y once, 2 x 4 MB in fp32.
LENGTHS = [300, 1, 149, 574]


class CausalConv1d(Benchmark):
    """x ``[1, D, T]`` and weight ``[D, W]``, silu; the output, followed by dx and dweight, is what is verified."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = sum(LENGTHS)
        self.x = torch.randn(1, CHANNELS, tokens, device=self.device).to(dtype).requires_grad_(gradients)
        # Small weights keep bf16's rounding inside the runner's absolute tolerance.
        self.weight = (0.1 * torch.randn(CHANNELS, WIDTH, device=self.device)).to(dtype).requires_grad_(gradients)
        self.dy = torch.randn(1, CHANNELS, tokens, device=self.device).to(dtype)
        self.cu_seqlens = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0, dtype=torch.int32)

    def stock(self) -> torch.Tensor:
        parts = [
            F.conv1d(F.pad(part, (WIDTH - 1, 0)), self.weight[:, None], groups=CHANNELS)
            for part in self.x.split(LENGTHS, 2)
        ]
        return F.silu(torch.cat(parts, -1))

    def ours(self) -> torch.Tensor:
        return self.kernel.causal_conv1d_fn(self.x, self.weight, activation="silu", cu_seqlens=self.cu_seqlens)

    def with_gradients(self, y: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(y, (self.x, self.weight), self.dy)
        return torch.cat([tensor.flatten() for tensor in (y.detach(), *gradients)])

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
