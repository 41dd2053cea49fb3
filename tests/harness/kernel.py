"""The kernel under test, and the tiers this machine can run it in."""

import functools
import platform
from types import ModuleType
from typing import List

ARM = platform.machine() in ("aarch64", "arm64")
TIERS = ["scalar", "neon", "neon_bf16"] if ARM else ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


@functools.lru_cache(maxsize=None)
def load_kernel() -> ModuleType:
    from kernels import get_kernel

    return get_kernel("org/packfree-kernels", version=1)


@functools.lru_cache(maxsize=None)
def available_tiers() -> List[str]:
    """From the slowest to the best one of this CPU, or to the one that PACKFREE_CPU_TIER names."""
    return TIERS[: TIERS.index(load_kernel().cpu_tier()) + 1]
