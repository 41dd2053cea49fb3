"""What a call with CUDA tensors says where this package has no CUDA kernel yet: which function serves it elsewhere."""

from typing import Dict, Set

import torch

from ._ops import add_op_namespace_prefix

# Beginning of an op's name -> what to use on a GPU.
_ON_A_GPU: Dict[str, str] = {
    "causal_conv1d": "causal_conv1d_fn of causal-conv1d, which takes seq_idx",
    "flash_attn": 'flash_attn_varlen_func of flash-attn (in transformers attn_implementation="flash_attention_2")',
    "gated_delta_rule": "chunk_gated_delta_rule of flash-linear-attention, which takes cu_seqlens",
    "kda": "chunk_kda of flash-linear-attention, which takes cu_seqlens",
    "mamba1_scan": "selective_scan_fn of mamba-ssm on padded batches: it has no boundaries",
    "mamba2_scan": "mamba_chunk_scan_combined of mamba-ssm, which takes seq_idx",
    "selective_state_update": "selective_state_update of mamba-ssm",
}


def _names_with_kernel(key: str) -> Set[str]:
    prefix = add_op_namespace_prefix("")
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name[len(prefix) :] for name in names if name.startswith(prefix)}


def _refusal(name: str):
    instead = next(
        (text for start, text in _ON_A_GPU.items() if name.startswith(start)), "a CUDA variant of packfree-kernels"
    )

    def refuse(*arguments, **keywords):
        raise NotImplementedError(
            f"{name}: tensors must be on the CPU, got cuda tensors, for which this build has no kernel; use {instead}"
        )

    return refuse


def refuse_cuda_where_unserved() -> None:
    """Give every op with a CPU kernel and no CUDA kernel one that raises NotImplementedError and names the way out."""
    for name in sorted(_names_with_kernel("CPU") - _names_with_kernel("CUDA")):
        torch.library.impl(add_op_namespace_prefix(name), "cuda", _refusal(name))
