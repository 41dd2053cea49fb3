"""Measure how the time of a token grows: with the tokens of a pack, with tiny samples, and how it falls with threads.

    python benchmarks/growth.py                              every function, some minutes
    python benchmarks/growth.py --op causal_conv1d_fn        one (may be repeated)

Every function, forward and with backward, by this package alone. Nanoseconds a token, the least of the rounds: of packs
of 1k to 64k tokens with the lengths of documents, of 4,096 tokens in one sample and in 4,096 samples of one token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# The kernel alone: transformers stays as it is.
os.environ["PACKFREE_HOOKS"] = "0"

import torch
from case import DTYPES, LENGTHS, leaf, offsets
from kernels import get_local_kernel
from measure import cpu_name
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SECONDS, LEAST_ROUNDS = 1.5, 3
DOCUMENTS = LENGTHS["documents"]
PACKS: dict[str, tuple[int, ...]] = {
    "1k": (*DOCUMENTS[:3], 65),
    "4k": DOCUMENTS,
    "16k": DOCUMENTS * 4,
    "64k": DOCUMENTS * 16,
    "one": (4096,),
    "tiny": (1,) * 4096,
}
# What the figures are compared with: performance goals of the project.
GROWTH_GOAL, TINY_GOAL, THREADS_GOAL = 1.15, 1.5, 1.8

Call = Callable[..., Tensor]
Row = dict[str, Any]


def attention(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """8 query heads and 2 of keys, of 64."""
    tokens, cu, longest = sum(lengths), offsets(lengths), max(lengths)
    tensors = [leaf(torch.randn(tokens, heads, 64), dtype) for heads in (8, 2, 2)]
    return lambda q, k, v: kernel.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True), tensors


def gated_delta_rule(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """4 heads of 128."""
    tokens, cu = sum(lengths), offsets(lengths)
    q, k, v = (leaf(torch.randn(1, tokens, 4, 128), dtype) for _ in range(3))
    g, beta = leaf(-torch.rand(1, tokens, 4), torch.float32), leaf(torch.rand(1, tokens, 4), dtype)
    rule = kernel.chunk_gated_delta_rule
    return lambda *t: rule(*t, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0], [q, k, v, g, beta]


def kda(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """4 heads of 128."""
    tokens, cu = sum(lengths), offsets(lengths)
    q, k, v = (leaf(torch.randn(1, tokens, 4, 128), dtype) for _ in range(3))
    g, beta = leaf(-torch.rand(1, tokens, 4, 128), torch.float32), leaf(torch.rand(1, tokens, 4), dtype)
    return lambda *t: kernel.chunk_kda(*t, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0], [q, k, v, g, beta]


def mamba2(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """16 heads of 64, state 128."""
    tokens, cu = sum(lengths), offsets(lengths)
    x, dt = leaf(torch.randn(1, tokens, 16, 64), dtype), leaf(torch.randn(1, tokens, 16), dtype)
    B, C = (leaf(torch.randn(1, tokens, 1, 128), dtype) for _ in range(2))
    A = leaf(-torch.rand(16) - 0.1, torch.float32)
    scan = kernel.mamba_chunk_scan_combined
    return lambda x, dt, A, B, C: scan(x, dt, A, B, C, 256, dt_softplus=True, cu_seqlens=cu), [x, dt, A, B, C]


def mamba1(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """1,024 channels, 16 states."""
    tokens, cu = sum(lengths), offsets(lengths)
    u, delta = (leaf(torch.randn(1, tokens, 1024).transpose(1, 2), dtype) for _ in range(2))
    B, C = (leaf(torch.randn(1, tokens, 16).transpose(1, 2), dtype) for _ in range(2))
    A = leaf(-torch.arange(1.0, 17).repeat(1024, 1), torch.float32)
    scan = kernel.selective_scan_fn
    return lambda u, delta, A, B, C: scan(u, delta, A, B, C, delta_softplus=True, cu_seqlens=cu), [u, delta, A, B, C]


def _convolution(kernel: ModuleType, lengths: tuple[int, ...], x: Tensor) -> tuple[Call, list[Tensor]]:
    cu = offsets(lengths)
    return (
        lambda x, weight: kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=cu),
        [x, leaf(torch.randn(2048, 4), x.dtype)],
    )


def convolution(kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """2,048 channels of width 4, tokens side by side in memory."""
    return _convolution(kernel, lengths, leaf(torch.randn(1, 2048, sum(lengths)), dtype))


def convolution_channel_last(
    kernel: ModuleType, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Call, list[Tensor]]:
    """The same with channels side by side, as transformers' models give them."""
    return _convolution(kernel, lengths, leaf(torch.randn(1, sum(lengths), 2048).transpose(1, 2), dtype))


OPS = {
    "flash_attn_varlen_func": attention,
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": kda,
    "mamba_chunk_scan_combined": mamba2,
    "selective_scan_fn": mamba1,
    "causal_conv1d_fn": convolution,
    "causal_conv1d_fn, channel-last": convolution_channel_last,
}


def least_seconds(run: Callable[[], object]) -> float:
    run()
    started, seconds = time.perf_counter(), []
    while len(seconds) < LEAST_ROUNDS or time.perf_counter() - started < SECONDS:
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def nanoseconds(kernel: ModuleType, op: str, lengths: tuple[int, ...], dtype: str, both: bool) -> float:
    """Nanoseconds a token of one call."""
    torch.manual_seed(0)
    call, tensors = OPS[op](kernel, lengths, DTYPES[dtype])
    if both:
        gradient = torch.randn_like(call(*tensors).detach())

        def run() -> object:
            return torch.autograd.grad(call(*tensors), tensors, gradient)
    else:

        def run() -> object:
            with torch.no_grad():
                return call(*tensors)

    return 1e9 * least_seconds(run) / sum(lengths)


def measure(kernel: ModuleType, op: str, dtype: str, both: bool, bar: tqdm) -> Row:
    row: Row = {"op": op, "dtype": dtype, "direction": "forward+backward" if both else "forward"}
    for name, lengths in PACKS.items():
        row[f"ns_{name}"] = round(nanoseconds(kernel, op, lengths, dtype, both), 1)
        bar.update()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row["ns_4k_one_thread"] = round(nanoseconds(kernel, op, PACKS["4k"], dtype, both), 1)
    torch.set_num_threads(threads)
    bar.update()
    sizes = [row[f"ns_{name}"] for name in ("1k", "4k", "16k", "64k")]
    return {
        **row,
        "growth": round(max(sizes[1:]) / min(sizes[:-1]), 3),
        "tiny": round(row["ns_tiny"] / row["ns_one"], 3),
        "threads": round(row["ns_4k_one_thread"] / row["ns_4k"], 3),
    }


def heading() -> str:
    return f"{'ns a token':<44}{'1k':>7}{'4k':>7}{'16k':>7}{'64k':>7}  growth  tiny  threads"


def line(row: Row) -> str:
    """One row in at most 100 columns; a figure beyond its goal is marked."""
    label = f"{row['op']:<31}{row['dtype']:<5}{'fwd' if row['direction'] == 'forward' else 'fwd+bwd'}"
    sizes = "".join(f"{row[f'ns_{name}']:>7.0f}" for name in ("1k", "4k", "16k", "64k"))
    met = (row["growth"] <= GROWTH_GOAL, row["tiny"] <= TINY_GOAL, row["threads"] >= THREADS_GOAL)
    marks = ["" if good else "!" for good in met]
    figures = f"{row['growth']:.2f}{marks[0]:<1} {row['tiny']:>5.2f}{marks[1]:<1} {row['threads']:>6.2f}{marks[2]}"
    return f"{label:<44}{sizes}    {figures}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=OPS, help="only this one (repeatable)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this one (repeatable)")
    parser.add_argument("--out", type=Path, help="folder for growth.json")
    given = parser.parse_args()
    partial = given.op or given.dtype
    out = given.out or (None if partial else ROOT / "benchmarks" / "results")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        kernel = get_local_kernel(ROOT / "build")
    except FileNotFoundError:
        print("growth: no CPU variant in build/: run `make build` first", file=sys.stderr)
        return 1
    threads = torch.get_num_threads()
    machine = f"{cpu_name()}, {threads} threads, tier {kernel.cpu_tier()}, torch {torch.__version__}"
    print(machine)
    print(f"growth: the longest time against the shortest before it, goal {GROWTH_GOAL}")
    print(f"tiny: 4,096 samples of one token against one of 4,096, goal {TINY_GOAL}")
    print(f"threads: one thread's time against that of {threads}; goal of two {THREADS_GOAL}; !: goal not met")
    print(heading())
    cases = [(op, dtype, both) for op in given.op or OPS for dtype in given.dtype or DTYPES for both in (False, True)]
    rows = []
    bar = tqdm(total=len(cases) * (len(PACKS) + 1), unit="pack", ncols=79, leave=False, disable=None)
    for op, dtype, both in cases:
        rows.append({**measure(kernel, op, dtype, both, bar), "machine": machine})
        bar.write(line(rows[-1]), file=sys.stdout)
    bar.close()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "growth.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        print(f"written: {out / 'growth.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
