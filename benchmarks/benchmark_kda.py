"""Workloads of Kimi delta attention for ``kernels benchmark``: a pack against the recurrence, token by token.

The recurrence is the definition, not a fast peer: the comparison with a fast one is ``benchmarks/run.py``.
"""

import torch
from kernels.benchmark import Benchmark

HEADS, VALUE_HEADS, HEAD_DIM = 2, 4, 64
LENGTHS = [100, 1, 155]


class Kda(Benchmark):
    """q, k ``[1, T, 2, 64]``, v, g ``[1, T, 4, 64]``, beta ``[1, T, 4]``, A_log ``[4]``, dt_bias ``[4, 64]``; verifies
    the output and the gradients, through the gate that models use."""

    seed = 0

    def make(self, dtype: torch.dtype, gradients: bool) -> None:
        tokens = sum(LENGTHS)

        def leaf(values: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return values.to(device=self.device, dtype=dtype).requires_grad_(gradients)

        self.q, self.k = (leaf(torch.randn(1, tokens, HEADS, HEAD_DIM)) for _ in range(2))
        self.v = leaf(torch.randn(1, tokens, VALUE_HEADS, HEAD_DIM))
        self.g = leaf(torch.randn(1, tokens, VALUE_HEADS, HEAD_DIM) - 2)
        self.beta = leaf(torch.rand(1, tokens, VALUE_HEADS))
        self.A_log = leaf(torch.rand(VALUE_HEADS), torch.float32)
        self.dt_bias = leaf(torch.randn(VALUE_HEADS, HEAD_DIM), torch.float32)
        self.do = torch.randn(1, tokens, VALUE_HEADS, HEAD_DIM, device=self.device).to(dtype)
        self.cu_seqlens = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0, dtype=torch.int32)

    def recurrence(self) -> torch.Tensor:
        """The package's own reference, in float32."""
        q, k, v, g, beta = (tensor[0].float() for tensor in (self.q, self.k, self.v, self.g, self.beta))
        reference = self.kernel.kda.kda_reference
        o, _ = reference(q, k, v, g, beta, self.cu_seqlens, l2norm=True, A_log=self.A_log, dt_bias=self.dt_bias)
        return o[None].to(self.v.dtype)

    def ours(self) -> torch.Tensor:
        return self.kernel.chunk_kda(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=self.cu_seqlens,
        )[0]

    def with_gradients(self, o: torch.Tensor) -> torch.Tensor:
        leaves = (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias)
        gradients = torch.autograd.grad(o, leaves, self.do)
        return torch.cat([tensor.flatten() for tensor in (o.detach(), *gradients)])

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
