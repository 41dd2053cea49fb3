"""When a measurement counts: not while something else slows this machine down.

On a rented machine another tenant may share a core with us. The matrix unit then does half of its work and the rest of
the core more than that, so a ratio would say more about the neighbour than about either function. Two products of
matrices, one in fp32 and one in bf16, tell: a measurement, of whatever function, around which one of these took clearly
longer than at best is made again, as long as patience lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

# Seen on two virtual cores of a Xeon: 0.75 to 1 while undisturbed, 0.3 to 0.5 while not.
QUIET_SHARE = 0.7
PAUSE_SECONDS = 0.1
# A look at the machine is three tries of each product, before and after whatever is measured.
LARGEST_SIZE, SMALLEST_SIZE = 768, 128
SECONDS_PER_PRODUCT = 0.03

Result = TypeVar("Result")


def product(dtype: torch.dtype, largest: int, seconds: float) -> tuple[Callable[[], object], int]:
    """A product of two square matrices that takes at most about ``seconds``, and its number of rows.

    ``largest`` rows where the CPU is fast enough, else a half, a quarter, ...: without products of bfloat16 it takes
    forty times as long for one in bfloat16 as for one in fp32.
    """
    size = largest
    while size > SMALLEST_SIZE:
        size //= 2
    while True:
        operand = torch.randn(size, size).to(dtype)
        run = partial(torch.matmul, operand, operand)
        run()  # The first one sets up.
        started = time.perf_counter()
        run()
        if 2 * size > largest or 8 * (time.perf_counter() - started) > seconds:
            return run, size
        size *= 2


def _products() -> list[Callable[[], object]]:
    return [product(dtype, LARGEST_SIZE, SECONDS_PER_PRODUCT)[0] for dtype in (torch.float32, torch.bfloat16)]


class Machine:
    """Tells whether this machine is undisturbed, by the seconds that each of ``works`` takes beside its best time.

    Args:
        works: short pieces of work that a disturbance slows down.
        clock, sleep: those of ``time``.
    """

    def __init__(
        self,
        works: list[Callable[[], object]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._works = _products() if works is None else works
        self._clock, self._sleep = clock, sleep
        self._best = [float("inf")] * len(self._works)

    def share(self) -> float:
        """The least share of its best speed that a piece of work has now, the better of three tries each."""
        shares = []
        for index, work in enumerate(self._works):
            seconds = []
            for _ in range(3):
                started = self._clock()
                work()
                seconds.append(self._clock() - started)
            self._best[index] = min(self._best[index], *seconds)
            shares.append(self._best[index] / min(seconds))
        return min(shares)

    def get_acquainted(self, seconds: float) -> None:
        """Look for the best speeds for some seconds."""
        started = self._clock()
        while self._clock() - started < seconds:
            self.share()
            self._sleep(PAUSE_SECONDS)

    def is_quiet(self) -> bool:
        """Whether every piece of work has nearly its best speed."""
        return self.share() >= QUIET_SHARE

    def undisturbed(self, run: Callable[[], Result], deadline: float) -> tuple[Result, bool]:
        """What ``run`` returned when the machine was quiet before and after it, and True.

        From ``deadline`` on, a time of the clock, it is run once whatever the machine does: then False, if it was not.
        """
        while True:
            in_time = self._clock() < deadline
            before = self.is_quiet()
            if not before and in_time:
                self._sleep(PAUSE_SECONDS)
                continue
            result = run()
            if before and self.is_quiet():
                return result, True
            if not in_time:
                return result, False
