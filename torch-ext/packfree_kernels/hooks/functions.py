"""What replaces each of transformers' sequence-mixing functions: THE TABLE is at the end of this file.

A replacement closes over the stock function. A call with boundaries goes to the function of the same name in this
package; where this package has none, that is an error: the stock function would mix the samples. A call without
boundaries (decoding, unpacked batches) is of one sequence a row: ``plain.py`` says whether it goes to ours or to the
stock function, to which it goes on devices that our kernels do not serve.
"""

import importlib
import inspect
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple

import torch
from torch import Tensor

from .. import _sharing, packing
from .._checks import type_error, value_error
from .._devices import served_devices
from ..causal_conv1d.api import ACTIVATIONS, WIDTHS
from . import context, internals, plain, recompute

# Device types on which our functions run. Calls elsewhere keep the stock path with their keywords untouched.
SUPPORTED_DEVICES = served_devices()


def supported(device: torch.device) -> bool:
    return device.type in SUPPORTED_DEVICES


def running(needed: bool = True) -> Optional[context.Boundaries]:
    """The boundaries of the forward that is running, or being recomputed outside of one; None if it is not packed.

    Raises:
        RuntimeError: they are ``needed``, and it cannot be told to which forward a recompute belongs.
    """
    if context.inside_forward():
        return context.current()
    if not torch.compiler.is_compiling():
        return recompute.boundaries_of_recompute(needed)
    # A trace holds for other forwards too. Without fullgraph the error sends the layer back to eager mode, which knows.
    if needed and recompute.recomputing():
        raise recompute.unknown()
    return None


def find_boundaries(
    name: str, batch: int, length: int, device: torch.device, keywords: Dict[str, Any]
) -> Optional[Dict[str, Tensor]]:
    """The boundary keywords for our function ``name``, or None if the call is not packed.

    Keywords of the call come first, then the context of the running forward.

    Raises:
        ValueError: the running forward is packed, but not for a tensor of this shape.
        RuntimeError: a recompute of which it is not known whether it is packed.
    """
    if not supported(device):
        return None
    told = any(keywords.get(spelling) is not None for spelling in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"))
    here = running(needed=not told)
    if not told:
        if here is None:
            return None
        if here.shard is not None:
            return {"cp_context": here.shard}  # refuses other tokens than the shard's
        if not here.fit(batch, length):
            raise ValueError(
                f"{name}: {here.model} runs a packed batch of shape {(here.batch, here.length)}, but calls {name} for "
                f"{(batch, length)} tokens without boundaries; pass cu_seq_lens_q or seq_idx down to it"
            )
        return {"cu_seqlens": here.cu_seqlens} if batch == 1 else {"seq_idx": here.seq_idx}
    if here is not None and here.shard is not None:
        must = "be left out on a shard of a row, whose boundaries other ranks have"
        raise value_error(name, "cu_seqlens, cu_seq_lens_q or seq_idx", must, f"one from {here.model}")
    return explicit_boundaries(name, batch, length, keywords, checked=here is not None)


def explicit_boundaries(
    name: str, batch: int, length: int, keywords: Dict[str, Any], checked: bool = False
) -> Dict[str, Tensor]:
    """What our function ``name`` takes of the boundaries ``cu_seqlens``, ``cu_seq_lens_q`` and ``seq_idx``.

    Several rows are cut by ``seq_idx``, because ``cu_seqlens`` means one row in the public functions. ``checked`` says
    that the outermost forward has compared the spellings; otherwise that is done here, or by the function itself.

    Raises:
        TypeError, ValueError: offsets that are malformed or cut elsewhere than their other spelling.
    """
    cu_seqlens = _offsets(name, batch * length, keywords, checked)
    seq_idx = keywords.get("seq_idx")
    if batch == 1 and cu_seqlens is not None:
        spellings = {"cu_seqlens": cu_seqlens}
        return spellings if checked or seq_idx is None else {**spellings, "seq_idx": seq_idx}
    if seq_idx is None and cu_seqlens is not None:
        if not checked:
            device = _device_of(cu_seqlens)
            cu_seqlens = packing.check_cu_seqlens(name, cu_seqlens, batch * length, device, "cu_seq_lens_q")
            packing.check_rows_are_cut(name, cu_seqlens, batch, length, "cu_seq_lens_q")
        seq_idx = _labels_of_rows(cu_seqlens, batch, length)
    return {} if seq_idx is None else {"seq_idx": seq_idx}


def _labels_of_rows(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    def make() -> Tensor:
        return packing.seq_idx_from_cu_seqlens(cu_seqlens, batch * length).view(batch, length)

    return _sharing.of_own(cu_seqlens, ("labels of rows", batch, length), make)


def _offsets(name: str, tokens: int, keywords: Dict[str, Any], checked: bool) -> Optional[Tensor]:
    """``cu_seqlens``, or ``cu_seq_lens_q``, which says the same; transformers gives some functions both."""
    cu_seqlens, other = keywords.get("cu_seqlens"), keywords.get("cu_seq_lens_q")
    if cu_seqlens is None or other is None or checked:
        return other if cu_seqlens is None else cu_seqlens
    pair = [
        packing.check_cu_seqlens(name, value, tokens, _device_of(value), key)
        for key, value in (("cu_seqlens", cu_seqlens), ("cu_seq_lens_q", other))
    ]
    if all(map(packing.reads_values, pair)) and not packing.same_boundaries(*pair):
        first, second = map(packing.brief_offsets, pair)
        raise value_error(name, "cu_seq_lens_q", f"cut the row where cu_seqlens does, at {first}", second)
    return cu_seqlens


def _device_of(boundaries: Any) -> torch.device:
    return boundaries.device if isinstance(boundaries, Tensor) else torch.device("cpu")


# Told by what find_boundaries gives, or, like the sizes of chunks, without a meaning for the result.
_NOT_HANDED_ON = ("cu_seqlens", "seq_idx", "position_ids", "cu_seqlens_cpu", "chunk_indices")


def _keywords_of(ours: Callable, *but: str) -> FrozenSet[str]:
    """Every argument that our function takes, which are upstream's, but boundaries and those named."""
    return frozenset(inspect.signature(ours).parameters) - {*_NOT_HANDED_ON, *but}


def _pick(keywords: Dict[str, Any], names: FrozenSet[str]) -> Dict[str, Any]:
    """The keywords our function knows. The rest is what models hand to every layer, for example num_items_in_batch."""
    return {name: value for name, value in keywords.items() if name in names and value is not None}


def _keywords_only(name: str, after: str, args: Tuple[Any, ...]) -> None:
    """Raises TypeError: beyond ``after`` upstream's and transformers' orders differ, so a position means nothing."""
    if args:
        raise type_error(name, f"arguments after {after}", "be keywords in a packed call", f"{len(args)} positional")


def _model() -> str:
    """The class of the model that is running, for messages."""
    here = running()
    return "this model" if here is None else here.model


def _causal_conv1d(name: str, stock: Callable, ours: Callable) -> Callable:
    known = _keywords_of(ours, "activation")
    without_pack = plain.or_stock(name, stock, ours, supported)

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, *args: Any, **keywords: Any) -> Any:
        cuts = find_boundaries(name, x.shape[0], x.shape[-1], x.device, keywords)
        if cuts is None:
            return without_pack(x, weight, bias, *args, **keywords)
        _keywords_only(name, "bias", args)
        if weight.shape[-1] not in WIDTHS:
            raise ValueError(
                f"{name}: {_model()} convolves {weight.shape[-1]} tokens, and packfree-kernels "
                f"{WIDTHS[0]} to {WIDTHS[-1]}, so packed samples would mix. "
                "Train it on padded batches (DataCollatorWithPadding)"
            )
        given = _pick(keywords, known)
        activation = keywords.get("activation")
        if activation in ACTIVATIONS:
            return ours(x, weight, bias, activation=activation, **given, **cuts)
        # Models configure any activation of transformers here; it acts on each token by itself.
        activate = internals.activation(activation)
        out = ours(x, weight, bias, **given, **cuts)
        return (activate(out[0]), *out[1:]) if isinstance(out, tuple) else activate(out)

    return causal_conv1d_fn


def _delta_rule(name: str, stock: Callable, ours: Callable) -> Callable:
    """The gated delta rule and KDA."""
    known = _keywords_of(ours, "chunk_size")
    without_pack = plain.or_stock(name, stock, ours, supported)

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
        cuts = find_boundaries(name, q.shape[0], q.shape[1], q.device, keywords)
        if cuts is None:
            return without_pack(q, k, v, *args, **keywords)
        _keywords_only(name, "beta", args[2:])
        decay_and_beta = dict(zip(("g", "beta"), args))
        return ours(q, k, v, **decay_and_beta, **_pick(keywords, known), **cuts)

    return delta_rule


def _mamba2_scan(name: str, stock: Callable, ours: Callable) -> Callable:
    known = _keywords_of(ours)
    without_pack = plain.or_stock(name, stock, ours, supported)

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **keywords: Any
    ) -> Any:
        cuts = find_boundaries(name, x.shape[0], x.shape[1], x.device, keywords)
        if cuts is None:
            return without_pack(x, dt, A, B, C, *args, **keywords)
        _keywords_only(name, "chunk_size", args[1:])
        chunk_size = dict(zip(("chunk_size",), args))
        return ours(x, dt, A, B, C, **chunk_size, **_pick(keywords, known), **cuts)

    return mamba_chunk_scan_combined


def _mamba1_scan(name: str, stock: Callable, ours: Callable) -> Callable:
    # transformers' use_mambapy and use_associative_scan choose between its own forms of the scan; ours is neither.
    known = _keywords_of(ours)
    without_pack = plain.or_stock(name, stock, ours, supported)

    def selective_scan_fn(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **keywords: Any
    ) -> Any:
        cuts = find_boundaries(name, u.shape[0], u.shape[2], u.device, keywords)
        if cuts is None:
            return without_pack(u, delta, A, B, C, *args, **keywords)
        _keywords_only(name, "C", args)
        return ours(u, delta, A, B, C, **_pick(keywords, known), **cuts)

    return selective_scan_fn


def _step_by_step(time_dim: int) -> Callable[..., Callable]:
    """A whole mixer in one call, which returns None on a pack, as transformers' own stand-in always does.

    The model then runs its convolution, scan and norm one after another, the first two being ours. Ours of these names
    compute what mamba-ssm computes, and some models do not: FalconMamba normalises the low-rank step before its
    projection and mamba-ssm after it; Mamba2, Bamba and GraniteMoeHybrid normalise all channels together and mamba-ssm
    those of each group. A pack must not change which of the two a model is.
    """

    def build(name: str, stock: Callable, ours: Callable) -> Callable:
        def fused(x: Tensor, *args: Any, **keywords: Any) -> Any:
            if find_boundaries(name, x.shape[0], x.shape[time_dim], x.device, keywords) is None:
                return stock(x, *args, **keywords)
            return None

        return fused

    return build


def _not_served(name: str, stock: Callable) -> Callable:
    def refuse_if_packed(*args: Any, **keywords: Any) -> Any:
        here = running()
        explicit = any(keywords.get(key) is not None for key in ("seq_idx", "cu_seqlens", "cu_seq_lens_q"))
        if (here is not None or explicit) and supported(args[0].device):
            raise NotImplementedError(
                f"{name}: {_model()} needs the sample boundaries inside {name}, which this release of packfree-kernels "
                "does not provide, so packed samples would mix. Train it on padded batches (DataCollatorWithPadding)"
            )
        return stock(*args, **keywords)

    return refuse_if_packed


# THE TABLE: the name under which transformers registers a function -> what builds its replacement.
REPLACEMENTS: Dict[str, Callable[..., Callable]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "mamba_chunk_scan_combined": _mamba2_scan,
    "mamba_split_conv1d_scan_combined": _step_by_step(time_dim=1),
    "selective_scan_fn": _mamba1_scan,
    "mamba_inner_fn": _step_by_step(time_dim=2),
}


def _ours(name: str) -> Optional[Callable]:
    # Asked for when needed and not at import: the package is complete only when its own __init__ has run.
    return getattr(importlib.import_module("..", __package__), name, None)


def is_served(name: str) -> bool:
    """Whether this package has the function; where it has not, packed calls are refused."""
    return _ours(name) is not None


def is_replaced(name: Optional[str]) -> bool:
    """Whether the function that transformers registers as ``name`` is replaced."""
    return name in REPLACEMENTS or (name in plain.DECODING and is_served(name))


def replacement(name: str, stock: Callable) -> Callable:
    """What a modeling file gets in place of ``stock``, the function that transformers registers as ``name``."""
    ours = _ours(name)
    if name in plain.DECODING:
        hooked = plain.or_stock(name, stock, ours, supported)
    else:
        hooked = _not_served(name, stock) if ours is None else REPLACEMENTS[name](name, stock, ours)
    hooked.packfree_stock = stock
    return hooked
