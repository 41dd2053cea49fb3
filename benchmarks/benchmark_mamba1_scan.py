"""Workloads of Mamba-1's selective scan for ``kernels benchmark``: a pack against the recurrence, token by token.

The recurrence is the definition, not a fast peer. The work is T x D x N exponentials: 1 M forward here, and twice more
in the backward.
"""

import torch
from kernels.benchmark import Benchmark

CHANNELS, STATES = 256, 16
LENGTHS = [100, 1, 155]


class SelectiveScan(Benchmark):
    """u, delta, z ``[1, D, T]``, A ``[D, N]``, B, C ``[1, N, T]``; verifies the output and the gradients."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = sum(LENGTHS)

        def leaf(values: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return values.to(device=self.device, dtype=dtype).requires_grad_(gradients)

        # Channel-last, as a convolution in front of it leaves them.
        self.u, self.z = (leaf(torch.randn(1, tokens, CHANNELS).transpose(1, 2)) for _ in range(2))
        self.delta = leaf(torch.randn(1, CHANNELS, tokens) / 2 - 3)
        self.A = leaf(-torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1), torch.float32)
        self.B, self.C = (leaf(torch.randn(1, tokens, STATES).transpose(1, 2) / 4) for _ in range(2))
        self.D = leaf(torch.ones(CHANNELS), torch.float32)
        self.bias = leaf(torch.randn(CHANNELS) / 10, torch.float32)
        # Small weights keep the sums over channels inside the runner's absolute tolerance.
        self.dy = (torch.randn(1, CHANNELS, tokens, device=self.device) / 16).to(dtype)
        self.cu_seqlens = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0, dtype=torch.int32)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.bias

    def recurrence(self) -> torch.Tensor:
        """The package's own reference, in float32."""
        u, delta, z = (tensor[0].float() for tensor in (self.u, self.delta, self.z))
        B, C = self.B.float(), self.C.float()
        reference = self.kernel.mamba1_scan.selective_scan_reference
        y, _ = reference(u, delta, self.A, B, C, self.D, z, self.bias, True, self.cu_seqlens)
        return y[None].to(self.u.dtype)

    def ours(self) -> torch.Tensor:
        return self.kernel.selective_scan_fn(*self.inputs, delta_softplus=True, cu_seqlens=self.cu_seqlens)

    def with_gradients(self, y: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(y, self.inputs, self.dy)
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
