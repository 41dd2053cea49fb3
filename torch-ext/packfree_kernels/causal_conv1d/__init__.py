"""Short causal depthwise convolution over packed sequences."""

from .api import causal_conv1d_fn, causal_conv1d_update
from .reference import causal_conv1d_reference

__all__ = ["causal_conv1d_fn", "causal_conv1d_reference", "causal_conv1d_update"]
