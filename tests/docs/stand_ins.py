"""What the documents take as given: the names that a reader has at hand, as tiny things that need no network."""

from pathlib import Path
from typing import Any, Dict

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig, TrainingArguments

LENGTHS = (9, 4, 13, 5, 7, 6)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = [*SPECIAL.values(), *(f"w{number}" for number in range(60))]


def names(folder: Path) -> Dict[str, Any]:
    """The variables that docs/guide.md introduces in its first lines, and those of its section on TRL."""
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=2)
    return {
        "path": save_model(folder / "model"),
        "data": [{"input_ids": torch.randint(len(SPECIAL), len(WORDS), (length,)).tolist()} for length in LENGTHS],
        "args": TrainingArguments(output_dir=str(folder / "out"), per_device_train_batch_size=3, **quiet),
        "texts": [{"text": " ".join(f"w{(7 * start + word) % 60}" for word in range(5 + start))} for start in range(8)],
        "device": dict(use_cpu=True, bf16=False),
    }


def save_model(folder: Path) -> str:
    """A hybrid model (gated delta rule and attention) with a tokenizer of 64 words."""
    config = Qwen3_5TextConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL).save_pretrained(folder)
    return str(folder)
