"""Workloads of Mamba-2's scan for ``kernels benchmark``: a pack against the recurrence, token by token.

The recurrence is the definition, not a fast peer: the comparison with a fast one is ``benchmarks/run.py``.
"""

import torch
from kernels.benchmark import Benchmark

HEADS, HEAD_DIM, STATE_DIM = 8, 64, 128
LENGTHS = [100, 1, 155]


class Mamba2Scan(Benchmark):
    """x ``[1, T, 8, 64]``, B, C ``[1, T, 1, 128]``, dt ``[1, T, 8]``; verifies the output and the gradients."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = sum(LENGTHS)

        def leaf(values: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return values.to(device=self.device, dtype=dtype).requires_grad_(gradients)

        self.x = leaf(torch.randn(1, tokens, HEADS, HEAD_DIM))
        self.dt = leaf(torch.randn(1, tokens, HEADS))
        self.A = leaf(-torch.rand(HEADS), torch.float32)
        self.B, self.C = (leaf(torch.randn(1, tokens, 1, STATE_DIM) / STATE_DIM**0.25) for _ in range(2))
        self.D, self.dt_bias = (leaf(torch.randn(HEADS), torch.float32) for _ in range(2))
        self.dy = torch.randn(1, tokens, HEADS, HEAD_DIM, device=self.device).to(dtype)
        self.cu_seqlens = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0, dtype=torch.int32)

    def leaves(self):
        return self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias

    def recurrence(self) -> torch.Tensor:
        """The package's own reference, in float32."""
        x, dt, B, C = (tensor[0].float() for tensor in (self.x, self.dt, self.B, self.C))
        reference = self.kernel.mamba2_scan.mamba2_scan_reference
        options = dict(D=self.D, dt_bias=self.dt_bias, dt_softplus=True)
        return reference(x, dt, self.A, B, C, self.cu_seqlens, **options)[0][None].to(self.x.dtype)

    def ours(self) -> torch.Tensor:
        return self.kernel.mamba_chunk_scan_combined(
            self.x,
            self.dt,
            self.A,
            self.B,
            self.C,
            256,
            self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            cu_seqlens=self.cu_seqlens,
        )

    def with_gradients(self, y: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(y, self.leaves(), self.dy)
        return torch.cat([tensor.flatten() for tensor in (y.detach(), *gradients)])

    def setup_forward_fp32(self) -> None:
        self.make(torch.float32, gradients=False)

    def benchmark_forward_fp32(self) -> None:
        self.out = self.ours()

    def verify_forward_fp32(self) -> torch.Tensor:
        return self.recurrence()

    def setup_forward_bf16(self) -> None:
        self.make(torch.bfloat16, gradients=False)

    def benchmark_forward_bf16(self) -> None:
        self.out = self.ours()

    def verify_forward_bf16(self) -> torch.Tensor:
        return self.recurrence()

    def setup_forward_backward_fp32(self) -> None:
        self.make(torch.float32, gradients=True)

    def benchmark_forward_backward_fp32(self) -> None:
        self.out = self.with_gradients(self.ours())

    def verify_forward_backward_fp32(self) -> torch.Tensor:
        return self.with_gradients(self.recurrence())
