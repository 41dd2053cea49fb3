"""Every op as the harness calls it: a file for each, and here one table of them all."""

from functools import partial
from typing import Callable, Dict, List

from tests.harness.ops import (
    causal_conv1d,
    flash_attn_varlen,
    gated_delta_rule,
    kda,
    mamba1_inner,
    mamba1_scan,
    mamba2_fused,
    mamba2_scan,
)
from tests.harness.properties import OpUnderTest

Cases = List[Callable[[], OpUnderTest]]


def _cases(module, **options) -> Cases:
    return [partial(module.op_under_test, case, **options) for case in module.CASES]


# Functions that call nothing but our kernels and elementwise operations: packed and alone are the same bits.
EXACT: Dict[str, Cases] = {
    "causal_conv1d_fn": _cases(causal_conv1d),
    "flash_attn_varlen_func": _cases(flash_attn_varlen),
    "chunk_gated_delta_rule": _cases(gated_delta_rule),
    "fused_recurrent_gated_delta_rule": _cases(gated_delta_rule, function="fused_recurrent_gated_delta_rule"),
    "chunk_kda": _cases(kda),
    "fused_recurrent_kda": _cases(kda, function="fused_recurrent_kda"),
    "selective_scan_fn": _cases(mamba1_scan),
    "mamba_chunk_scan_combined": _cases(mamba2_scan),
    "mamba_split_conv1d_scan_combined without a projection": [
        layer.without_projection().op for layer in mamba2_fused.LAYERS if layer.norm is None
    ],
}

# Whole layers with matrix products and norms of torch, which may round by the number of rows and threads.
WITH_PROJECTIONS: Dict[str, Cases] = {
    "mamba_split_conv1d_scan_combined": [layer.op for layer in mamba2_fused.LAYERS],
    "mamba_inner_fn": _cases(mamba1_inner),
}

# Those of them without a norm: the same bits as soon as their products are summed in one order.
WITHOUT_NORMS: Dict[str, Cases] = {
    "mamba_split_conv1d_scan_combined": [layer.op for layer in mamba2_fused.LAYERS if layer.norm is None],
    "mamba_inner_fn": [partial(mamba1_inner.op_under_test, False)],
}
