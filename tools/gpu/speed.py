"""How fast the ops are on this GPU, against its own limits and against the packages that can do the same.

Every case is a pack of 16,384 tokens with the lengths of documents, in bf16, at the size of a layer of a model of some
billions of parameters. A case whose result is far from its peer's is reported and not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.case import LENGTHS as DISTRIBUTIONS
from benchmarks.case import Work

LENGTHS = DISTRIBUTIONS["documents"] * 4
TOKENS = sum(LENGTHS)
ROUNDS = 25
# Largest share of the largest value by which ours and a peer may differ in bf16, both being rounded.
AGREEMENT = 5e-2


@dataclass(frozen=True)
class Case(Work):
    """In bf16; ``ours`` and each of ``peers`` give a tensor."""

    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def _cu_seqlens() -> Tensor:
    return torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32)


def _seq_idx() -> Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))[None].cuda()


def attention(kernel: ModuleType) -> Case:
    heads, kv_heads, dim, cu, longest = 32, 8, 128, _cu_seqlens(), max(LENGTHS)
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
    flops = sum(2 * length * (length + 1) * dim * heads for length in LENGTHS)
    return Case(
        "flash_attn_varlen_func",
        f"{heads}/{kv_heads} heads x {dim}",
        (_leaf(TOKENS, heads, dim), _leaf(TOKENS, kv_heads, dim), _leaf(TOKENS, kv_heads, dim)),
        lambda q, k, v: kernel.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True),
        "bf16",
        flops,
        3.5 * flops,
        peers,
    )


def attention_triton(kernel: ModuleType) -> Case:
    """The same by this package's own kernel, which ``deterministic=True`` asks for."""
    case, cu, longest = attention(kernel), _cu_seqlens(), max(LENGTHS)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True, deterministic=True)

    return replace(case, op=f"{case.op} deterministic", ours=ours)


def _delta_tensors(heads: int, dim: int, decays: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, k, v = (_leaf(1, TOKENS, heads, dim) for _ in range(3))
    g = (-torch.rand(1, TOKENS, heads, *decays, device="cuda")).requires_grad_()
    return q, k, v, g, torch.rand(1, TOKENS, heads, device="cuda").to(torch.bfloat16).requires_grad_()


def _delta_rule(kernel: ModuleType, name: str, peer: str, decays: tuple[int, ...]) -> Case:
    heads, dim, cu = 16, 128, _cu_seqlens()
    options = dict(cu_seqlens=cu, use_qk_l2norm_in_kernel=True)
    peers = {}
    try:
        module = __import__(f"fla.ops.{peer}", fromlist=[name])
        peers["FLA"] = lambda q, k, v, g, beta: getattr(module, name)(q, k, v, g=g, beta=beta, **options)[0]
    except (ImportError, AttributeError):
        pass
    # A token and head: the lower halves of kk, qk, the solve and the chunk's product; three products with the state.
    flops = TOKENS * heads * (5 * 64 * dim + 6 * dim * dim)
    return Case(
        name,
        f"{heads} heads x {dim}",
        _delta_tensors(heads, dim, decays),
        lambda q, k, v, g, beta: getattr(kernel, name)(q, k, v, g, beta, **options)[0],
        "bf16",
        flops,
        3 * flops,
        peers,
    )


def gated_delta_rule(kernel: ModuleType) -> Case:
    return _delta_rule(kernel, "chunk_gated_delta_rule", "gated_delta_rule", ())


def kda(kernel: ModuleType) -> Case:
    return _delta_rule(kernel, "chunk_kda", "kda", (128,))


def mamba2(kernel: ModuleType) -> Case:
    heads, dim, state, labels, cu = 64, 64, 128, _seq_idx(), _cu_seqlens()
    peers = {}
    options = dict(dt_softplus=True)
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        peers["mamba-ssm"] = lambda x, dt, B, C, A: mamba_chunk_scan_combined(
            x, dt, A, B, C, 256, seq_idx=labels, **options
        )
    except ImportError:
        pass
    flops = TOKENS * heads * (4 * dim * state + 64 * dim) + TOKENS * 64 * state
    A = (-torch.rand(heads, device="cuda") - 0.1).requires_grad_()
    return Case(
        "mamba_chunk_scan_combined",
        f"{heads} heads x {dim}, state {state}",
        (_leaf(1, TOKENS, heads, dim), _leaf(1, TOKENS, heads), *(_leaf(1, TOKENS, 1, state) for _ in range(2)), A),
        lambda x, dt, B, C, A: kernel.mamba_chunk_scan_combined(x, dt, A, B, C, 256, cu_seqlens=cu, **options),
        "bf16",
        flops,
        3 * flops,
        peers,
    )


def convolution(kernel: ModuleType) -> Case:
    channels, width, cu, labels = 8192, 4, _cu_seqlens(), _seq_idx()
    x = torch.randn(1, TOKENS, channels, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
    peers = {}
    try:
        from causal_conv1d import causal_conv1d_fn

        peers["causal-conv1d"] = lambda x, weight: causal_conv1d_fn(x, weight, activation="silu", seq_idx=labels)
    except ImportError:
        pass
    size = 2 * channels * TOKENS
    return Case(
        "causal_conv1d_fn",
        f"{channels} x {width}",
        (x, _leaf(channels, width)),
        lambda x, weight: kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=cu),
        "copy",
        2 * size,
        5 * size,
        peers,
    )


def mamba1(kernel: ModuleType) -> Case:
    """No peer has boundaries: mamba-ssm's scan of the whole row does less and gives another result."""
    channels, states, cu = 4096, 16, _cu_seqlens()
    u, z = (torch.randn(1, TOKENS, channels, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
    delta = (torch.randn(1, TOKENS, channels, device="cuda") / 2 - 3).bfloat16().transpose(1, 2)
    B, C = (torch.randn(1, TOKENS, states, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
    A = -torch.arange(1.0, states + 1, device="cuda").repeat(channels, 1)
    tensors = tuple(tensor.requires_grad_() for tensor in (u, delta, z, B, C, A))
    size = 2 * channels * TOKENS
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


CASES = (attention, attention_triton, gated_delta_rule, kda, mamba2, convolution, mamba1)


def limits() -> dict[str, float]:
    """What this GPU can do, measured: bf16 flops of a matrix product, bytes of a copy (read and written), a second."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    product, copy = _milliseconds(lambda: left @ right), _milliseconds(lambda: target.copy_(source))
    return {"bf16": 2 * 8192**3 / (1e-3 * product), "copy": 2 * source.nbytes / (1e-3 * copy)}


def _milliseconds(run: Callable[[], object]) -> float:
    """Median over rounds; between them the cache is filled with something else, which is not timed."""
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _runner(function: Callable[..., Tensor], case: Case, both: bool) -> Callable[[], object]:
    if not both:

        def forward() -> object:
            with torch.no_grad():
                return function(*case.tensors)

        return forward
    with torch.no_grad():
        gradient = torch.randn_like(function(*case.tensors))
    return lambda: torch.autograd.grad(function(*case.tensors), case.tensors, gradient)


def measure(kernel: ModuleType, make: Callable[[ModuleType], Case], peaks: dict[str, float]) -> list[dict[str, object]]:
    """One row a direction and way of computing.

    Raises:
        AssertionError: ours and a peer disagree.
    """
    torch.manual_seed(0)
    case = make(kernel)
    with torch.no_grad():
        ours = case.ours(*case.tensors).float()
    rows: list[dict[str, object]] = []
    ways = {"ours": case.ours}
    for name, peer in case.peers.items():
        try:
            with torch.no_grad():
                theirs = peer(*case.tensors).float()
        except Exception as error:  # a peer that cannot run here is no fault of ours
            rows.append({"op": case.op, "by": name, "error": f"{type(error).__name__}: {error}"[:120]})
            continue
        off = float((ours - theirs).abs().max() / theirs.abs().max())
        assert off <= AGREEMENT, f"{case.op} and {name} differ by {off:.1e} of the largest value"
        ways[name] = peer
    for direction, work in (("forward", case.forward_work), ("forward+backward", case.both_work)):
        for name, function in ways.items():
            try:
                time = _milliseconds(_runner(function, case, direction != "forward"))
            except Exception as error:
                rows.append({"op": case.op, "by": name, "error": f"{type(error).__name__}: {error}"[:120]})
                continue
            share = work / (1e-3 * time) / peaks[case.limit]
            rows.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "tokens": TOKENS,
                    "direction": direction,
                    "by": name,
                    "ms": round(time, 4),
                    "limit": case.limit,
                    "share": round(share, 4),
                }
            )
    return rows
