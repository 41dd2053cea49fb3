"""The public functions on tensors: three samples in one packed call, and each in a call of its own, are the same bits.

    .venv/bin/python examples/plain_functions.py

The table shows the largest difference of the outputs and of the gradients of q or x, and whether their bits are equal.
"""

import argparse
import sys

from shared import KERNEL, check_kernel

# isort: split
import torch
from kernels import get_kernel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kernel", default=KERNEL, help="name of a kernel on the Hub (default: %(default)s, from build/)")
kernel = parser.parse_args().kernel
check_kernel(parser, kernel)
packfree = get_kernel(kernel, version=1, trust_remote_code=True)
torch.manual_seed(0)

OFFSETS = [0, 37, 40, 101]  # samples of 37, 3 and 61 tokens
T, H, K, D, N = OFFSETS[-1], 2, 16, 32, 8
q, k, v = (torch.randn(1, T, H, K) for _ in range(3))
gate, gates, beta = -torch.rand(1, T, H), -torch.rand(1, T, H, K), torch.rand(1, T, H)
x, step = torch.randn(1, T, D), torch.rand(1, T, D)
b, c = torch.randn(1, T, N), torch.randn(1, T, N)
weight, decay = torch.randn(D, 4), -torch.rand(D, N)


def attention(q, k, v, ends=None):
    ends = ends or [0, q.shape[1]]
    return packfree.flash_attn_varlen_func(q[0], k[0], v[0], ends, causal=True)[None]


def gated_delta_rule(q, k, v, gate, beta, ends=None):
    return packfree.chunk_gated_delta_rule(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]


def kda(q, k, v, gates, beta, ends=None):
    return packfree.chunk_kda(q, k, v, gates, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]


def mamba1(x, step, b, c, ends=None):
    u, delta, b, c = (tensor.mT for tensor in (x, step, b, c))  # tokens last
    return packfree.selective_scan_fn(u, delta, decay, b, c, cu_seqlens=ends).mT


def mamba2(v, beta, b, c, ends=None):
    b, c = b[:, :, None], c[:, :, None]  # one group
    return packfree.mamba_chunk_scan_combined(v, beta, decay[:H, 0], b, c, chunk_size=16, cu_seqlens=ends)


def convolution(x, ends=None):
    return packfree.causal_conv1d_fn(x.mT, weight, activation="silu", cu_seqlens=ends).mT


def with_gradient(function, first, *others, **ends):
    first = first.detach().requires_grad_()
    out = function(first, *others, **ends)
    return out.detach(), torch.autograd.grad(out.square().sum(), first)[0]


print(f"{'samples of 37, 3 and 61 tokens':<32}{'output':>10}{'gradient':>10}   bits")
calls = ((attention, q, k, v), (gated_delta_rule, q, k, v, gate, beta), (kda, q, k, v, gates, beta))
calls += ((mamba1, x, step, b, c), (mamba2, v, beta, b, c), (convolution, x))
unequal = []
for function, *tensors in calls:
    packed = with_gradient(function, *tensors, ends=OFFSETS)
    parts = [[t[:, first:last] for t in tensors] for first, last in zip(OFFSETS, OFFSETS[1:])]
    alone = [torch.cat(halves, dim=1) for halves in zip(*(with_gradient(function, *part) for part in parts))]
    differences = [float((one - other).abs().max()) for one, other in zip(packed, alone)]
    equal = all(torch.equal(one, other) for one, other in zip(packed, alone))
    print(f"{function.__name__:<32}{differences[0]:>10.1e}{differences[1]:>10.1e}   {'equal' if equal else 'UNEQUAL'}")
    unequal += [] if equal else [function.__name__]
if unequal:
    sys.exit(f"packed and alone have other bits: {', '.join(unequal)}")
