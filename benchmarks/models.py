"""The models whose whole steps are measured: one of each family, 4 layers of 512, with random weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, HIDDEN, VOCABULARY = 4, 512, 8192
SEED = 0

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1536}
# Mixers are the size that a model of this width has; of the layers, one in four is attention where a family mixes both.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_ATTENTION},
    "qwen3_5_text": {
        **_ATTENTION,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "kimi_linear": {
        **_ATTENTION,
        "num_key_value_heads": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 512,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "bamba": {
        **_ATTENTION,
        "attn_layer_indices": [2],
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
    "mamba": {"state_size": 16, "expand": 2},
    "lfm2": {
        **_ATTENTION,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
}


def make_model(family: str, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """A model of ``family`` with the same weights each time, in training; ``attention``: a Hub kernel's name."""
    config = CONFIG_MAPPING[family](**_COMMON, **FAMILIES[family])
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if attention:
        # By the one string, as a user's model comes.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, allow_all_kernels=True
            )
    return model.train()
