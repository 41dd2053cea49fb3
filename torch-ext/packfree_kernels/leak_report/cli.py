"""The command line: a saved model, a packed batch, a report for each way to tell the boundaries."""

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch

from .. import hooks
from ..hooks import internals
from .report import REFUSED
from .run import leak_report
from .verdict import DIFFERS, LEAKS

OURS = "ours"
# What DataCollatorWithFlattening is asked for.
SETTINGS: Dict[str, Dict[str, bool]] = {
    "position_ids": {},
    "cu_seq_lens": dict(return_flash_attn_kwargs=True),
    "seq_idx": dict(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """0 if all batches are kept apart, 1 if one leaks or differs, else 3 if one is refused (2 is a usage error)."""
    arguments = _parser().parse_args(argv)
    # Before transformers is imported: importing this package has made the hooks wait for it.
    hooks.remove_hooks()
    if arguments.hooks or arguments.attn == OURS:
        hooks.install_hooks()
    model = _load_model(arguments)
    samples = _samples(arguments, model)
    verdicts = []
    for setting in arguments.settings:
        report = leak_report(model, _pack(samples, setting, arguments))
        print(report, end="\n\n", flush=True)
        verdicts.append(report.verdict)
        if arguments.save and report.layers:
            path = Path(arguments.save)
            several = len(arguments.settings) > 1
            report.save(path.with_name(f"{path.stem}-{setting}{path.suffix}") if several else path)
    if {LEAKS, DIFFERS} & set(verdicts):
        return 1
    return 3 if REFUSED in verdicts else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leak_report", description="Does a packed batch leak between samples in a saved model, where, and why?"
    )
    parser.add_argument("model", help="folder or name of a saved model, as for from_pretrained")
    parser.add_argument(
        "--attn", metavar="NAME", help=f"attn_implementation; {OURS!r} is this build with its hooks (default: stock)"
    )
    parser.add_argument("--hooks", action="store_true", help="install this build's hooks under any attention")
    parser.add_argument("--device", default="cpu", help="where the model runs (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=[33, 64, 7, 1, 20],
        help="lengths of samples of random tokens (default: 33,64,7,1,20)",
    )
    parser.add_argument("--text", metavar="FILE", help="samples instead: the lines of a text file")
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer for --text (default: the model's)")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="what the collator returns, each with those before it (default: all three)",
    )
    parser.add_argument("--position-ids-start", type=int, default=0, metavar="N", help="the collator's option")
    parser.add_argument("--save", metavar="PICTURE", help="draw the report; several settings get a file each")
    return parser


def _lengths(text: str) -> List[int]:
    lengths = [int(part) for part in text.split(",")]
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"lengths must be 1 or more, got {text}")
    return lengths


def _load_model(arguments: argparse.Namespace) -> Any:
    import transformers

    chosen: Dict[str, Any] = {}
    name = _publish_this_build() if arguments.attn == OURS else arguments.attn
    if name:
        chosen["attn_implementation"] = name
    if name and "/" in name:
        chosen["allow_all_kernels"] = True
    config = transformers.AutoConfig.from_pretrained(arguments.model)
    architecture = (config.architectures or ["AutoModelForCausalLM"])[0]
    auto = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    return auto.from_pretrained(arguments.model, **chosen).to(arguments.device)


def _publish_this_build() -> str:
    """A repository name under which kernels finds this build's variants."""
    variant = Path(__file__).resolve().parent.parent
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    name = f"local/{metadata['name']}"
    known = os.environ.get("LOCAL_KERNELS")
    os.environ["LOCAL_KERNELS"] = f"{name}={variant.parent}" + (f":{known}" if known else "")
    return name


def _samples(arguments: argparse.Namespace, model: Any) -> List[Dict[str, List[int]]]:
    if arguments.text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model)
        lines = Path(arguments.text).read_text(encoding="utf-8").splitlines()
        return [{"input_ids": tokenizer(line)["input_ids"]} for line in lines if line.strip()]
    config = internals.text_config(model)
    special = {getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    known = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(len(known), (length,), generator=generator) for length in arguments.lengths]
    return [{"input_ids": known[draw].tolist()} for draw in draws]


def _pack(samples: List[Dict[str, List[int]]], setting: str, arguments: argparse.Namespace) -> Dict[str, Any]:
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening(position_ids_start=arguments.position_ids_start, **SETTINGS[setting])
    batch = collator(samples, return_tensors="pt")
    return {name: _moved(value, arguments.device) for name, value in batch.items()}


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
