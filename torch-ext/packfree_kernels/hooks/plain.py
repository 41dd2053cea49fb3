"""Calls that hold no pack: which of them our functions serve, where those are faster than transformers' torch code.

Each row is a sequence there, so ours compute what the stock function does: arguments and results in its order, layout
and dtypes, a state taken and given as it takes and gives it. Decoding functions are served too. Whatever ours may not
do, or is not faster at, goes to the stock function with its arguments untouched.

``PACKFREE_PLAIN`` or ``install_hooks(plain=...)`` says on which devices; "0" or False is nowhere. By default it is
where it has been measured (``benchmarks/plain_calls.py``, figures in docs/speed.md), on a CPU.
"""

import os
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._checks import type_error, value_error
from .._dtypes import FLOAT_DTYPES
from ..causal_conv1d.api import ACTIVATIONS, WIDTHS
from . import internals

VARIABLE = "PACKFREE_PLAIN"
MEASURED = ("cpu",)
_KNOWN = ("cpu", "cuda")
# Subclasses have a meaning of their own: fake and distributed tensors, quantized ones, those of users.
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_MAX_HEAD_DIM = 256


class _Setting:
    """Device types whose plain calls are ours: an attribute, for what was compiled is guarded by it."""

    def __init__(self) -> None:
        self.devices: Tuple[str, ...] = MEASURED


_setting = _Setting()


def choose(plain: Union[bool, str, None]) -> None:
    """Set what ``install_hooks`` was told; None is what the environment says.

    Raises:
        TypeError, ValueError: it is no flag and no list of device types.
    """
    named = "plain" if plain is not None else VARIABLE
    if plain is None:
        said = os.environ.get(VARIABLE, "")
        plain = said if said not in ("", "0", "1") else said != "0"
    if not isinstance(plain, (bool, str)):
        raise type_error("install_hooks", named, "be True, False, None or device types as 'cpu,cuda'", repr(plain))
    if isinstance(plain, bool):
        _setting.devices = MEASURED if plain else ()
        return
    devices = tuple(part.strip() for part in plain.split(","))
    if not set(devices) <= set(_KNOWN):
        raise value_error("install_hooks", named, "be 0, 1 or device types, cpu or cuda or both", repr(plain))
    _setting.devices = devices


def devices() -> Tuple[str, ...]:
    return _setting.devices


def or_stock(
    name: str, stock: Callable, ours: Optional[Callable], supported: Callable[[torch.device], bool]
) -> Callable:
    """A function in the place of ``stock`` for calls that hold no pack.

    Args:
        name: under which transformers registers ``stock``.
        ours: this package's function of that name, or None where a build has none: then all is stock's.
        supported: whether this build serves a device.
    """
    serve, updated = SERVED.get(name), UPDATED.get(name)
    if serve is None or ours is None:
        return stock

    def runs_torch_code() -> bool:
        return internals.runs_torch_code(stock)

    # Traced, it would be a look at closures; what torch.compiler.assume_constant_result sets.
    runs_torch_code._dynamo_marked_constant = True

    def plain(*args: Any, **keywords: Any) -> Any:
        if not args or args[0].device.type not in _setting.devices or not supported(args[0].device):
            return stock(*args, **keywords)
        if not _is_ordinary(args[0]) or not runs_torch_code():
            return stock(*args, **keywords)
        if torch.compiler.is_compiling() or _need_gradients(*args, *keywords.values()):
            result = serve(ours, *args, **keywords)
        else:
            # Without a graph to build, a third of a short call's time would be spent on building none.
            with torch._C._AutoDispatchBelowAutograd():
                result = serve(ours, *args, **keywords)
            if updated is not None and result is not None and not args[updated].is_inference():
                torch.autograd.graph.increment_version(args[updated])
        return stock(*args, **keywords) if result is None else result

    return plain


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether nothing but eager arithmetic, or torch.compile, is at work: no export, no transform of torch.func."""
    if torch.compiler.is_compiling():
        # An exported program has to load where this package is not.
        return not torch.compiler.is_exporting()
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return False
    return type(tensor) in _TENSOR_TYPES


def _fit(first: Tensor, *tensors: Optional[Tensor]) -> bool:
    """Whether all are floating tensors of the kind and on the device of ``first``, and there is something to do."""
    if first.dtype not in FLOAT_DTYPES or first.numel() == 0:
        return False
    compiling = torch.compiler.is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.device != first.device or tensor.dtype not in FLOAT_DTYPES:
            return False
        if not compiling and type(tensor) not in _TENSOR_TYPES:
            return False
    return True


def _need_gradients(*values: Any) -> bool:
    """Whether a call of these is part of a graph of gradients."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


# ---- what is served: the parameters of transformers' torch code, and None where the call is its own ----


def _causal_conv1d_fn(
    ours: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    **_: Any,
) -> Any:
    if not _fit(x, weight, bias) or x.dim() != 3 or weight.dim() != 2 or weight.shape[1] not in WIDTHS:
        return None
    if activation in ACTIVATIONS:
        return ours(x, weight, bias, activation=activation)
    return internals.activation(activation)(ours(x, weight, bias))


def _causal_conv1d_update(
    ours: Callable,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    **_: Any,
) -> Any:
    if not _fit(x, conv_state, weight, bias) or x.dim() != 3 or weight.dim() != 2 or weight.shape[1] not in WIDTHS:
        return None
    # The stock function rounds the state to the dtype of the weight.
    if conv_state.dtype != x.dtype or weight.dtype != x.dtype or _need_gradients(x, conv_state, weight, bias):
        return None
    if conv_state.shape[:2] != x.shape[:2] or conv_state.shape[2] < weight.shape[1] - 1:
        return None
    if activation in ACTIVATIONS:
        return ours(x, conv_state, weight, bias, activation)
    return internals.activation(activation)(ours(x, conv_state, weight, bias))


def _chunk_delta_rule(
    ours: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    if not _fit(q, k, v, g, beta, initial_state) or max(q.shape[-1], v.shape[-1]) > _MAX_HEAD_DIM:
        return None
    return ours(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def _recurrent_delta_rule(
    ours: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    if _need_gradients(q, k, v, g, beta, initial_state):
        return None
    norm = use_qk_l2norm_in_kernel
    return _chunk_delta_rule(ours, q, k, v, g, beta, 64, initial_state, output_final_state, norm)


def _mamba_chunk_scan_combined(
    ours: Callable,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    if not _fit(x, dt, A, B, C, D, dt_bias, initial_states) or x.dim() != 4 or A.dim() != 1:
        return None
    # The stock function computes in float32 and gives that back, so that nothing is rounded before the model's norm.
    return ours(
        x.float(),
        dt,
        A,
        B.float(),
        C.float(),
        chunk_size,
        D,
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )


def _selective_scan_fn(
    ours: Callable,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    delta_bias: Optional[Tensor] = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    if not _fit(u, delta, A, B, C, D, z, delta_bias) or B.dim() != 3 or C.dim() != 3:
        return None
    # The skip and the gate decide the dtype of the stock function's result; it is computed in that.
    wide = u.dtype
    for tensor in (D, z):
        wide = wide if tensor is None else torch.promote_types(wide, tensor.dtype)
    return ours(
        u.to(wide),
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        delta_softplus=delta_softplus,
        return_last_state=return_last_state,
    )


def _selective_state_update(
    ours: Callable,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    dt_softplus: bool = False,
    z: Optional[Tensor] = None,
    **_: Any,
) -> Any:
    if not _fit(state, x, dt, A, B, C, D, dt_bias, z) or state.dtype not in (x.dtype, torch.float32):
        return None
    if z is not None and z.dtype != x.dtype or dt.shape != x.shape:
        return None
    if _need_gradients(state, x, dt, A, B, C, D, dt_bias, z):
        return None
    return ours(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)


# THE TABLE: the name under which transformers registers a function -> how a call of it without a pack is served.
SERVED: Dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "chunk_gated_delta_rule": _chunk_delta_rule,
    "chunk_kda": _chunk_delta_rule,
    "mamba_chunk_scan_combined": _mamba_chunk_scan_combined,
    "selective_scan_fn": _selective_scan_fn,
    "causal_conv1d_update": _causal_conv1d_update,
    "fused_recurrent_gated_delta_rule": _recurrent_delta_rule,
    "fused_recurrent_kda": _recurrent_delta_rule,
    "selective_state_update": _selective_state_update,
}
# Which argument, counted from 0, a function updates in place.
UPDATED = {"causal_conv1d_update": 1, "selective_state_update": 0}
# Those of them that continue a sequence from a cache and are never called on a pack.
DECODING = ("causal_conv1d_update", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "selective_state_update")
