"""Public functions called without a state for each sequence, where their number is not to be known."""

import functools
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Callable, Iterator

# What asks for the states behind the last tokens, and the functions that are asked.
ASKED = ("return_final_states", "return_last_state", "output_final_state")
FUNCTIONS = (
    "causal_conv1d_fn", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
    "fused_recurrent_kda", "selective_scan_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined",
)  # fmt: skip


def without_states(function: Callable) -> Callable:
    """``function`` called without its final states, and None in their place."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        asked = [keywords.pop(name, None) for name in ASKED]
        result = function(*arguments, **keywords)
        return (result, None) if any(asked) and not isinstance(result, tuple) else result

    return call


@contextmanager
def nobody_asks_for_states(kernel: ModuleType) -> Iterator[None]:
    """The package's functions leave final states out; states that are given are the caller's to leave out."""
    before = {name: getattr(kernel, name) for name in FUNCTIONS}
    try:
        for name, function in before.items():
            setattr(kernel, name, without_states(function))
        yield
    finally:
        for name, function in before.items():
            setattr(kernel, name, function)
