"""Text and tokenizer for the demo: docstrings of the standard library, or a data set of the user's."""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Not prose for users of the library, or not there in every installation.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
SHORTEST_TEXT = 32
DATA_SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


class DataError(Exception):
    """The text cannot be had; the message says what to do."""


def standard_library_docstrings() -> list[str]:
    """Every docstring of the standard library of at least 32 characters, once, in the order of the files.

    The sources are parsed, not imported, so nothing of them runs.
    """
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
        raise DataError(
            f"no docstrings in {root}: this Python comes without its sources; give a text with --dataset FILE"
        )
    return list(texts)


def fetch(kind: str, name: str, hub, patterns: list[str]) -> Path:
    """Download the files of a repository that match ``patterns`` to the user's cache and return their folder.

    Args:
        kind: ``model`` or ``dataset``.
        name: ``owner/name`` on the Hub.
        hub: has the Hub's address as ``endpoint`` and the folder of the user's cache as ``cache``.
        patterns: of file names.

    Raises:
        DataError: the Hub does not give it.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, repo_type=kind, endpoint=hub.endpoint, cache_dir=hub.cache, allow_patterns=patterns)
        )
    # Whatever goes wrong on the way (no network, no such repository, no right to it), the user's way out is the same.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"--{kind} {name}: no such path here, and {hub.endpoint} does not give it: {reason}") from error


def load_texts(name: str, column: str | None, hub) -> list[str]:
    """The texts of a file, a folder or a data set on the Hub.

    Args:
        name: path of a file or folder (parquet, json, jsonl, csv, txt), or ``owner/name`` on the Hub. Of a folder with
            a training split, only that is read.
        column: column that holds the text; None takes ``text`` or else the first column of strings.
        hub: see :func:`fetch`.

    Raises:
        DataError: nothing usable is there.
    """
    import datasets

    datasets.disable_progress_bars()
    path = Path(name)
    if not path.exists():
        path = fetch("dataset", name, hub, [f"*{suffix}" for suffix in DATA_SUFFIXES])
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in DATA_SUFFIXES]
    if not files:
        raise DataError(f"--dataset {name}: holds no file that ends in {', '.join(DATA_SUFFIXES)}")
    files = [file for file in files if "train" in file.relative_to(path.parent).as_posix()] or files
    kind = DATA_SUFFIXES[files[0].suffix]
    same_kind = [str(file) for file in files if DATA_SUFFIXES[file.suffix] == kind]
    rows = datasets.load_dataset(kind, data_files=same_kind, split="train")
    columns = [key for key, feature in rows.features.items() if "string" in str(getattr(feature, "dtype", ""))]
    column = column or ("text" if "text" in columns else next(iter(columns), None))
    if column not in columns:
        raise DataError(f"--dataset {name}: no text column {column!r}; it has: {', '.join(columns) or 'none'}")
    texts = [text for text in rows[column] if text and len(text) >= SHORTEST_TEXT]
    if not texts:
        raise DataError(f"--dataset {name}: no text of at least {SHORTEST_TEXT} characters in column {column!r}")
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


def tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, count: int, max_length: int, seed: int
) -> list[dict[str, list[int]]]:
    """``count`` samples drawn in a seeded order, each its tokens and an end mark, cut to ``max_length`` tokens."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    chosen = [texts[order[index % len(order)]] for index in range(count)]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    rows = tokenizer(chosen, add_special_tokens=False)["input_ids"]
    return [{"input_ids": (row[: max_length - 1] + end)} for row in rows]
