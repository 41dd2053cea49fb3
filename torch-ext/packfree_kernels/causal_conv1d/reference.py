"""Ground truth of the causal convolution: a loop over sequences in plain torch, any float dtype."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..packing import sequence_bounds


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    cu_seqlens: Tensor,
    initial_states: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """y[d, t] = act(bias[d] + sum over k of weight[d, k] x[d, t - (W - 1) + k]), each sequence for itself.

    Args:
        x: ``[D, T]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        cu_seqlens: ``[N + 1]``.
        initial_states: ``[N, D, W - 1]`` or None (zeros): the tokens before each sequence.
        activation: None or ``"silu"``.

    Returns:
        y ``[D, T]``, 0 after the last boundary, and the final states ``[N, D, W - 1]``.
    """
    channels, width = weight.shape
    pieces, states = [], []
    for n, (bos, eos) in enumerate(sequence_bounds(cu_seqlens)):
        before = x.new_zeros(channels, width - 1) if initial_states is None else initial_states[n].to(x.dtype)
        padded = torch.cat([before, x[:, bos:eos]], dim=-1)
        z = torch.zeros_like(x[:, bos:eos]) if bias is None else bias[:, None].expand(channels, eos - bos)
        for k in range(width):
            z = z + weight[:, k, None] * padded[:, k : k + eos - bos]
        pieces.append(z * torch.sigmoid(z) if activation == "silu" else z)
        states.append(padded[:, padded.shape[-1] - (width - 1) :])
    end = int(cu_seqlens[-1])
    pieces.append(x.new_zeros(channels, x.shape[-1] - end))
    final_states = torch.stack(states) if states else x.new_zeros(0, channels, width - 1)
    return torch.cat(pieces, dim=-1), final_states
