"""Mamba-1's selective scan over packed sequences."""

from .api import mamba_inner_fn, selective_scan_fn
from .reference import selective_scan_reference

__all__ = ["mamba_inner_fn", "selective_scan_fn", "selective_scan_reference"]
