"""Every op on CUDA tensors through the test harness: reference in fp64, packed = alone, isolation, no wait for a value.

The harness makes inputs and compares results on the CPU; only the call itself is on the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Outcome:
    """What a job found. ``left`` are checks that its time or its machine did not suffice for."""

    passed: int = 0
    left: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def use(kernel: ModuleType) -> None:
    """Let the harness and the tests' tables of ops use ``kernel``."""
    from tests.harness import kernel as harness

    harness.load_kernel = lambda: kernel


def on_device(op: Any, device: str) -> Any:
    """``op`` called with its tensors and boundaries on ``device``; gradients come back through the copies."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def run(inputs: dict[str, Tensor], **boundaries: Any) -> dict[str, Tensor]:
        there = {name: moved(value) for name, value in inputs.items()}
        cuts = {name: moved(value) for name, value in boundaries.items()}
        return {name: value.cpu() for name, value in op.run(there, **cuts).items()}

    return dataclasses.replace(op, run=run)


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Inside, a wait for the device is an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_waiting(kernel: ModuleType, op: Any, pack: Any, dtype: torch.dtype, device: str) -> None:
    """Forward and backward, by every spelling, while a wait for the device is an error.

    A state for each sequence beside labels or positions is a question for their number: there it is not asked for.
    """
    from tests.harness.states import nobody_asks_for_states

    for spelling in op.spellings:
        cuts = {key: value.to(device) for key, value in op.boundaries(pack, spelling).items()}
        counted = spelling == "cu_seqlens"
        inputs = {
            name: value.to(device).requires_grad_(value.is_floating_point())
            for name, value in op.make(pack, dtype).items()
            if counted or op.kind(name) != "states"
        }

        def outputs(inputs: dict[str, Tensor] = inputs, cuts: dict[str, Tensor] = cuts) -> list[Tensor]:
            return [value for value in op.run(inputs, **cuts).values() if value is not None]

        with nullcontext() if counted else nobody_asks_for_states(kernel):
            weights = [torch.randn_like(value) for value in outputs()]  # also compiles what is needed
            with no_waiting(device):
                results = outputs()
                if results[0].requires_grad:
                    leaves = [value for value in inputs.values() if value.requires_grad]
                    torch.autograd.grad(results, leaves, weights, allow_unused=True)


def _checks(
    kernel: ModuleType, function: str, dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Callable[[], None]]]:
    from tests.harness import properties
    from tests.harness.ops import EXACT, WITH_PROJECTIONS
    from tests.harness.packings import Pack

    # Sequences around the edges of chunks and tiles, one longer than several, empty ones and padding.
    edges = Pack("edges", (63, 1, 64, 65, 0, 127, 2), padding=3)
    one_long = Pack("one long", (2, 300, 1, 3))
    no_padding = Pack("ragged", (5, 130, 1, 40))
    # Whole layers: the reference convolves each sequence by itself, and in fp16 long sums leave the range.
    short = Pack("short", (5, 70, 1, 3))
    for number, make in enumerate({**EXACT, **WITH_PROJECTIONS}[function]):
        op = make()
        there, label = on_device(op, device), f"case {number}"
        for pack in (edges, one_long) if function in EXACT else (short,):
            yield f"{label}, {pack}: reference", partial(properties.check_against_reference, there, pack, dtype)
        if function in EXACT:
            yield f"{label}: packed as alone", partial(properties.check_packed_equals_alone, there, edges, dtype)
            yield f"{label}: isolation", partial(properties.check_isolation, there, edges, dtype, victims=(2, 5))
            yield f"{label}: spellings", partial(properties.check_spellings, there, no_padding, dtype)
        yield f"{label}: no wait", partial(without_waiting, kernel, op, no_padding, dtype, device)


def check_function(kernel: ModuleType, function: str, dtype: str, device: str, seconds: float) -> Outcome:
    """All checks of one public function in one dtype, as far as ``seconds`` suffice."""
    checks = _checks(kernel, function, DTYPES[dtype], device)
    return run_checks(f"{function}, {dtype}", checks, time.monotonic() + seconds)


def run_checks(what: str, checks: Iterable[tuple[str, Callable[[], None]]], deadline: float) -> Outcome:
    """Run them one after the other until the ``deadline``; what fails is noted under its name."""
    outcome = Outcome()
    for label, check in checks:
        if time.monotonic() > deadline:
            outcome.left += 1
            continue
        torch.manual_seed(0)
        try:
            check()
            outcome.passed += 1
        except Exception as error:  # a report of all that is wrong, not of the first
            text = " ".join(str(error).split())[:300]
            outcome.failures.append(f"{what}, {label}: {type(error).__name__}: {text}")
            if "CUDA error" in text or "illegal memory access" in text:
                break  # nothing on the device works after that
    return outcome


def functions() -> list[str]:
    from tests.harness.ops import EXACT, WITH_PROJECTIONS

    return [*EXACT, *WITH_PROJECTIONS]
