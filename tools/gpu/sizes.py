"""Every op at the sizes of models, in bf16: the first facts of a new GPU, then the same in full.

A first fact is one call a function, forward and backward, against its reference in fp64, and how much of its error
budget each tensor used. In full: every size, twice for the same bits, packed against alone, and one small call each
under compute-sanitizer where that is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from correctness import Outcome, on_device, run_checks

SANITIZER = "compute-sanitizer"
_FAULTS = 9  # exit status of the sanitizer for a fault in a kernel


def functions() -> list[str]:
    from tests.harness.ops.sizes import SIZES

    return list(SIZES)


def first(function: str, device: str) -> Outcome:
    """One call of ``function`` at the first of its sizes; ``notes`` are the largest shares of the budget."""
    from tests.harness import properties, tolerance
    from tests.harness.ops.sizes import PACK, SIZES

    make = next(iter(SIZES[function].values()))
    check = partial(properties.check_against_reference, on_device(make(), device), PACK, torch.bfloat16)
    outcome = run_checks(f"{function}, bf16", [("reference", check)], time.monotonic() + 600)
    shares = sorted(((share, name) for (_, name, _), share in tolerance.SHARES.items()), reverse=True)
    outcome.notes = [f"{name} {share:.0%}" for share, name in shares[:4]]
    return outcome


def full(function: str, device: str, seconds: float) -> Outcome:
    """Every size of ``function``, as far as ``seconds`` suffice."""
    return run_checks(f"{function}, bf16", _checks(function, device), time.monotonic() + seconds)


def _checks(function: str, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    from tests.harness import properties
    from tests.harness.ops.sizes import PACK, SIZES

    for size, make in SIZES[function].items():
        op = on_device(make(), device)
        yield f"{size}: twice", partial(_twice, op, PACK)
        yield f"{size}: packed as alone", partial(properties.check_packed_equals_alone, op, PACK, torch.bfloat16)
        yield f"{size}: reference", partial(properties.check_against_reference, op, PACK, torch.bfloat16)


def _twice(op: Any, pack: Any) -> None:
    """Two runs give the same bits, parameters' gradients included."""
    from tests.harness import properties

    inputs, boundaries = op.make(pack, torch.bfloat16), op.boundaries(pack)
    one, other = (properties.run_with_gradients(lambda x: op.run(x, **boundaries), inputs) for _ in range(2))
    for name, value in one.items():
        properties.assert_same_bits(f"{op.name}: {name} of two runs", value, other[name])


def small(function: str, device: str) -> Outcome:
    """One short call, forward and backward, for a tool that slows it down a hundredfold."""
    from tests.harness import properties
    from tests.harness.ops.sizes import SIZES
    from tests.harness.packings import Pack

    op, pack = on_device(next(iter(SIZES[function].values()))(), device), Pack("short", (3, 66), padding=1)

    def run() -> None:
        inputs = op.make(pack, torch.bfloat16)
        properties.run_with_gradients(lambda x: op.run(x, **op.boundaries(pack)), inputs)

    return run_checks(f"{function}, bf16", [("a short call", run)], time.monotonic() + 600)


def sanitized(function: str, build: Path, seconds: float) -> Outcome:
    """``small`` under the sanitizer's memory check, in a process of its own."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        return Outcome(left=1, notes=[f"{SANITIZER} is not installed"])
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_FAULTS), sys.executable]
    command += [str(Path(__file__).with_name("check.py")), "--job", f"small:{function}", "--build", str(build)]
    # Its own allocator would hide one tensor's end behind the next.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return Outcome(left=1, notes=[f"took more than {seconds:.0f} s"])
    if done.returncode == 0:
        return Outcome(passed=1)
    found = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    text = " ".join(" ".join(found[:12]).split()) or " ".join(done.stderr.split())[-300:]
    return Outcome(failures=[f"{function}, {SANITIZER}: ended with {done.returncode}: {text[:300]}"])
