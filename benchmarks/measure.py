"""How it is measured: the check that comes first, interleaved timing, and the limits of this machine."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from case import TOLERANCE, Case
from quiet import Machine, product
from torch import Tensor

MIN_ROUNDS = 7
MAX_ROUNDS = 41
SECONDS_PER_MEASUREMENT = 1.0
# A peer so slow gets fewer rounds: a stock function in bfloat16 on a CPU without products of it takes half a minute.
SLOW_SECONDS, SLOW_ROUNDS = 2.0, 3
# Each function's turn: as many calls as fit, with at least so many turns; the machine is looked at between turns.
SECONDS_PER_TURN = 0.1
TURNS = 4
# For all functions of one row together, to wait for a machine that is undisturbed.
PATIENCE_SECONDS = 25.0
# For the limits of the machine.
LARGEST_PRODUCT, SECONDS_PER_PRODUCT = 2048, 1.0
PEAK_SOURCE = Path(__file__).with_name("peak.cpp")


class WrongResult(Exception):
    """An op whose result differs from the truth is not timed."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one way of computing: median, and the range that the rounds spanned."""

    median: float
    least: float
    most: float


def _results(function: Callable[..., object], tensors: list[Tensor], gradients: list[Tensor] | None) -> list[Tensor]:
    """What ``function`` returns, then, if ``gradients`` is given, the gradients of all tensors that require one.

    ``gradients`` holds the incoming gradient; if it is empty one is drawn into it, for the next call to reuse.
    """
    with torch.set_grad_enabled(gradients is not None):
        result = function(*tensors)
    results = list(result) if isinstance(result, tuple) else [result]
    if gradients is None:
        return results
    if not gradients:
        gradients.append(torch.randn_like(results[0]))
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return results + list(torch.autograd.grad(results[0], leaves, gradients[0].to(results[0].dtype)))


def check(case: Case) -> float:
    """The largest error of our outputs and gradients, each as a share of the largest true value.

    Raises:
        WrongResult: it passes the tolerance of the dtype, or is not a number.
    """
    gradients: list[Tensor] | None = [] if case.both_work else None
    # Ours first: the incoming gradient is then drawn in the working dtype, so both see the same rounded one. Copies,
    # because a decoding step changes its state in place.
    copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in case.tensors]
    ours = _results(case.ours, copies, gradients)
    wide = [tensor.detach().clone().to(case.exact).requires_grad_(tensor.requires_grad) for tensor in case.tensors]
    truth = _results(case.alone, wide, gradients)
    worst = 0.0
    for mine, true in zip(ours, truth):
        mine, true = mine.detach().double(), true.detach().double()
        error = float((mine - true).abs().max() / true.abs().max())
        if not error <= TOLERANCE[case.dtype]:
            raise WrongResult(
                f"{case.op} {case.dtype} {case.shape} {case.distribution}: error {error:.1e} of the largest value"
                f" passes {TOLERANCE[case.dtype]:.0e}; not timed"
            )
        worst = max(worst, error)
    return worst


def _runner(function: Callable[..., object], case: Case, direction: str) -> Callable[[], None]:
    tensors = case.tensors
    if direction == "forward":

        def forward() -> None:
            with torch.no_grad():
                function(*tensors)

        return forward
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with torch.no_grad():
        gradient = torch.randn_like(function(*tensors))

    def both() -> None:
        torch.autograd.grad(function(*tensors), leaves, gradient)

    return both


def _seconds(run: Callable[[], None], calls: int) -> list[float]:
    """Seconds of each of ``calls`` calls in a row; of several, one more goes first, to find what it needs in caches."""
    if calls > 1:
        run()
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def time_case(case: Case, direction: str, machine: Machine) -> tuple[dict[str, Timing], bool]:
    """Time ours and its peers in turns, so that a slow spell of the machine falls on all of them.

    Returns:
        The timings, and whether the machine was undisturbed in all of them.
    """
    functions = {"ours": case.ours, "alone": case.alone, "stock_pack": case.stock_pack}
    runners = {name: _runner(function, case, direction) for name, function in functions.items() if function is not None}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    once_each = {name: _seconds(run, 1)[0] for name, run in runners.items()}
    once = sum(once_each.values())
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(SECONDS_PER_MEASUREMENT / once)))
    rounds_each = {name: rounds if each < SLOW_SECONDS else SLOW_ROUNDS for name, each in once_each.items()}
    turn = max(1, min(rounds // TURNS, int(SECONDS_PER_TURN / once)))
    deadline = time.perf_counter() + PATIENCE_SECONDS
    quiet = True
    gc.collect()
    gc.disable()
    try:
        for done in range(0, rounds, turn):
            for name, run in runners.items():
                if done >= rounds_each[name]:
                    continue
                taken, undisturbed = machine.undisturbed(lambda run=run: _seconds(run, turn), deadline)
                seconds[name] += taken
                quiet = quiet and undisturbed
    finally:
        gc.enable()
    timings = {
        name: Timing(*(1e3 * value for value in (statistics.median(times), min(times), max(times))))
        for name, times in seconds.items()
    }
    return timings, quiet


def machine_limits() -> dict[str, float]:
    """What this machine can do at best, with torch's number of threads.

    ``fp32`` and ``bf16``: flops a second, the better of a loop of multiply-adds in registers (fp32; needs g++) and
    torch's matmul of 2,048 squared, or smaller where that takes too long. ``copy``: bytes read and written a second by
    copying 256 MB.
    """
    limits = {"fp32": _multiply_add_peak(torch.get_num_threads()), "bf16": 0.0, "copy": 0.0}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run, size = product(dtype, LARGEST_PRODUCT, SECONDS_PER_PRODUCT)
        # What takes bfloat16 and multiplies in fp32 can always be had.
        limits[name] = max(limits["fp32"], 2 * size**3 / best_seconds(run))
    source = torch.randn(32 << 20)
    target = torch.empty_like(source)
    limits["copy"] = 2 * source.nbytes / best_seconds(lambda: target.copy_(source))
    return limits


def best_seconds(run: Callable[[], object], rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def _multiply_add_peak(threads: int) -> float:
    """Flops a second of peak.cpp, or 0 where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "peak")
        compile_it = [compiler, "-O3", "-march=native", "-pthread", str(PEAK_SOURCE), "-o", program]
        if subprocess.run(compile_it, capture_output=True).returncode != 0:
            return 0.0
        return max(float(subprocess.check_output([program, str(threads)])) for _ in range(3))


def cpu_name() -> str:
    """Model name of the CPU, as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
