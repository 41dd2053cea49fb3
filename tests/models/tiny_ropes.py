"""Tiny models whose rotary tables depend on a length, and samples on both sides of it.

Phi-3, Phi-MoE and MiniCPM3 use LongRoPE; any type with transformers' shared rotary code takes LongRoPE or dynamic NTK,
Gemma 3's kind one for each type of layer. Up to ``ORIGINAL`` tokens a sample has the original tables.
"""

import copy
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from tests.models.tiny_models import MODELS, build, run, samples

ORIGINAL = 8
# Shorter, longer, exactly the original length, one more than that, one token, shorter again.
LENGTHS = [5, 20, 8, 9, 1, 7]

# head_dim is 8 in every tiny model, so there are four frequencies.
LONGROPE: Dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[2.0, 3.0, 4.0, 5.0],
    original_max_position_embeddings=ORIGINAL,
)
DYNAMIC: Dict[str, Any] = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
_WINDOWED = dict(head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
_BEYOND = dict(max_position_embeddings=64, original_max_position_embeddings=ORIGINAL)

# Name -> model type and its configuration, without what every decoder has.
ROPES: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "phi3 longrope": ("phi3", dict(rope_parameters=LONGROPE, **_BEYOND)),
    "phimoe longrope": (
        "phimoe",
        dict(
            rope_parameters=dict(LONGROPE, short_mscale=1.1, long_mscale=1.6),
            num_local_experts=4,
            num_experts_per_tok=2,
            router_jitter_noise=0.0,
            input_jitter_noise=0.0,
            **_BEYOND,
        ),
    ),
    "minicpm3 longrope": ("minicpm3", dict(num_key_value_heads=4, rope_parameters=LONGROPE, **_LATENT, **_BEYOND)),
    "llama dynamic": ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)),
    "qwen3_5_text dynamic": (
        "qwen3_5_text",
        dict(
            {name: value for name, value in MODELS["qwen3_5_text"].items() if name not in MODELS["llama"]},
            rope_parameters=dict(DYNAMIC, mrope_section=[2, 1, 1], partial_rotary_factor=1.0),
            max_position_embeddings=ORIGINAL,
        ),
    ),
    "gemma3_text of two kinds": (
        "gemma3_text",
        dict(
            rope_parameters=dict(sliding_attention=DYNAMIC, full_attention=LONGROPE),
            max_position_embeddings=ORIGINAL,
            **_WINDOWED,
        ),
    ),
}


def changes(name: str) -> Dict[str, Any]:
    """The whole configuration of ``ROPES[name]``."""
    return {**MODELS["llama"], **copy.deepcopy(ROPES[name][1])}


def build_rope(name: str, attention: str) -> torch.nn.Module:
    return build(ROPES[name][0], attention, **changes(name))


def reference(name: str, lengths: List[int] = LENGTHS) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Logits and gradients of stock transformers, each sample alone in a model that has seen no other sample.

    Dynamic NTK keeps the frequencies of a longer sample, so the model is built anew for each.
    """
    logits, gradients = [], []
    for sample in samples(lengths):
        batch = dict(input_ids=torch.tensor([sample["input_ids"]]))
        one_logits, one_gradients = run(build_rope(name, "eager").train(), [batch])
        logits.append(one_logits)
        gradients.append(one_gradients)
    names = {parameter for one in gradients for parameter in one}
    zero = torch.zeros(())
    return torch.cat(logits), {name: sum((one.get(name, zero) for one in gradients), zero) for name in names}


# Rope kinds whose tables do not depend on a length; each shows that its packs stay right.
FIXED: Dict[str, Dict[str, Any]] = {
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=ORIGINAL),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=1e4,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    "proportional": dict(rope_type="proportional", rope_theta=1e4, factor=4.0),
}
KINDS: Dict[str, Dict[str, Any]] = {"longrope": LONGROPE, "dynamic": DYNAMIC, **FIXED}
# What a type's own parameters keep beside those of a kind. The whole head is rotated: four frequencies, not one.
_KEPT = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}


def rope_changes(config: Any, kind: str) -> Optional[Dict[str, Any]]:
    """What makes the rotary tables of ``config`` those of ``kind``; None where it has none."""
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict):
        return None

    def of_kind(before: Optional[Dict[str, Any]]) -> Dict[str, Any]:
        kept = {name: value for name, value in _KEPT.items() if name in (before or {})}
        return {**copy.deepcopy(KINDS[kind]), **kept}

    nested = any(isinstance(value, dict) for value in own.values())
    parameters = {layer: of_kind(before) for layer, before in own.items()} if nested else of_kind(own)
    return dict(rope_parameters=parameters, max_position_embeddings=ORIGINAL if kind == "dynamic" else 64)


def each_alone(model: torch.nn.Module, lengths: List[int] = LENGTHS) -> Tensor:
    """Logits of samples of ``lengths``, each through a copy of ``model`` that has seen no other."""
    rows = [torch.tensor([sample["input_ids"]]) for sample in samples(lengths)]
    with torch.no_grad():
        return torch.cat([copy.deepcopy(model)(input_ids=row).logits[0] for row in rows])
