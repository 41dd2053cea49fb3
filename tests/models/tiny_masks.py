"""Tiny models whose attention sees more than causal, or less, and samples for them.

``MODELS`` maps a transformers model type to how it is built and what a sample of it holds: a list of parts, ``text`` of
so many tokens or an image, which tests join. Samples end and begin with blocks on purpose: neighbours must not join.
"""

from typing import Any, Dict, List, NamedTuple, Tuple

import torch
import transformers
from transformers.integrations.hub_kernels import allow_all_hub_kernels

from tests.models.tiny_models import NAME, SETTINGS, redraw

VOCABULARY, IMAGE = 128, 100
_DECODER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# One image is 4 patches and 4 tokens.
_TOWER = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
# Part of a sample: "text", "block" (tokens that see each other both ways), "image" (the same, with pixels), and tokens.
Part = Tuple[str, int]
Sample = List[Part]


class Kind(NamedTuple):
    """A model type: its class, its configuration, the name and values of the keyword that tells blocks, its samples."""

    model: type
    config: Any
    blocks: str
    in_block: int
    elsewhere: int
    samples: List[Sample]


def _gemma3() -> Any:
    text = dict(_DECODER, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    return transformers.Gemma3Config(
        text_config=text, vision_config=_TOWER, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=101,
        eoi_token_index=102,
    )  # fmt: skip


def _paligemma() -> Any:
    return transformers.PaliGemmaConfig(
        text_config=dict(_DECODER, model_type="gemma", num_image_tokens=4), image_token_index=IMAGE, projection_dim=32,
        vision_config=dict(_TOWER, projection_dim=32, num_image_tokens=4), hidden_size=32,
    )  # fmt: skip


def _hrm_text() -> Any:
    decoder = {name: value for name, value in _DECODER.items() if name not in ("num_hidden_layers",)}
    return transformers.HrmTextConfig(**decoder, num_hidden_layers=1, H_cycles=2, L_cycles=2, initializer_range=0.2)


def _esmc() -> Any:
    return transformers.EsmcConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )


# fmt: off
MODELS: Dict[str, Kind] = {
    "gemma3": Kind(transformers.Gemma3ForConditionalGeneration, _gemma3, "token_type_ids", 1, 0, [
        [("text", 3), ("image", 4), ("text", 8), ("image", 4)],
        [("image", 4), ("text", 5)],
        [("text", 7)],
        [("text", 1), ("image", 4)],
    ]),
    "paligemma": Kind(transformers.PaliGemmaForConditionalGeneration, _paligemma, "token_type_ids", 0, 1, [
        [("image", 4), ("block", 3), ("text", 5)],
        [("image", 4), ("block", 2)],
        [("image", 4), ("text", 3)],
    ]),
    "hrm_text": Kind(transformers.HrmTextForCausalLM, _hrm_text, "token_type_ids", 1, 0, [
        [("block", 5), ("text", 9)],
        [("block", 7)],
        [("block", 2), ("text", 1)],
        [("text", 6)],
    ]),
}
# fmt: on


def build(model_type: str, attention: str = NAME, kind: Kind = None, **changes: Any) -> torch.nn.Module:
    """A float32 model with redrawn parameters, the same whatever ``attention`` is."""
    kind = MODELS[model_type] if kind is None else kind
    config = kind.config()
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(), allow_all_hub_kernels():
        torch.manual_seed(0)
        model = kind.model._from_config(config, attn_implementation=attention)
    return redraw(model)


def batch_of(kind: Kind, sample: Sample, seed: int) -> Dict[str, torch.Tensor]:
    """One sample as a batch of one row."""
    generator = torch.Generator().manual_seed(seed)
    ids, marks, pixels = [], [], []
    for what, count in sample:
        text = torch.randint(3, IMAGE, (count,), generator=generator)
        ids.append(torch.full((count,), IMAGE) if what == "image" else text)
        marks.append(torch.full((count,), kind.elsewhere if what == "text" else kind.in_block))
        if what == "image":
            pixels.append(torch.randn(1, 3, 8, 8, generator=generator))
    batch = {"input_ids": torch.cat(ids)[None], kind.blocks: torch.cat(marks)[None]}
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
    return batch


def alone(model_type: str) -> List[Dict[str, torch.Tensor]]:
    kind = MODELS[model_type]
    return [batch_of(kind, sample, seed) for seed, sample in enumerate(kind.samples)]


def packed(model_type: str, setting: str = "position_ids", batches: Any = None) -> Dict[str, Any]:
    """The same samples in one row, as the flattening collator would pack them."""
    batches = alone(model_type) if batches is None else batches
    features = [{"input_ids": batch["input_ids"][0].tolist()} for batch in batches]
    pack = transformers.DataCollatorWithFlattening(**SETTINGS[setting])(features, return_tensors="pt")
    del pack["labels"]
    marks = MODELS[model_type].blocks
    pack[marks] = torch.cat([batch[marks] for batch in batches], 1)
    pixels = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]
    return {**pack, **({"pixel_values": torch.cat(pixels)} if pixels else {})}


def padded(model_type: str, batches: List[Dict[str, torch.Tensor]], side: str) -> Dict[str, torch.Tensor]:
    """The samples as rows of a padded batch. Padding is marked as processors do: as text before, with 0 behind."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)

    def rows(name: str, padding: int) -> torch.Tensor:
        parts = [batch[name][0] for batch in batches]
        gaps = [part.new_full((longest - len(part),), padding) for part in parts]
        joined = [torch.cat([gap, part] if side == "left" else [part, gap]) for gap, part in zip(gaps, parts)]
        return torch.stack(joined)

    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    marks = MODELS[model_type].blocks
    result = {name: rows(name, 0) for name in ("input_ids", "attention_mask", marks)}
    pixels = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]
    return {**result, **({"pixel_values": torch.cat(pixels)} if pixels else {})}
