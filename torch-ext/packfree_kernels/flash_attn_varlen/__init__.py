"""Softmax attention over packed sequences."""

from .api import flash_attn_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache
from .reference import dropout_keep, flash_attn_varlen_reference

__all__ = [
    "dropout_keep",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_reference",
    "flash_attn_with_kvcache",
]
