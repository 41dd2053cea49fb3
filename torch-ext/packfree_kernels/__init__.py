"""Padding-free (packed) training for every layer kind: the functions, their layers, and the hooks into transformers."""

# _intact comes first: it looks at the shared object before anything loads it.
from . import _intact, _packing_ops, layers  # noqa: F401
from ._devices import serve_cuda as _serve_cuda
from ._ops import ops
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .context_parallel import ContextParallel, sequence_parallel, shard_batch
from .flash_attn_varlen import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .hooks import hooks_status, install_hooks, remove_hooks
from .hooks import install_on_import as _install_hooks_on_import
from .kda import chunk_kda, fused_recurrent_kda
from .leak_report import leak_report
from .mamba1_scan import mamba_inner_fn, selective_scan_fn
from .mamba2_scan import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_state_update

__all__ = [
    "ContextParallel",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "cpu_tier",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "hooks_status",
    "install_hooks",
    "layers",
    "leak_report",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "remove_hooks",
    "selective_scan_fn",
    "selective_state_update",
    "sequence_parallel",
    "shard_batch",
]


def cpu_tier() -> str:
    """Name of the instruction-set tier that serves CPU calls: scalar, avx2, avx512, avx512_bf16 or amx; on aarch64
    scalar, neon or neon_bf16.

    Raises:
        RuntimeError: ``PACKFREE_CPU_TIER`` is set to something else, or to a tier that this CPU lacks.
    """
    tier = ops.cpu_tier()
    if tier.startswith("error:"):
        raise RuntimeError(tier[len("error:") :].strip())
    return tier


_serve_cuda()
_install_hooks_on_import()
