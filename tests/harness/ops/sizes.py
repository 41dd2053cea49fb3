"""Ops at the sizes that models have, in few heads: what decides a GPU's tiles, for an interpreter and for a GPU.

Samples cross the edges of every plan's chunks (16, 32 and 64 tokens), and one of several chunks lies beside short ones.
"""

from functools import partial
from typing import Callable, Dict

from tests.harness.ops import causal_conv1d, flash_attn_varlen, gated_delta_rule, kda, mamba1_scan, mamba2_scan
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest

PACK = Pack("several chunks beside short ones", (1, 150, 3, 65), padding=2)

Makes = Dict[str, Callable[[], OpUnderTest]]


def _attention() -> Makes:
    cases = [
        flash_attn_varlen.Case(f"D={dim}", heads=(2, 1), dims=(dim, dim), window=window)
        for dim, window in ((64, (100, 0)), (128, (-1, -1)), (256, (-1, -1)))
    ]
    return {str(case): partial(flash_attn_varlen.op_under_test, case) for case in cases}


def _delta_rule(module, **gate) -> Makes:
    cases = [
        module.Case(f"K={dim}", value_heads=heads, key_dim=dim, value_dim=dim, **gate)
        for dim, heads in ((128, 2), (64, 1), (256, 1))
    ]
    return {str(case): partial(module.op_under_test, case) for case in cases}


def _mamba2() -> Makes:
    cases = [
        mamba2_scan.Case("P=64 S=128", heads=2, groups=1, head_dim=64, state_dim=128),
        mamba2_scan.Case("P=128 S=256", heads=1, groups=1, head_dim=128, state_dim=256, skip="channel"),
    ]
    return {str(case): partial(mamba2_scan.op_under_test, case) for case in cases}


# What one of each function shows most is first.
BY_TRITON: Dict[str, Makes] = {
    "mamba_chunk_scan_combined": _mamba2(),
    "chunk_gated_delta_rule": _delta_rule(gated_delta_rule),
    "chunk_kda": _delta_rule(kda, gate="softplus"),
    "flash_attn_varlen_func": _attention(),
}

SIZES: Dict[str, Makes] = {
    **BY_TRITON,
    "causal_conv1d_fn": {
        "256 channels": partial(causal_conv1d.op_under_test, causal_conv1d.Case("256 channels", channels=256))
    },
    "selective_scan_fn": {
        "256 x 16": partial(mamba1_scan.op_under_test, mamba1_scan.Case("256 x 16", channels=256, states=16))
    },
}
