"""How fast the ops are on this GPU, against its own limits and against the packages that can do the same.

Every case is a pack of 4,096 or 65,536 tokens, cut into 1, 4, 15 or 60 documents. What the GPU takes and what the host
takes to ask for it are told apart: the GPU sleeps until the host has asked for everything. A case whose result is far
from its peer's is reported and not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from speed_cases import CASES, Case, Documents
from torch import Tensor

TOKENS = (4096, 65536)
DOCUMENTS = (4, 15, 60, 1)
ROUNDS = 9
# Largest share of the largest value by which ours and a peer may differ in bf16, both being rounded.
AGREEMENT = 5e-2


def jobs(device: str) -> list[str]:
    """A job for each op and number of tokens, the short rows first; on a CPU few tokens, which try this program."""
    return [f"{make.__name__}-{tokens}" for tokens in (TOKENS if device == "cuda" else (64,)) for make in CASES]


def limits(device: str) -> dict[str, float]:
    """What this GPU can do, measured: bf16 flops of a matrix product, bytes of a copy (read and written), a second."""
    size, numbers = (8192, 1 << 30) if device == "cuda" else (64, 1 << 12)
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.empty(numbers, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    product, _ = _milliseconds(lambda: left @ right, device)
    copy, _ = _milliseconds(lambda: target.copy_(source), device)
    return {"bf16": 2 * size**3 / (1e-3 * product), "copy": 2 * source.nbytes / (1e-3 * copy)}


def _milliseconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Medians over rounds of what the GPU and what the host takes; between rounds the cache is filled with zeros."""
    for _ in range(3):
        run()
    if device != "cuda":
        begin = time.perf_counter()
        run()
        return (1e3 * (time.perf_counter() - begin),) * 2
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    host, times = [], []
    for _ in range(ROUNDS):
        flush.zero_()
        # About as many cycles as the host takes, and half as many more.
        torch.cuda._sleep(int(3e9 * (max(host) if host else 5e-3)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        run()
        host.append(time.perf_counter() - begin)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), 1e3 * statistics.median(host)


def _runner(function: Callable[..., Tensor], case: Case, both: bool) -> Callable[[], object]:
    if not both:

        def forward() -> object:
            with torch.no_grad():
                return function(*case.tensors)

        return forward
    with torch.no_grad():
        gradient = torch.randn_like(function(*case.tensors))
    return lambda: torch.autograd.grad(function(*case.tensors), case.tensors, gradient)


def _error(row: dict[str, Any], error: Exception) -> dict[str, Any]:
    return {**row, "error": " ".join(f"{type(error).__name__}: {error}".split())[:120]}


def _ways(case: Case, row: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Tensor] | dict[str, Any]]]:
    """What can be timed, by name, and rows of what cannot.

    Raises:
        AssertionError: ours and a peer disagree.
    """
    ours = None
    for name, way in {"ours": case.ours, **case.ways, **case.peers}.items():
        try:
            with torch.no_grad():
                result = way(*case.tensors).float()
        except Exception as error:
            if name not in case.peers:
                raise
            yield name, _error({**row, "by": name}, error)  # a peer that cannot run here is no fault of ours
            continue
        ours = result if ours is None else ours
        off = float((ours - result).abs().max() / result.abs().max())
        assert off <= AGREEMENT, f"{case.op} and {name} differ by {off:.1e} of the largest value"
        yield name, way


def measure(kernel: ModuleType, job: str, peaks: dict[str, float], device: str, seconds: float) -> dict[str, Any]:
    """Rows of one job, one a number of documents, direction and way, as far as ``seconds`` suffice; and failures."""
    deadline = time.monotonic() + seconds
    name, _, tokens = job.rpartition("-")
    make = next(make for make in CASES if make.__name__ == name)
    found: dict[str, Any] = {"rows": [], "failures": [], "left": 0}
    for count in DOCUMENTS:
        if time.monotonic() > deadline:
            found["left"] += 1
            continue
        try:
            torch.manual_seed(0)
            documents = Documents(int(tokens), count, device)
            found["rows"] += _rows(make(kernel, documents), peaks, documents)
        except Exception as error:  # the other numbers of documents are facts all the same
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found["failures"].append(f"speed of {job}, {count} documents: {text}")
            if "CUDA error" in text:
                break
    return found


def _rows(case: Case, peaks: dict[str, float], documents: Documents) -> list[dict[str, Any]]:
    row = {"op": case.op, "shape": case.shape, "tokens": documents.tokens, "documents": documents.count}
    rows: list[dict[str, Any]] = []
    for name, way in _ways(case, row):
        if isinstance(way, dict):
            rows.append(way)
            continue
        for direction, work in (("forward", case.forward_work), ("both", case.both_work)):
            own = {**row, "direction": direction, "by": name}
            try:
                gpu, host = _milliseconds(_runner(way, case, direction == "both"), documents.device)
            except Exception as error:
                if name not in case.peers:
                    raise
                rows.append(_error(own, error))
                continue
            share = work / (1e-3 * gpu) / peaks[case.limit]
            rows.append({**own, "ms": round(gpu, 4), "host_ms": round(host, 4), "limit": case.limit,
                         "share": round(share, 4)})  # fmt: skip
    return rows
