"""Every public function, called rightly but for one argument, which is of another kind: an error by name, at once.

The kinds to try follow from each parameter's annotation, so a new parameter is tried without a word here. An error is
by name if it begins with the function's name, names the argument, and is no dump of a schema.
"""

import inspect
import re
import typing

import numpy
import pytest
import torch

from tests.harness.kernel import load_kernel

B, T, H, K, V, D, N, W = 1, 8, 2, 8, 8, 8, 8, 4


def floats(*shape):
    return torch.rand(*shape)


def _delta():
    return dict(q=floats(B, T, H, K), k=floats(B, T, H, K), v=floats(B, T, H, V), beta=floats(B, T, H))


def _scan():
    return dict(u=floats(B, D, T), delta=floats(B, D, T), A=-floats(D, N), B=floats(B, N, T), C=floats(B, N, T))


# A right call of each function; what is optional is left out.
CALLS = {
    "causal_conv1d_fn": lambda: dict(x=floats(B, D, T), weight=floats(D, W)),
    "causal_conv1d_update": lambda: dict(x=floats(B, D), conv_state=floats(B, D, W - 1), weight=floats(D, W)),
    "chunk_gated_delta_rule": lambda: dict(_delta(), g=-floats(B, T, H)),
    "chunk_kda": lambda: dict(_delta(), g=-floats(B, T, H, K)),
    "flash_attn_func": lambda: dict(q=floats(B, T, H, K), k=floats(B, T, H, K), v=floats(B, T, H, V)),
    "flash_attn_varlen_func": lambda: dict(
        q=floats(T, H, K), k=floats(T, H, K), v=floats(T, H, V), cu_seqlens_q=torch.tensor([0, 3, T], dtype=torch.int32)
    ),
    "flash_attn_with_kvcache": lambda: dict(
        q=floats(B, 1, H, K), k_cache=floats(B, T, H, K), v_cache=floats(B, T, H, V)
    ),
    "fused_recurrent_gated_delta_rule": lambda: dict(_delta(), g=-floats(B, T, H)),
    "fused_recurrent_kda": lambda: dict(_delta(), g=-floats(B, T, H, K)),
    "mamba_chunk_scan_combined": lambda: dict(
        x=floats(B, T, H, K), dt=floats(B, T, H), A=-floats(H), B=floats(B, T, 1, N), C=floats(B, T, 1, N),
        chunk_size=16,
    ),
    "mamba_inner_fn": lambda: dict(
        xz=floats(B, 2 * D, T), conv1d_weight=floats(D, 1, W), conv1d_bias=None, x_proj_weight=floats(1 + 2 * N, D),
        delta_proj_weight=floats(D, 1), out_proj_weight=floats(D, D), out_proj_bias=None, A=-floats(D, N),
    ),
    "mamba_split_conv1d_scan_combined": lambda: dict(
        zxbcdt=floats(B, T, 2 * H * K + 2 * N + H), conv1d_weight=floats(H * K + 2 * N, W), conv1d_bias=None,
        dt_bias=floats(H), A=-floats(H), D=floats(H), chunk_size=16, headdim=K,
    ),
    "selective_scan_fn": _scan,
    "selective_state_update": lambda: dict(
        state=floats(B, D, N), x=floats(B, D), dt=floats(B, D), A=-floats(D, N), B=floats(B, N), C=floats(B, N)
    ),
}  # fmt: skip

# What each kind of parameter is not. A tensor of the wrong dtype or rank is no other kind; the ops' own tests have it.
NO_TENSOR = {"text": "text", "number": 3.5, "list of texts": ["a"], "array": numpy.zeros(3), "object": object()}
NO_INTEGER = {"text": "16", "fraction": 1.5, "list": [16], "object": object()}
NO_NUMBER = {"text": "0.5", "complex": 1j, "list": [0.5], "nan": float("nan"), "object": object()}
# None, 0 and 1 are flags, too.
NO_BOOL = {"text": "no", "number": 2, "fraction": 0.5, "list": [], "object": object()}
NO_TEXT = {"number": 3, "other text": "softmax", "list": ["silu"], "object": object()}
NO_BOUNDARIES = {
    "text": "text",
    "number": 3,
    "list of texts": ["a"],
    "list of fractions": [0.5, 8.0],
    "object": object(),
}
NO_PAIR = {"texts": ("a", "b"), "one": (1,), "text": "ab", "number": 3, "object": object()}
NO_DTYPE = {"text": "float32", "number": 3, "type": float}


def kinds_of(annotation, name):
    """What to try, and whether None is right."""
    optional, parts = annotation is bool, [annotation]
    if typing.get_origin(annotation) is typing.Union:
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(annotation))
    if name.startswith("cu_seqlens") and len(parts) > 1:
        return NO_BOUNDARIES, optional
    if torch.Tensor in parts and len(parts) == 1:
        return NO_TENSOR, optional
    if typing.get_origin(parts[0]) is tuple:
        return NO_PAIR, optional
    for kind, wrong in ((str, NO_TEXT), (float, NO_NUMBER), (bool, NO_BOOL), (torch.dtype, NO_DTYPE)):
        if kind in parts:
            return wrong, optional
    if int in parts:
        return NO_INTEGER, optional
    return {"text": "text", "object": object()}, optional


@pytest.mark.kernels_ci
@pytest.mark.parametrize("function", CALLS)
def test_the_right_calls_run(kernel, function):
    getattr(kernel, function)(**CALLS[function]())


def said(function, arguments):
    """What a call says, or that it goes on."""
    try:
        getattr(load_kernel(), function)(**arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}, which is no kind of refusal: {error}"
    return "nothing: it is taken"


@pytest.mark.parametrize("function", CALLS)
def test_an_argument_of_another_kind_is_an_error_by_name(kernel, function):
    hints, found, tried = typing.get_type_hints(getattr(kernel, function)), {}, 0
    for name in inspect.signature(getattr(kernel, function)).parameters:
        wrong, optional = kinds_of(hints[name], name)
        for kind, value in {**wrong, **({} if optional else {"None": None})}.items():
            text, tried = said(function, {**CALLS[function](), name: value}), tried + 1
            if not (re.match(rf"{function}: .*\b{name}\b", text) and len(text) < 400):
                found[name, kind] = text
    assert not found and tried > 30


def test_every_public_function_is_called(kernel):
    functions = {name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))}
    others = {"cpu_tier", "hooks_status", "install_hooks", "leak_report", "remove_hooks"}
    over_ranks = {"sequence_parallel", "shard_batch"}  # tests/context_parallel
    assert functions == {*CALLS, *others, *over_ranks}
