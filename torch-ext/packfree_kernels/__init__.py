"""Padding-free (packed) training for every layer kind: the functions, their layers, and the hooks into transformers."""

from ._ops import ops
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "cpu_tier",
    "fused_recurrent_gated_delta_rule",
]


def cpu_tier() -> str:
    """Name of the instruction-set tier that serves CPU calls: scalar, avx2, avx512 or avx512_bf16.

    Raises:
        RuntimeError: ``PACKFREE_CPU_TIER`` is set to something else, or to a tier that this CPU lacks.
    """
    tier = ops.cpu_tier()
    if tier.startswith("error:"):
        raise RuntimeError(tier[len("error:") :].strip())
    return tier
