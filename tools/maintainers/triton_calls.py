"""Calls that stand for what models ask of the Triton kernels, on fake CUDA tensors: shapes and dtypes without values.

A model's sizes decide how its kernels are compiled; numbers of tokens and of sequences do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS, SEQUENCES = 8192, 16
ALL = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Call:
    """A forward call, and the backward call that follows it if the op has one.

    Attributes:
        op: name of the forward op.
        sizes: what the call is known by.
        dtype: of the tokens.
        arguments: makes the forward op's arguments, by the names of its schema.
    """

    op: str
    sizes: str
    dtype: torch.dtype
    arguments: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.op.removesuffix('_fwd')} {self.sizes} {str(self.dtype).removeprefix('torch.')}"


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _offsets() -> Tensor:
    return _new(SEQUENCES + 1, dtype=torch.int32)


def _attention(
    heads: int, key_heads: int, dim: int, dtype: torch.dtype, value_dim: int = 0, sinks: bool = False,
    window: int = -1, softcap: float = 0.0, ranges: bool = False,
) -> Call:  # fmt: skip
    value_dim = value_dim or dim

    def arguments() -> dict[str, Any]:
        return dict(
            q=_new(TOKENS, heads, dim, dtype=dtype), k=_new(TOKENS, key_heads, dim, dtype=dtype),
            v=_new(TOKENS, key_heads, value_dim, dtype=dtype), cu_seqlens_q=_offsets(), cu_seqlens_k=_offsets(),
            s_aux=_new(heads) if sinks else None, seed=_new(1, dtype=torch.int64), dropout_p=0.0, softmax_scale=0.1,
            window_left=window, window_right=-1 if ranges else 0, softcap=softcap,
            visible_keys=_new(TOKENS, 2, dtype=torch.int32) if ranges else None,
        )  # fmt: skip

    sizes = f"D={dim}" + f" V={value_dim}" * (value_dim != dim)
    sizes += " sinks" * sinks + " window" * (window >= 0) + " softcap" * (softcap > 0) + " ranges" * ranges
    return Call("flash_attn_varlen_fwd", sizes, dtype, arguments)


def _delta_rule(op: str, heads: int, value_heads: int, dim: int, dtype: torch.dtype, value_dim: int = 0) -> Call:
    value_dim = value_dim or dim

    def arguments() -> dict[str, Any]:
        key = _new(TOKENS, heads, dim, dtype=dtype)
        gate: dict[str, Any] = dict(g=_new(TOKENS, value_heads))
        if op.startswith("kda"):
            gate = dict(g=_new(TOKENS, value_heads, dim), a_log=_new(value_heads), dt_bias=_new(value_heads * dim))
            gate.update(lower_bound=None)
        return dict(
            gate, q=key, k=key, v=_new(TOKENS, value_heads, value_dim, dtype=dtype), beta=_new(TOKENS, value_heads),
            cu_seqlens=_offsets(), initial_state=_new(SEQUENCES, value_heads, dim, value_dim), scale=0.1, l2norm=True,
            want_state=True,
        )  # fmt: skip

    return Call(op, f"K={dim} V={value_dim}", dtype, arguments)


def _mamba2(heads: int, groups: int, dim: int, state: int, dtype: torch.dtype, everything: bool = False) -> Call:
    def arguments() -> dict[str, Any]:
        group = _new(TOKENS, groups, state, dtype=dtype)
        x = _new(TOKENS, heads, dim, dtype=dtype)
        return dict(
            x=x, dt=_new(TOKENS, heads), A=_new(heads), B=group, C=group, D=_new(heads, dim),
            z=x if everything else None, dt_bias=_new(heads), cu_seqlens=_offsets(),
            initial_state=_new(SEQUENCES, heads, dim, state) if everything else None, dt_softplus=True, dt_min=0.0,
            dt_max=float("inf"), want_state=everything,
        )  # fmt: skip

    return Call("mamba2_scan_fwd", f"P={dim} S={state}" + " z, states" * everything, dtype, arguments)


def all_calls() -> list[Call]:
    """Every op that Triton serves, at the sizes of models that use it, and at the largest that it takes."""
    calls = [_attention(32, 8, 128, dtype) for dtype in ALL]
    calls += [_attention(64, 8, 64, torch.bfloat16, sinks=True, window=128)]
    calls += [_attention(16, 16, 192, torch.bfloat16, value_dim=128)]
    calls += [_attention(8, 4, 256, dtype, window=4096, softcap=50.0) for dtype in ALL]
    calls += [_attention(8, 4, 256, dtype, ranges=True) for dtype in ALL]
    for op in ("gated_delta_rule_fwd", "kda_fwd"):
        calls += [_delta_rule(op, 16, 32, 128, dtype) for dtype in ALL]
        calls += [_delta_rule(op, 16, 16, 64, torch.float16)]
        calls += [_delta_rule(op, 16, 16, 256, dtype) for dtype in ALL]
    calls += [_delta_rule(f"{op}_recurrent_fwd", 16, 32, 128, torch.bfloat16) for op in ("gated_delta_rule", "kda")]
    calls += [_mamba2(80, 1, 64, 128, dtype) for dtype in ALL]
    calls += [_mamba2(32, 2, 128, 256, torch.bfloat16, everything=True)]
    return calls


def launches_of(kernel: ModuleType, target: Any, call: Call) -> list[Any]:
    """What ``call`` and its backward start on ``target``, as ``recorded`` of ``_triton/launch.py`` gives it."""
    launch = importlib.import_module(f"{kernel.__name__}._triton.launch")
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    with FakeTensorMode(), launch.recorded(target) as launches:
        given = call.arguments()
        schema = getattr(kernel._ops.ops, call.op).default._schema
        outputs = devices.triton_implementation(call.op)(*(given[argument.name] for argument in schema.arguments))
        backward = call.op.removesuffix("_fwd") + "_bwd"
        if backward in devices.TRITON:
            given.update((returned.name, output) for returned, output in zip(schema.returns, outputs))
            # An absent output is empty and has no gradient.
            gradients = {f"d{name}": value if value.numel() else None for name, value in given.items()
                         if isinstance(value, Tensor)}  # fmt: skip
            names = [argument.name for argument in getattr(kernel._ops.ops, backward).default._schema.arguments]
            devices.triton_implementation(backward)(*({**gradients, **given}[name] for name in names))
    return launches
