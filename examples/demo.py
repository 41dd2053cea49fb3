"""Train a small hybrid model on packed batches, loaded by one string from a Hub, next to stock padded training.

Run by ``make demo``; by hand, after ``make build``::

    python examples/demo.py
    python examples/demo.py --steps 100 --dataset texts.jsonl
    python examples/demo.py --model Qwen/Qwen3.5-0.8B --dataset owner/name --batch 4     # needs a network

A Hub runs inside this process, on the loopback interface; the built kernel is published there and loaded from there, so
all steps are those of a real project. Everything written goes to a temporary folder, except a model or data set named
on the command line, which goes to the usual Hugging Face cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from loopback_hub import LoopbackHub  # noqa: E402

DEFAULT_ENDPOINT = "https://huggingface.co"
VOCABULARY = 4096
SEED = 1
# Steps left out of the speed: the first ones allocate memory and warm caches, in both runs alike.
WARM_UP_STEPS = 2

# Variables that would lead away from the demo's own Hub, folder and hooks. The last three make kernels 0.17.2 send a
# header that the HTTP client refuses ("Illegal header value"); here every request stays on this machine anyway.
DROPPED_VARIABLES = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "KERNELS_CACHE",
    "LOCAL_KERNELS",
    "PACKFREE_HOOKS",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HUB_DISABLE_TELEMETRY",
    "DISABLE_TELEMETRY",
    "DO_NOT_TRACK",
)


def main() -> int:
    arguments = parse_arguments()
    users_hub = RemoteHub.of_user()
    with tempfile.TemporaryDirectory(prefix="packfree-demo-") as folder, LoopbackHub(Path(folder) / "server") as hub:
        # huggingface_hub reads these when it is imported, so no module above this line may import it.
        os.environ.update(
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=str(Path(folder) / "home"),
            HF_TOKEN_PATH=str(users_hub.token),
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            # Its warnings here advise installing GPU packages and speak of a cast from fp32 to fp32.
            TRANSFORMERS_VERBOSITY="error",
            TOKENIZERS_PARALLELISM="false",
        )
        for name in DROPPED_VARIABLES:
            os.environ.pop(name, None)
        return run(arguments, Path(folder), hub, users_hub)


@dataclass(frozen=True)
class RemoteHub:
    """The Hub, cache and token file of the user, for a model or data set that the command line names."""

    endpoint: str
    cache: Path
    token: Path

    @staticmethod
    def of_user() -> RemoteHub:
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        return RemoteHub(
            os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT,
            Path(os.environ.get("HF_HUB_CACHE") or home / "hub"),
            Path(os.environ.get("HF_TOKEN_PATH") or home / "token"),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=_at_least(WARM_UP_STEPS + 1), default=20, help="steps of each run (default: %(default)s)")
    add("--batch", type=_at_least(1), default=24, help="samples a step (default: %(default)s)")
    add("--max-length", type=_at_least(2), default=512, help="tokens a sample is cut to (default: %(default)s)")
    add("--learning-rate", type=float, help="default: 2e-3, or 1e-5 with --model")
    add("--model", help="folder or Hub id of a model, in place of a small new one")
    add("--dataset", help="file, folder or Hub id of texts, in place of docstrings")
    add("--text-column", help="column of --dataset that holds the text (default: text)")
    return parser.parse_args()


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def run(arguments: argparse.Namespace, folder: Path, hub: LoopbackHub, users_hub: RemoteHub) -> int:
    """All steps of the demo, with the environment set up; returns the exit status."""
    print("packfree-kernels demo: the same training steps packed and padded\n", flush=True)
    from demo_data import DataError
    from publish import PublishError

    try:
        repo_id = publish_build(hub)
        samples, model_folder = prepare(arguments, folder, users_hub)
    except (DataError, PublishError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return compare(arguments, repo_id, model_folder, folder, samples)


def publish_build(hub: LoopbackHub) -> str:
    """Publish ``build/`` to the Hub of this process; returns the repository."""
    from huggingface_hub import HfApi
    from publish import Project, apply_plan, make_plan

    project = Project.read(ROOT)
    api = HfApi(endpoint=hub.endpoint, token="loopback")
    plan = make_plan(api, project, ROOT / "build", local_too=True)
    apply_plan(api, plan)
    variants = sorted(
        {change.path.split("/")[1] for change in plan.version_changes if change.path.startswith("build/")}
    )
    size = sum(change.size for change in plan.version_changes) / 1e6
    say("Hub", f"{hub.endpoint} (inside this process)")
    say("", f"published {project.repo_id}, branch {project.branch}, {size:.1f} MB:")
    for name in variants:
        say("", f"  {name}")
    return project.repo_id


def prepare(arguments: argparse.Namespace, folder: Path, users_hub: RemoteHub) -> tuple[list[dict], Path]:
    """Texts, tokenizer and model; returns the tokenized samples and the folder the model was saved to."""
    from demo_data import load_texts, standard_library_docstrings, tokenize, train_tokenizer

    if arguments.dataset:
        texts, source = load_texts(arguments.dataset, arguments.text_column, users_hub), arguments.dataset
    else:
        texts, source = standard_library_docstrings(), "docstrings of Python's standard library"
    say("Text", f"{len(texts):,} {source if not arguments.dataset else 'texts of ' + source}")
    model_folder = folder / "model"
    if arguments.model:
        model_folder = fetch_model(arguments.model, users_hub)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_folder)
    else:
        tokenizer = train_tokenizer(texts, VOCABULARY)
        tokenizer.save_pretrained(model_folder)
        build_model(tokenizer).save_pretrained(model_folder)
    samples = tokenize(texts, tokenizer, arguments.steps * arguments.batch, arguments.max_length, SEED)
    lengths = sorted(len(sample["input_ids"]) for sample in samples)
    say("", f"{len(lengths):,} samples of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}")
    return samples, model_folder


def fetch_model(name: str, users_hub: RemoteHub) -> Path:
    """The folder of ``--model``: given as such, or downloaded to the user's cache."""
    from demo_data import fetch

    if Path(name).is_dir():
        return Path(name)
    return fetch("model", name, users_hub, ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])


def build_model(tokenizer):
    """A new hybrid model in Qwen3.5's layout: three gated delta rule layers, then one full attention layer."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(SEED)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3_5ForCausalLM(config)


def compare(
    arguments: argparse.Namespace, repo_id: str, model_folder: Path, folder: Path, samples: list[dict]
) -> int:
    """Train packed with the kernel and padded without it, print the comparison and the ``DEMO`` line."""
    import torch
    from kernels import get_kernel
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        DataCollatorWithFlattening,
    )

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The one string. "dtype" keeps a downloaded bf16 model comparable in fp32.
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, attn_implementation=repo_id, allow_all_kernels=True, dtype=torch.float32
        )
    except (ValueError, OSError) as error:
        print(f"demo: {arguments.model or 'the model'} cannot be loaded with {repo_id}: {error}", file=sys.stderr)
        return 1
    kernel = get_kernel(repo_id, version=1, trust_remote_code=True)
    status = kernel.hooks_status()
    tier, hooks = status.cpu_tier, sorted(status.functions)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say("Model", f"{model.config.model_type}, {layer_summary(model.config)}, {parameters / 1e6:.1f} M parameters")
    say("Kernel", f'attn_implementation="{repo_id}" from that Hub: {status.variant}, tier {tier}')
    for line in textwrap.wrap(f"hooked: {', '.join(hooks)}", 71):
        say("", line)
    print(flush=True)

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    packed = train("packed", model, collator, samples, arguments, folder)
    pack = collator([{"input_ids": sample["input_ids"]} for sample in samples[: arguments.batch]], return_tensors="pt")
    model.eval()
    with torch.no_grad():
        packed_logits = model(**{key: value for key, value in pack.items() if key != "labels"}).logits[0]
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    # From here on everything is stock transformers.
    kernel.remove_hooks()
    stock = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa", dtype=torch.float32)
    padding = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    padded = train("padded", stock, padding, samples, arguments, folder)
    difference, largest = difference_from_alone(model_folder, trained, pack, packed_logits)
    report(status.variant, tier, hooks, packed, padded, difference, largest)
    return 0


def layer_summary(config) -> str:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    names = {kind: kind.removesuffix("_attention").replace("_", " ") for kind in counts}
    return " + ".join(f"{count} {names[kind]}" for kind, count in counts.items()) + " attention layers"


@dataclass
class Run:
    """What one training run gave: loss of each step, real tokens and seconds of each step, share of pads."""

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens[WARM_UP_STEPS:]) / sum(self.seconds[WARM_UP_STEPS:])

    @property
    def pads_per_token(self) -> float:
        return sum(self.slots) / sum(self.tokens) - 1


def train(name: str, model, collator, samples: list[dict], arguments: argparse.Namespace, folder: Path) -> Run:
    """Train ``model`` with ``Trainer`` on ``samples``, in their order, and show a progress bar."""
    from datasets import Dataset
    from tqdm import tqdm
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    result = Run()

    def counting_collator(features: list[dict]) -> dict:
        batch = collator(features, return_tensors="pt")
        result.tokens.append(sum(len(feature["input_ids"]) for feature in features))
        result.slots.append(batch["input_ids"].numel())
        return batch

    class Progress(TrainerCallback):
        """One bar for the run; each step's time includes what the collator took for it."""

        def on_train_begin(self, args, state, control, **kwargs):
            self.bar = tqdm(total=state.max_steps, desc=name, ncols=79, leave=True, file=sys.stdout, unit="step")
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" not in (logs or {}):
                return
            now = time.perf_counter()
            result.losses.append(logs["loss"])
            result.seconds.append(now - self.start)
            self.start = now
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}", refresh=False)
            self.bar.update()

        def on_train_end(self, args, state, control, **kwargs):
            self.bar.close()

    settings = TrainingArguments(
        output_dir=str(folder / name),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.learning_rate or (1e-5 if arguments.model else 2e-3),
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(5, arguments.steps // 4),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=SEED,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=Dataset.from_list(samples),
        data_collator=counting_collator,
        callbacks=[Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return result


def difference_from_alone(model_folder: Path, trained: dict, pack, packed_logits) -> tuple[float, float]:
    """Largest difference between the packed logits and those of each sample alone in stock eager attention.

    Returns the difference and, for scale, the largest logit.
    """
    import torch
    from transformers import AutoModelForCausalLM

    alone = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager", dtype=torch.float32)
    alone.load_state_dict(trained)
    alone.eval()
    offsets = pack["cu_seq_lens_q"].tolist()
    difference = 0.0
    with torch.no_grad():
        for bos, eos in zip(offsets[:-1], offsets[1:]):
            logits = alone(input_ids=pack["input_ids"][:, bos:eos]).logits[0]
            difference = max(difference, float((logits - packed_logits[bos:eos]).abs().max()))
    return difference, float(packed_logits.abs().max())


def report(
    variant: str, tier: str, hooks: list[str], packed: Run, padded: Run, difference: float, largest: float
) -> None:
    """The table and the line of JSON that ends the demo."""
    speedup = packed.tokens_per_second / padded.tokens_per_second
    rows = [
        ("real tokens per second", f"{packed.tokens_per_second:,.0f}", f"{padded.tokens_per_second:,.0f}"),
        ("pads per real token", f"{packed.pads_per_token:.2f}", f"{padded.pads_per_token:.2f}"),
        ("loss of the first step", f"{packed.losses[0]:.4f}", f"{padded.losses[0]:.4f}"),
        ("loss of the last step", f"{packed.losses[-1]:.4f}", f"{padded.losses[-1]:.4f}"),
    ]
    print(f"\n{'':<26}{'packed':>12}{'stock padded':>16}")
    for row in rows:
        print(f"{row[0]:<26}{row[1]:>12}{row[2]:>16}")
    print(f"\npacked is {speedup:.1f} times as fast on the same samples")
    print(f"largest logit difference, packed against each sample alone: {difference:.1e}")
    print(f"(fp32; the largest logit is {largest:.1f})\n")
    print(
        "DEMO "
        + json.dumps(
            {
                "variant": variant,
                "tier": tier,
                "hooks": hooks,
                "loss_first": packed.losses[0],
                "loss_last": packed.losses[-1],
                "tokens_per_second_packed": round(packed.tokens_per_second, 1),
                "tokens_per_second_padded": round(padded.tokens_per_second, 1),
                "speedup": round(speedup, 2),
                "max_logit_difference_packed_vs_alone": difference,
            }
        ),
        flush=True,
    )


def say(label: str, text: str) -> None:
    print(f"{label:<8}{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
