"""Workloads of Mamba-1's selective scan for ``kernels benchmark``: a pack against the recurrence, token by token.

The recurrence is the definition, not a fast peer. The work is T x D x N exponentials: 1 M forward here, and twice more
in the backward.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

CHANNELS, STATES = 256, 16
BOUNDS = [(0, 100), (100, 101), (101, 256)]


class SelectiveScan(Benchmark):
    """u, delta, z ``[1, D, T]``, A ``[D, N]``, B, C ``[1, N, T]``; verifies the output and the gradients."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = BOUNDS[-1][1]

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
        offsets = [0, *(eos for _, eos in BOUNDS)]
        self.cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=self.device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.bias

    def recurrence(self) -> torch.Tensor:
        u, delta, z = (tensor[0].float() for tensor in (self.u, self.delta, self.z))
        b, c = (tensor[0].float() for tensor in (self.B, self.C))
        step = F.softplus(delta + self.bias[:, None])
        outputs = []
        for bos, eos in BOUNDS:
            h = torch.zeros(CHANNELS, STATES, device=self.device)
            for t in range(bos, eos):
                # h = exp(s A) h + s u B; y = C . h + D u
                h = torch.exp(step[:, t, None] * self.A) * h + (step[:, t] * u[:, t])[:, None] * b[:, t]
                outputs.append(h @ c[:, t] + self.D * u[:, t])
        return (torch.stack(outputs, -1) * F.silu(z))[None].to(self.u.dtype)

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
