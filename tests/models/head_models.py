"""Tiny models with heads that give one result a sample, beside those of tiny_models.py."""

from typing import Any, Dict, List, Optional

import torch
from transformers import AutoModelForSequenceClassification
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .tiny_models import MODELS, NAME, VOCABULARY, pack, redraw

_STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0)
_DECODER = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    pad_token_id=0,
)
_BERT = dict(_DECODER, **_STILL)
# Their positions start at padding_idx + 1.
_ROBERTA = dict(_BERT, pad_token_id=1)

# Model type -> configurations of the ways in which its head reads a sample.
HEAD_MODELS: Dict[str, List[Dict[str, Any]]] = {
    # last token that is no padding
    **{name: [MODELS[name]] for name in ("llama", "gemma2", "qwen3_5_text", "jamba", "zamba", "zamba2")},
    "gpt2": [dict(MODELS["gpt2"], pad_token_id=0)],
    "gpt_neox": [dict(_DECODER, hidden_dropout=0, attention_dropout=0)],
    "opt": [
        dict(
            hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=VOCABULARY, max_position_embeddings=64, dropout=0, pad_token_id=0,
        )
    ],
    "biogpt": [dict(_BERT, activation_dropout=0, layerdrop=0)],
    "gpt_bigcode": [
        dict(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, pad_token_id=0,
        )
    ],
    "modernbert-decoder": [
        dict(MODELS["modernbert"], layer_types=["sliding_attention", "full_attention"], max_position_embeddings=64)
    ],
    # first token
    "distilbert": [
        dict(
            dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_position_embeddings=64,
            dropout=0, attention_dropout=0, seq_classif_dropout=0, pad_token_id=0,
        )
    ],
    "bert": [_BERT],
    "roberta": [_ROBERTA],
    "xlm-roberta": [_ROBERTA],
    "xlm-roberta-xl": [_ROBERTA],
    "roberta-prelayernorm": [_ROBERTA],
    "camembert": [_ROBERTA],
    "data2vec-text": [_ROBERTA],
    "xmod": [dict(_ROBERTA, languages=["en_XX"], default_language="en_XX")],
    "electra": [dict(_BERT, embedding_size=16, summary_last_dropout=0)],
    "ernie": [dict(_BERT, use_task_id=False)],
    "esm": [dict(_ROBERTA, position_embedding_type="rotary", token_dropout=False, mask_token_id=3)],
    "roc_bert": [dict(_BERT, enable_pronunciation=False, enable_shape=False)],
    "gte": [_BERT],
    "nomic_bert": [dict(_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)],
    "jina_embeddings_v3": [_ROBERTA],
    "esmc": [dict(_DECODER, classifier_dropout=0.0)],
    # first token or mean
    "ultrabert": [dict(_DECODER, classifier_pooling=pooling) for pooling in ("cls", "mean")],
    "modernbert": [dict(MODELS["modernbert"], classifier_pooling=pooling) for pooling in ("cls", "mean")],
    "eurobert": [
        dict(_DECODER, num_key_value_heads=2, classifier_pooling=pooling, mask_token_id=3)
        for pooling in ("bos", "mean")
    ],
}  # fmt: skip

CASES = [
    (model_type, index) for model_type, configurations in HEAD_MODELS.items() for index in range(len(configurations))
]


def first_position(model_type: str) -> int:
    return 2 if HEAD_MODELS.get(model_type, [{}])[0].get("pad_token_id") == 1 else 0


def build(model_type: str, index: int = 0, attention: Optional[str] = NAME, auto: Any = None, **changes: Any) -> Any:
    """A sequence classifier with redrawn parameters."""
    values = {"num_labels": 3, **HEAD_MODELS[model_type][index], **changes}
    auto = auto or AutoModelForSequenceClassification
    with torch.random.fork_rng(), allow_all_hub_kernels():
        torch.manual_seed(0)
        model = auto.from_config(CONFIG_MAPPING[model_type](**values), attn_implementation=attention)
    return redraw(model)


def packed(model_type: str, setting: str, **extra: Any) -> Dict[str, Any]:
    batch = pack("llama", setting, **extra)
    if "position_ids" in batch:
        batch["position_ids"] = batch["position_ids"] + first_position(model_type)
    return batch
