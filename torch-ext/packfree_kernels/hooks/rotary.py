"""Rotary tables that depend on a length are chosen by the length of each token's own sample.

Two kinds of rotary embedding read the largest position of the whole call: LongRoPE takes its long factors where that
passes the original length, dynamic NTK raises its base with it. In a pack it is the longest sample's, and decides for
every sample; dynamic NTK also keeps what it chose for the calls that follow.

The stock forward multiplies positions ``[..., B, T, 1]`` by frequencies ``[K / 2]``. Under a pack the same forward runs
on a view of its module whose frequencies are ``[B, T, K / 2]``, each token's those of its sample alone. Nothing is
written to the module and no value is read. A call that is no pack goes to the stock forward.
"""

import functools
from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor

from . import functions, internals, recompute
from .context import Boundaries
from .undo import UndoList
from .view import View


def make_per_sample(undo: UndoList) -> None:
    """Replace the forward of every rotary class whose tables may depend on a length, in the modules loaded by now."""
    for cls in internals.rotary_classes():
        stock = vars(cls)["forward"]
        undo.replace(cls, "forward", _per_sample(stock, internals.undecorated_rotary_forward(stock)))


# The frequencies are those of the module's config, whatever the call, so a graph holds them.
_long_frequencies = recompute.constant_in_a_trace(internals.long_frequencies)


def _per_sample(stock: Callable, undecorated: Callable) -> Callable:
    @functools.wraps(stock)
    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: Optional[str] = None) -> Any:
        rope = internals.rope_of(self, layer_type)
        here = functions.running() if rope is not None and functions.supported(x.device) else None
        if here is None or not _is_cut(self, here, rope, position_ids):
            return stock(self, x, position_ids, layer_type)
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        with torch.no_grad():
            lengths = _lengths(here, position_ids)
            if rope.kind == "mscale":
                values = _scale_per_token(self, rope, lengths)
            else:
                values = _frequencies_per_token(self, rope, layer_type, lengths, x.device)
            return undecorated(View(self, values), x, position_ids, **of_layer)

    forward.packfree_per_sample = True
    return forward


def _is_cut(module: Any, here: Boundaries, rope: internals.Rope, position_ids: Tensor) -> bool:
    """Whether the running boundaries cut these positions; those of an image or sound tower are other tokens.

    Raises:
        ValueError: the text model's own positions do not lie as its batch does, or its rope type is not known.
    """
    rows = position_ids.shape[-2] if position_ids.dim() > 1 else 1
    fits = position_ids.shape[-1] == here.length and rows in (1, here.batch)
    if fits and rope.kind in internals.LENGTH_ROPES:
        return True
    if not fits and type(module.config) is not here.config_type:
        return False
    reason = f"the rotary tables of rope type {rope.kind!r} follow the longest sample"
    if not fits:
        reason += f" and are asked for at {tuple(position_ids.shape)} in a batch of {(here.batch, here.length)} tokens"
    raise ValueError(
        f"{here.model} cannot be trained on packed samples: {reason}. Use padded batches (DataCollatorWithPadding) of "
        f"samples of one length instead, or one of the rope types {', '.join(internals.LENGTH_ROPES[:2])}"
    )


def _lengths(here: Boundaries, position_ids: Tensor) -> Tensor:
    """int ``[B, T, 1]``: the largest position of each token's sample plus one, which is its length to these tables."""
    highest = position_ids.amax(0) if position_ids.dim() > 2 else position_ids
    highest = highest.expand(here.batch, here.length)
    # Tail padding has label -1 and gets the first slot.
    slot = here.seq_idx.flatten().long() + 1
    last = highest.new_zeros(here.cu_seqlens.shape[0]).scatter_reduce(0, slot, highest.flatten(), "amax")
    return (last[slot] + 1).view(here.batch, here.length, 1)


def _scale_per_token(module: Any, rope: internals.Rope, lengths: Tensor) -> Dict[str, Any]:
    """Phi-MoE: the frequencies stay, and each token's tables are scaled ``[B, T, 1]`` by its sample's length.

    The stock forward branches on the longest sample unless its rope type is "default"; then it takes the scale from its
    init function.
    """
    parameters = rope.parameters
    scale = torch.where(lengths > rope.original_length, parameters["long_mscale"], parameters["short_mscale"])
    return dict(
        config=View(module.config, {"rope_parameters": {"rope_type": "default"}}),
        rope_init_fn=lambda config: (rope.original_frequencies, scale),
    )


def _frequencies_per_token(
    module: Any, rope: internals.Rope, layer_type: Optional[str], lengths: Tensor, device: torch.device
) -> Dict[str, Any]:
    """Frequencies ``[B, T, K / 2]``: each token's those of its sample alone."""
    original = rope.original_frequencies.to(device)
    if rope.kind == "longrope":
        beyond = _long_frequencies(module, rope.prefix, layer_type, rope.original_length, device)
    else:
        beyond = _dynamic_frequencies(rope, lengths, 2 * original.shape[-1])
    return {f"{rope.prefix}inv_freq": torch.where(lengths > rope.original_length, beyond, original)}


def _dynamic_frequencies(rope: internals.Rope, lengths: Tensor, dim: int) -> Tensor:
    """float32 ``[B, T, dim / 2]``: dynamic NTK's frequencies for samples of ``lengths``.

    The formula and its order of operations are those of transformers' init function, which takes one length and moves a
    number to the device for it.
    """
    factor = rope.parameters["factor"]
    stretch = (factor * lengths / rope.original_length) - (factor - 1)
    base = rope.parameters["rope_theta"] * stretch ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, device=lengths.device).float() / dim
    return 1.0 / base**exponent
