"""What a module counts along the row is counted along each sample.

ESM's token dropout takes the share of masked tokens in a row; Inkling's attention takes each token's place in it. The
stock forwards run on a view of their module in which that step is switched off, and the step is done here. A call that
is no pack goes to the stock forward.
"""

import functools
from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor

from . import functions, internals
from .context import Boundaries
from .undo import UndoList
from .view import View

# The share of masked tokens in the training of every ESM model.
_TRAINED_SHARE = 0.15 * 0.8


def make_per_sample(undo: UndoList) -> None:
    """Replace the forward of the classes that count, in the modules that have been loaded by now."""
    for name, replacement in _REPLACEMENTS.items():
        for cls in internals.modeling_classes(name):
            stock = vars(cls)["forward"]
            if not hasattr(stock, "packfree_per_sample"):
                forward = functools.wraps(stock)(replacement(stock))
                forward.packfree_per_sample = True
                undo.replace(cls, "forward", forward)


def _token_dropout(stock: Callable) -> Callable:
    """Embeddings of masked tokens are zeroed and all are scaled by (1 - 0.12) / (1 - share of masked tokens)."""

    def forward(
        self: Any,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
    ) -> Tensor:
        counts = self.token_dropout and input_ids is not None and functions.supported(input_ids.device)
        here = functions.running() if counts else None
        if here is None or not here.fit(*input_ids.shape):
            return stock(self, input_ids, attention_mask, position_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        masked = input_ids == self.mask_token_id
        scaled = inputs_embeds.masked_fill(masked[..., None], 0.0)
        scaled = (scaled * (1 - _TRAINED_SHARE) / (1 - _share(here, masked))).to(scaled.dtype)
        return stock(View(self, {"token_dropout": False}), input_ids, attention_mask, position_ids, scaled)

    return forward


def _share(here: Boundaries, masked: Tensor) -> Tensor:
    """float32 ``[B, T, 1]``: how much of each token's sample is masked; 0 in tail padding."""
    before = torch.nn.functional.pad(masked.flatten().cumsum(0), (1, 0))
    offsets = here.cu_seqlens.long()
    # Sequences without tokens stand at the end of offsets made from positions.
    shares = before[offsets].diff().float() / offsets.diff().clamp_min(1)
    # Tail padding has label -1 and gets the first entry.
    return torch.nn.functional.pad(shares, (1, 0))[here.seq_idx.long() + 1][..., None]


def _log_scaling(stock: Callable) -> Callable:
    """Queries and position biases of full attention are scaled by 1 + alpha * log(place / floor) beyond the floor."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        floor = None if self.is_sliding else self.config.log_scaling_n_floor
        here = functions.running() if floor is not None and functions.supported(hidden_states.device) else None
        if here is None or not here.fit(*hidden_states.shape[:2]):
            return stock(self, hidden_states, *args, **kwargs)
        scale = 1.0 + self.config.log_scaling_alpha * torch.log((_places(here).float() / floor).clamp(min=1.0))

        def q_norm(states: Tensor) -> Tensor:
            # [B, T, H, K]
            normed = self.q_norm(states)
            return (normed.float() * scale[:, :, None, None]).to(normed.dtype)

        def rel_logits_proj(*arguments: Any) -> Tensor:
            # [B, H, T, T]
            bias = self.rel_logits_proj(*arguments)
            return (bias.float() * scale[:, None, :, None]).to(bias.dtype)

        values: Dict[str, Any] = dict(
            q_norm=q_norm, rel_logits_proj=rel_logits_proj, config=View(self.config, {"log_scaling_n_floor": None})
        )
        return stock(View(self, values), hidden_states, *args, **kwargs)

    return forward


def _places(here: Boundaries) -> Tensor:
    """int ``[B, T]``: 1 for the first token of a sample, 2 for the next; in tail padding some number."""
    index = torch.arange(1, here.batch * here.length + 1, device=here.seq_idx.device).view(here.seq_idx.shape)
    return index - here.cu_seqlens[here.seq_idx.long()]


# Class that counts -> what builds its replacement.
_REPLACEMENTS: Dict[str, Callable[[Callable], Callable]] = {
    "EsmEmbeddings": _token_dropout,
    "EvollaSaProtEmbeddings": _token_dropout,
    "InklingAttention": _log_scaling,
}
# What a shard of a row cannot count.
CLASSES = tuple(_REPLACEMENTS)
