"""What the examples share: where the kernel lies, a tiny model, texts, the loss of samples alone, and how they end.

Import it before anything else: the places and the errors that it sets up are those of what is imported next.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "org/packfree-kernels"
SCRATCH = tempfile.TemporaryDirectory(prefix="packfree-example-")
TEXTS = """\
Packing puts samples side by side in one row instead of padding them
A state that runs on carries one sample into the next
Every layer has to know where a sample ends
Attention looks back to the first token of its own sample and no further
A short convolution reads three tokens before its own
The loss of a row is the mean over all of its targets
Row by row
A model that reads a row as one text learns from tokens that do not belong together
Nothing says so when it happens because the loss still falls
Compare a packed row with its samples alone and the difference is rounding
Pads cost time and memory and teach nothing
The end of this text is the start of another""".splitlines()

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
if any((ROOT / "build").glob("*/metadata.json")):
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={ROOT / 'build'}")


def arguments(doc: str) -> argparse.Namespace:
    """The command line of an example.

    Returns:
        ``model`` (a folder or name; a tiny new model by default), ``attn``, ``kernel`` (its name, whatever the
        attention is) and ``positions``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name of a causal language model (default: a tiny new one)")
    parser.add_argument("--attn", default=KERNEL, help="attn_implementation (default: %(default)s)")
    parser.add_argument("--positions", action="store_true", help="rows tell their samples by position_ids alone")
    given = parser.parse_args()
    given.kernel = given.attn if "/" in given.attn else KERNEL
    check_kernel(parser, given.kernel)
    folder = Path(given.model or ".").expanduser()
    if given.model and folder.is_dir() and not (folder / "config.json").is_file():
        parser.error(f"--model {given.model}: no config.json; give the folder that save_pretrained wrote")
    if given.model and not folder.is_dir() and (given.model.count("/") != 1 or given.model[0] in "./~"):
        parser.error(f"--model {given.model}: there is no such folder, and a model of the Hub is named OWNER/NAME")
    given.model = str(folder if folder.is_dir() else given.model) if given.model else tiny_model()
    return given


def check_kernel(parser: argparse.ArgumentParser, name: str) -> None:
    """End as argparse does where ``name`` is the kernel of this clone and nothing is built."""
    if name == KERNEL and "LOCAL_KERNELS" not in os.environ:
        parser.error(
            f"no build in {ROOT / 'build'}: run `make build`, or set LOCAL_KERNELS={KERNEL}=FOLDER to one, or name a "
            "published one with --attn OWNER/NAME"
        )


def tiny_model() -> str:
    """The folder of a new hybrid model (gated delta rule and attention) with a tokenizer of the words of TEXTS."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    words = ["<pad>", "<eos>", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = os.path.join(SCRATCH.name, "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    # Weights large enough that a token of another sample would show in the loss.
    config = Qwen3_5TextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], initializer_range=0.2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def samples(model: str) -> list[dict[str, list[int]]]:
    """TEXTS as tokens of the model's tokenizer, each a sample."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]


def positions_only(collator):
    """``collator`` without the keys of its batches that tell the samples besides ``position_ids``."""
    names = ("input_ids", "labels", "position_ids")
    return lambda features, **options: {
        name: value for name, value in collator(features, **options).items() if name in names
    }


def cut(batch: dict) -> list[dict]:
    """The samples of a packed row, by its positions: of each its ``input_ids`` and ``labels`` ``[1, length]``."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    names = [name for name in ("input_ids", "labels") if name in batch]
    ends = [*starts, batch["input_ids"].shape[1]]
    return [{name: batch[name][:, first:last] for name in names} for first, last in zip(ends, ends[1:])]


def alone_loss(model, batches) -> float:
    """The loss of each packed row with its samples run one by one, a target; the mean of all rows, as Trainer's is."""
    import torch

    losses, training = [], model.training
    model.eval()
    for batch in batches:
        total, targets = 0.0, 0
        for sample in cut(batch):
            with torch.no_grad():
                logits = model(input_ids=sample["input_ids"]).logits[0, :-1].float()
            labels = sample["labels"][0, 1:]
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            targets += int((labels != -100).sum())
        losses.append(total / targets)
    model.train(training)
    return sum(losses) / len(losses)


FAILED: list[str] = []


def same(claim: str, one: float, other: float, tolerance: float = 1e-5) -> None:
    """Print two numbers that have to be the same but for rounding, and note where they are not."""
    holds = abs(one - other) <= tolerance * max(1.0, abs(other))
    _note(f"{claim:<50}{one:>10.6f}{other:>12.6f}", holds, claim)


def small(claim: str, difference, tolerance: float = 1e-4) -> None:
    """Print the largest entry of a difference of logits that has to be rounding, and note where it is more."""
    largest = float(difference.abs().max())
    _note(f"{claim:<50}{largest:>10.1e}{'':>12}", largest <= tolerance, claim)


def _note(line: str, holds: bool, claim: str) -> None:
    print(f"{line}   {'same' if holds else 'DIFFERENT'}", flush=True)
    if not holds:
        FAILED.append(claim)


def finish() -> None:
    """End the example: with status 1 where something did not hold."""
    if FAILED:
        sys.exit(f"Does not hold: {', '.join(FAILED)}. Where samples mix and why: examples/leak_report.py")


# What is refused, not found or not reached is the user's to change; the last comes as errors of an HTTP client too.
TOLD = (OSError, ImportError, ValueError, NotImplementedError)


def tell(kind, error, trace) -> None:
    """``sys.excepthook``: what is missing or refused as its one sentence; everything else with a traceback."""
    script = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if isinstance(error, ModuleNotFoundError):
        way = "run it with .venv/bin/python, which `make build` sets up from requirements.txt"
        print(f"{script}: {error.name} is missing: {way}, or pip install {error.name}", file=sys.stderr)
    elif (isinstance(error, TOLD) or "httpx" in kind.__module__) and "TRACEBACK" not in os.environ:
        print(f"{script}: {error}\n(TRACEBACK=1 shows where this was raised.)", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)


sys.excepthook = tell
