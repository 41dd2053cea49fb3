"""Text, tokenizer and model of the demo: docstrings of the standard library and a small new model, or the user's."""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

# Not prose for users of the library, or not there in every installation.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
SHORTEST_TEXT = 32
DATA_SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


def standard_library_docstrings() -> list[str]:
    """Every docstring of the standard library of at least 32 characters, once; its sources are parsed, not imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_TEXT:
                    texts[text] = None
    if not texts:
        raise ValueError(f"no docstrings in {root}: this Python comes without its sources; give --dataset FILE")
    return list(texts)


def load_texts(name: str, column: str | None) -> list[str]:
    """The texts of a file, a folder or a data set on the Hub; ``column`` None takes ``text`` or the first of strings.

    Raises:
        ValueError: nothing usable is there.
    """
    datasets.disable_progress_bars()
    path = Path(name)
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        raise ValueError(f"--dataset {name}: must be a file that ends in {', '.join(DATA_SUFFIXES)}")
    try:
        if path.is_file():
            rows = datasets.load_dataset(DATA_SUFFIXES[path.suffix], data_files=name, split="train")
        else:
            rows = datasets.load_dataset(name, split="train")
    # Whatever goes wrong on the way (no network, no such data set, no right to it), the user's way out is the same.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--dataset {name}: no readable file or folder here, and no data set: {reason}") from error
    columns = [key for key, feature in rows.features.items() if "string" in str(getattr(feature, "dtype", ""))]
    column = column or ("text" if "text" in columns else next(iter(columns), None))
    if column not in columns:
        raise ValueError(f"--dataset {name}: no text column {column!r}; it has: {', '.join(columns) or 'none'}")
    texts = [text for text in rows[column] if text and len(text) >= SHORTEST_TEXT]
    if not texts:
        raise ValueError(f"--dataset {name}: no text of at least {SHORTEST_TEXT} characters in column {column!r}")
    return texts


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``vocabulary`` tokens, among them ``<pad>`` and ``<eos>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3_5ForCausalLM:
    """A new hybrid model in Qwen3.5's layout: three gated delta rule layers, then one full attention layer."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, count: int, max_length: int, seed: int) -> list:
    """``count`` samples drawn in a seeded order, each its tokens and an end mark, cut to ``max_length`` tokens."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    chosen = [texts[order[index % len(order)]] for index in range(count)]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    rows = tokenizer(chosen, add_special_tokens=False)["input_ids"]
    return [{"input_ids": (row[: max_length - 1] + end)} for row in rows]
