"""Small configurations of any transformers model type, made from its defaults by what the keys are called.

A key that names a size gets a small value, a list with one entry per layer keeps the first layer of each kind, rates of
dropout become 0, special tokens move into the vocabulary. What no rule can know stands in ``EXCEPTIONS``.
"""

import copy
from typing import Any, Dict, List

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.tiny_models import EAGER_ONLY, MODELS, REFUSED, VOCABULARY

HEADS, KEY_HEADS, HEAD_DIM, HIDDEN, POSITIONS, WINDOW = 4, 2, 8, 32, 64, 6

# Value -> the keys that get it where the default is larger.
_SIZES: Dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab entity_vocab_size "
    "decoder_vocab_size shape_vocab_size pronunciation_vocab_size unpadded_vocab_size",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_source_positions "
    "max_target_positions model_max_length original_max_position_embeddings block_multiple_of",
    HIDDEN: "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim word_embed_proj_dim "
    "true_hidden_size hidden_size_global decoder_hidden_size "
    "pooler_hidden_size input_embedding_size output_embedding_size lru_width hidden_dim embed_dim out_hidden_size "
    "text_hidden_size projection_dim proj_dim backbone_hidden_size entity_emb_size prediction_head_size "
    "attention_hidden_size router_hidden_size n_embed output_dim projection_size lm_hidden_size d_latents "
    "projection_intermediate_size encoder_hidden_size cross_attention_hidden_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner dff dim_ff n_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size d_ff mlp_dim",
    16: "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank "
    "o_lora_rank qk_head_dim embedding_rank laurel_rank mamba_chunk_size chunk_size hidden_size_per_layer_input "
    "intra_bottleneck_size pronunciation_embed_dim shape_embed_dim adapter_rank rel_extent hc_lowrank",
    HEAD_DIM: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
    "linear_value_head_dim linear_head_dim kv_channels d_head d_kv dim_head swa_head_dim attention_head_size "
    "attention_head_dim mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim "
    "global_head_dim rotary_dim swa_v_head_dim",
    WINDOW: "sliding_window local_attention attention_chunk_size sliding_window_size attention_window_size window_size "
    "keep_window_size",
    HEADS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads "
    "swa_num_attention_heads num_query_groups num_self_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts index_n_heads num_attention_groups d_rel moe_n_routed_experts",
    KEY_HEADS: "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads num_hidden_layers "
    "n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers depth "
    "num_global_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts zero_expert_num "
    "num_self_attends_per_block num_layers_per_stack num_expert_group",
    1: "n_group topk_group num_nextn_predict_layers first_k_dense_replace num_dense_layers",
}
_VALUES = {key: value for value, keys in _SIZES.items() for key in keys.split()}
_BY_HAND = {**MODELS, **REFUSED, **EAGER_ONLY}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_OFF = ("dropout", "_prob", "pdrop", "_drop", "layerdrop", "dropout_rate")
# Keys without a default that a model needs.
_UNSET = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_DIM,
    "num_key_value_heads": KEY_HEADS,
    "n_routed_experts": HEADS,
    "num_experts_per_tok": KEY_HEADS,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class _Keep:
    """Marks a key that stays at its default."""

    def __deepcopy__(self, memo: Any) -> "_Keep":
        return self


KEEP = _Keep()

# Three axes of positions; the sections sum to half of the head dimension.
_THREE_AXES = dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0, mrope_section=[2, 1, 1])
)

# Keys that no rule gets right: either sizes that depend on each other in a way of this type alone, or None for a key
# that must keep its default.
EXCEPTIONS: Dict[str, Dict[str, Any]] = {
    "blt": dict(num_hidden_layers=2),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    "dots1": dict(n_shared_experts=1, first_k_dense_replace=1),
    "esm": dict(pad_token_id=1, mask_token_id=3),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4)),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "hrm_text": dict(num_hidden_layers=2, num_layers_per_stack=KEEP),
    "mistral4": dict(head_dim=16),
    "mobilebert": dict(intra_bottleneck_size=32),
    "neomme": dict(head_dim=16),
    "phi4_multimodal": dict(audio_config=dict(nemo_conv_channels=16, ext_pw_out_channel=16)),
    "reformer": dict(axial_pos_shape=(8, 8), axial_pos_embds_dim=(16, 16)),
    "qwen2_vl_text": _THREE_AXES,
    "qwen2_5_vl_text": _THREE_AXES,
    "qwen2_5_omni_text": _THREE_AXES,
    "glm4v_text": _THREE_AXES,
    "glm4v_moe_text": _THREE_AXES,
    "glm_ocr_text": _THREE_AXES,
    "glm_image_text": _THREE_AXES,
    "glmga_text": _THREE_AXES,
    "paddleocr_vl_text": _THREE_AXES,
    "hunyuan_vl_text": _THREE_AXES,
    "cosmos3_edge_text": _THREE_AXES,
    "step3p7_text": dict(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        sliding_window=WINDOW,
        num_sliding_attention_heads=HEADS,
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4) for kind in ("sliding_attention", "full_attention")
        },
    ),
    "xmod": dict(default_language="en_XX"),
}


def _layer_kinds(config: PreTrainedConfig, layers: int) -> List[int]:
    """The first layer of each kind, by every list that has one entry per layer; at least two layers, at most four."""
    lists = [value for value in vars(config).values() if _is_per_layer(value, layers)]
    first: Dict[str, int] = {}
    for layer in range(layers):
        first.setdefault(repr([values[layer] for values in lists]), layer)
    kept = sorted(first.values())[:4]
    return kept if len(kept) > 1 else list(range(min(2, layers)))


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers and layers > 2


def _changes(config: PreTrainedConfig) -> Dict[str, Any]:
    names = {public: private for public, private in getattr(config, "attribute_map", {}).items()}
    changes: Dict[str, Any] = {}
    layers = next((getattr(config, key) for key in _LAYERS if isinstance(getattr(config, key, None), int)), 0)
    kinds = _layer_kinds(config, layers)
    for key, value in vars(config).items():
        if key.startswith("_") or key in names:
            continue
        if isinstance(value, PreTrainedConfig):
            changes[key] = shrunk(value)
        elif _is_per_layer(value, layers):
            changes[key] = [_small(key, value[layer]) for layer in kinds]
        elif key in _LAYERS and layers > 2:
            changes[key] = len(kinds)
        else:
            changes[key] = _small(key, value)
            # A part's own default may differ from what its whole gives it, so sizes are always told.
            if changes[key] is value and key not in _VALUES:
                del changes[key]
    _share_heads(config, changes)
    return changes


def _small(key: str, value: Any) -> Any:
    if value is None:
        return _UNSET.get(key)
    if isinstance(value, bool):
        return value
    if key in _TOKENS:
        return value if isinstance(value, int) and value < 3 else _TOKENS[key]
    if isinstance(value, float) and key.endswith(_OFF):
        return 0.0
    if isinstance(value, int) and key in _VALUES:
        return VOCABULARY if _VALUES[key] == VOCABULARY else min(value, _VALUES[key])
    return value


def _share_heads(config: PreTrainedConfig, changes: Dict[str, Any]) -> None:
    """As many key heads as heads where that is the default, and no more than heads."""
    heads = next((key for key in _QUERY_HEADS if key in changes), None)
    for key in ("num_key_value_heads", "num_kv_heads"):
        if heads and key in changes and getattr(config, key) == getattr(config, heads):
            changes[key] = changes[heads]


def shrunk(config: PreTrainedConfig, **exceptions: Any) -> PreTrainedConfig:
    """A small configuration of the class of ``config``, which holds the defaults."""
    by_hand = _BY_HAND.get(config.model_type)
    if by_hand is not None:
        return type(config)(**by_hand)
    changes = _changes(config)
    for key, value in {**copy.deepcopy(EXCEPTIONS.get(config.model_type, {})), **exceptions}.items():
        part = changes.get(key)
        if isinstance(part, PreTrainedConfig) and isinstance(value, dict):
            value = shrunk(getattr(config, key), **value)
        changes[key] = value
    return type(config)(**{key: value for key, value in changes.items() if value is not KEEP})


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The hand-written configuration of ``tests/models/tiny_models.py`` where there is one, else the shrunk default."""
    by_hand = _BY_HAND.get(model_type)
    return CONFIG_MAPPING[model_type](**by_hand) if by_hand else shrunk(CONFIG_MAPPING[model_type]())
