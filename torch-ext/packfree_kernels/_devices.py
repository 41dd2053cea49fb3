"""What serves CUDA tensors where no kernel was compiled ahead: ours in Triton, imported at the first such call.

An op that has neither says which function serves it elsewhere.
"""

from importlib import import_module
from typing import Callable, Dict, Set, Tuple

import torch

from ._ops import add_op_namespace_prefix

# Op -> module of this package with the function of the op's name and schema that runs it by Triton kernels.
TRITON: Dict[str, str] = {
    "flash_attn_varlen_fwd": "flash_attn_varlen.cuda",
    "flash_attn_varlen_bwd": "flash_attn_varlen.cuda",
    "gated_delta_rule_fwd": "gated_delta_rule.triton_fwd",
    "gated_delta_rule_recurrent_fwd": "gated_delta_rule.triton_fwd",
    "gated_delta_rule_bwd": "gated_delta_rule.triton_bwd",
    "kda_fwd": "kda.triton_fwd",
    "kda_recurrent_fwd": "kda.triton_fwd",
    "kda_bwd": "kda.triton_bwd",
    "mamba2_scan_fwd": "mamba2_scan.triton_fwd",
    "mamba2_scan_bwd": "mamba2_scan.triton_bwd",
}

# Ops whose CUDA implementation this module has registered.
_given: Set[str] = set()

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
    other = next((f", or {text}" for start, text in _ON_A_GPU.items() if name.startswith(start)), "")

    def refuse(*arguments, **keywords):
        # A ROCm build of torch calls AMD's GPUs cuda too.
        ours = "a CUDA variant" if torch.version.hip is None else "CPU tensors, because there is no ROCm variant"
        raise NotImplementedError(
            f"{name}: tensors must be on the CPU, got cuda tensors, for which this build has no kernel; use {ours} of "
            f"packfree-kernels{other}"
        )

    return refuse


def _compiled_for_cuda() -> Set[str]:
    return _names_with_kernel("CUDA") - _given


def served_devices() -> Tuple[str, ...]:
    """Device types on which packed calls run. A CPU variant has no boundary conversions for a GPU."""
    return ("cpu", "cuda") if "packing_from_offsets" in _compiled_for_cuda() else ("cpu",)


def cuda_paths() -> Dict[str, str]:
    """Op -> what serves it on CUDA tensors: compiled ahead, Triton, PyTorch's own kernel or Triton, or nothing."""
    paths = dict.fromkeys(sorted(_names_with_kernel("CPU")), "not served")
    for name, module in TRITON.items():
        # A module that is not a kernel's own chooses, call by call.
        ours = module.rpartition(".")[2].startswith("triton_")
        paths[name] = "Triton" if ours else "PyTorch's kernel or Triton, by the call"
    paths.update(dict.fromkeys(_compiled_for_cuda() & paths.keys(), "CUDA C++"))
    return paths


def triton_implementation(name: str) -> Callable:
    """The function that runs op ``name`` by Triton kernels.

    Raises:
        RuntimeError: Triton cannot be imported.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{name}: its kernel for CUDA tensors is written in Triton, which cannot be imported ({error}); "
            "CUDA builds of torch bring it along: pip install triton"
        ) from error
    return getattr(import_module(f".{TRITON[name]}", __package__), name)


def _served_by_triton(name: str) -> Callable:
    def run(*arguments, **keywords):
        return triton_implementation(name)(*arguments, **keywords)

    return run


def serve_cuda() -> None:
    """Give every op that has a CPU kernel and no compiled CUDA kernel our Triton kernel, or one that raises.

    The latter raises NotImplementedError and names the way out.
    """
    for name in sorted(_names_with_kernel("CPU") - _compiled_for_cuda() - _given):
        serve = _served_by_triton(name) if name in TRITON else _refusal(name)
        torch.library.impl(add_op_namespace_prefix(name), "cuda", serve)
        _given.add(name)
