"""The functions for decoding on small inputs: one step of a batch, with what it updates in place."""

from typing import Any, Dict, Tuple

import torch

Arguments = Dict[str, Any]
Shapes = Dict[str, Tuple[int, ...]]


def step_inputs(name: str, batch: int = 2) -> Tuple[Shapes, Arguments, Arguments]:
    """Shapes of what takes gradients, first of all the tokens; tensors that are updated; the other arguments."""
    if name == "causal_conv1d_update":
        shapes = {"x": (batch, 4), "weight": (4, 3), "bias": (4,)}
        return shapes, {"conv_state": torch.randn(batch, 4, 2)}, {}
    if name == "selective_state_update":
        tokens = {"x": (batch, 4), "dt": (batch, 4), "A": (4, 3), "B": (batch, 3), "C": (batch, 3)}
        return {**tokens, "D": (4,), "z": (batch, 4)}, {"state": torch.randn(batch, 4, 3)}, {}
    if name == "flash_attn_with_kvcache":
        shapes = {**{key: (batch, 1, 2, 4) for key in "qkv"}, "s_aux": (2,)}
        caches = {key: torch.randn(batch, 6, 2, 4) for key in ("k_cache", "v_cache")}
        filled = torch.arange(batch) * 3 % 6
        return shapes, caches, {"cache_seqlens": filled, "causal": True}
    decays = (1, 3, 2, 4) if name == "fused_recurrent_kda" else (1, 3, 2)
    shapes = {key: (1, 3, 2, 4) for key in "qkv"}
    return {**shapes, "g": decays, "beta": (1, 3, 2), "initial_state": (1, 2, 4, 4)}, {}, {}


def slot_arguments(name: str, batch: int) -> Tuple[Arguments, Arguments]:
    """The same functions on a cache of more rows than the batch: tensors that are updated, and where the batch is."""
    slots = torch.randperm(batch + 3)[:batch]
    if name == "causal_conv1d_update":
        states = torch.randn(batch + 3, 4, 5)
        return {"conv_state": states}, {"conv_state_indices": slots, "cache_seqlens": torch.arange(batch)}
    if name == "selective_state_update":
        return {"state": torch.randn(batch + 3, 4, 3)}, {"state_batch_indices": slots}
    caches = {key: torch.randn(2 * batch + 3, 4, 2, 4) for key in ("k_cache", "v_cache")}
    pages = torch.randperm(2 * batch + 3)[: 2 * batch].view(batch, 2)
    filled = torch.arange(batch) % 7
    pages[filled < 4, 1] = -1  # a page that nothing is written to yet has no number
    return caches, {"block_table": pages, "cache_seqlens": filled}


class Step:
    """A function for decoding on small inputs: ``step(**changes)`` returns its output and what it has updated."""

    def __init__(self, kernel, name: str, batch: int = 2, slots: bool = False):
        shapes, self.updated, self.others = step_inputs(name, batch)
        if slots:
            self.updated, places = slot_arguments(name, batch)
            self.others = {**self.others, **places}
        self.function, self.name = getattr(kernel, name), name
        self.inputs = {key: torch.randn(shape) for key, shape in shapes.items()}

    def __call__(self, **changes):
        updated = {key: value.clone() for key, value in self.updated.items()}
        out = self.function(**{**self.inputs, **updated, **self.others, **changes})
        return out[0] if isinstance(out, tuple) else out, list(updated.values())
