"""Mamba-2's scan over packed sequences."""

from .api import mamba_chunk_scan_combined, selective_state_update
from .fused import mamba_split_conv1d_scan_combined
from .reference import mamba2_scan_reference, selective_state_update_reference

__all__ = [
    "mamba2_scan_reference",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "selective_state_update",
    "selective_state_update_reference",
]
