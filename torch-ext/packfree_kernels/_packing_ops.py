"""Shapes of the boundary conversions' ops, which :mod:`.packing` uses where values may not be read.

Offsets made of positions or labels have one entry a token and one more: the starts in order, then the end in every
entry. Their number is the result's value and not its shape, so nothing waits for it.
"""

import torch

from ._ops import add_op_namespace_prefix


@torch.library.register_fake(add_op_namespace_prefix("packing_from_positions"))
def _from_positions_fake(positions, only_falls):
    return positions.new_empty((positions.shape[0] * positions.shape[1] + 1,), dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("packing_from_labels"))
def _from_labels_fake(seq_idx):
    return seq_idx.new_empty((seq_idx.shape[0] * seq_idx.shape[1] + 1,), dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("packing_from_offsets"))
def _from_offsets_fake(cu_seqlens, tokens):
    return cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int32)
