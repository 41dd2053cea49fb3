"""Train a small hybrid model on packed batches, loaded by one string, next to stock padded training.

Run by ``make demo``; by hand, after ``make build``::

    python examples/demo.py
    python examples/demo.py --hub        # publish the build to a Hub inside this process, and load it from there
    python examples/demo.py --steps 100 --dataset texts.jsonl
    python examples/demo.py --model Qwen/Qwen3.5-0.8B --dataset owner/name --batch 4     # needs a network
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from shared import KERNEL, ROOT, SCRATCH, check_kernel

SEED = 1
WARM_UP_STEPS = 2  # left out of the speed: the first steps allocate memory and warm caches, in both runs alike
TOLERANCE = 1e-4  # of the largest logit, in fp32
# Variables that would lead away from the demo's own Hub. The last three make kernels 0.17.2 send a header that the HTTP
# client refuses ("Illegal header value"); with a Hub inside this process every request stays here anyway.
DROPPED_VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KERNELS_CACHE", "LOCAL_KERNELS", "PACKFREE_HOOKS", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    add("--batch", type=int, default=24, help="samples a step (default: %(default)s)")
    add("--max-length", type=int, default=512, help="tokens a sample is cut to (default: %(default)s)")
    add("--learning-rate", type=float, help="default: 2e-3, or 1e-5 with --model")
    add("--model", help="folder or Hub id of a model, in place of a small new one")
    add("--dataset", help="file, folder or Hub id of texts, in place of docstrings")
    add("--text-column", help="column of --dataset that holds the text (default: text)")
    add("--hub", action="store_true", help="publish build/ to a Hub inside this process, and load it from there")
    add("--from-hub", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for option, least in (("steps", WARM_UP_STEPS + 1), ("batch", 1), ("max_length", 2)):
        if getattr(given, option) < least:
            parser.error(f"--{option.replace('_', '-')} must be at least {least}, got {getattr(given, option)}")
    if given.hub:
        return through_a_hub(given)
    if given.from_hub:
        os.environ.pop("LOCAL_KERNELS", None)
    else:
        check_kernel(parser, KERNEL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print("packfree-kernels demo: the same training steps packed and padded\n", flush=True)
    return compare(given, *prepare(given))


def through_a_hub(given: argparse.Namespace) -> int:
    """Publish build/ to a Hub of this process, and run the demo in a process that knows no other place of kernels."""
    from huggingface_hub import snapshot_download

    sys.path.insert(0, str(ROOT))
    from tests.harness.loopback_hub import LoopbackHub

    options = []
    for name, value in vars(given).items():
        # What lies on the user's Hub is fetched before its address changes.
        if name in ("model", "dataset") and value and not Path(value).exists():
            value = snapshot_download(value, repo_type=name)
        if value is not None and name != "hub":
            options += [f"--{name.replace('_', '-')}", str(value)]
    with LoopbackHub(Path(SCRATCH.name) / "server") as hub:
        settings = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        settings.update(HF_ENDPOINT=hub.endpoint, HF_HOME=os.path.join(SCRATCH.name, "home"), HF_TOKEN="loopback")
        print(f"A Hub inside this process: {hub.endpoint}", flush=True)
        publish = [sys.executable, str(ROOT / "tools" / "publish.py"), "--local-too", "--yes"]
        done = subprocess.run(publish, env=settings)
        demo = [sys.executable, __file__, *options, "--from-hub", hub.endpoint]
        return done.returncode or subprocess.run(demo, env=settings).returncode


def prepare(given: argparse.Namespace) -> tuple[str, list[dict]]:
    """Texts, tokenizer and model; returns the folder or name of the model and the tokenized samples."""
    from demo_data import build_model, load_texts, standard_library_docstrings, tokenize, train_tokenizer
    from transformers import AutoTokenizer

    if given.dataset:
        texts, source = load_texts(given.dataset, given.text_column), f"texts of {given.dataset}"
    else:
        texts, source = standard_library_docstrings(), "docstrings of Python's standard library"
    say("Text", f"{len(texts):,} {source}")
    model = given.model
    if model:
        tokenizer = AutoTokenizer.from_pretrained(model)
    else:
        model = os.path.join(SCRATCH.name, "model")
        tokenizer = train_tokenizer(texts, vocabulary=4096)
        tokenizer.save_pretrained(model)
        build_model(tokenizer, SEED).save_pretrained(model)
    samples = tokenize(texts, tokenizer, given.steps * given.batch, given.max_length, SEED)
    lengths = sorted(len(sample["input_ids"]) for sample in samples)
    say("", f"{len(lengths):,} samples of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}")
    return model, samples


def compare(given: argparse.Namespace, path: str, samples: list[dict]) -> int:
    """Train packed with the kernel and padded without it, and compare; returns 1 where packed is not alone."""
    import torch
    from kernels import get_kernel
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        DataCollatorWithFlattening,
    )

    # The one string. "dtype" keeps a downloaded bf16 model comparable in fp32.
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=KERNEL, allow_all_kernels=True, dtype=torch.float32
    )
    kernel = get_kernel(KERNEL, version=1, trust_remote_code=True)
    status = kernel.hooks_status()
    describe(model, status, given.from_hub or os.environ["LOCAL_KERNELS"].partition("=")[2])

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    packed = Run("packed", model, collator, samples, given)
    pack = collator(samples[: given.batch], return_tensors="pt")
    model.eval()
    with torch.no_grad():
        packed_logits = model(**{key: value for key, value in pack.items() if key != "labels"}).logits[0]
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    # From here on everything is stock transformers.
    kernel.remove_hooks()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    padded = Run("padded", stock, DataCollatorForLanguageModeling(tokenizer, mlm=False), samples, given)

    alone = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    alone.load_state_dict(trained)
    alone.eval()
    difference = 0.0
    for logits, sample in zip(packed_logits.split(pack["cu_seq_lens_q"].diff().tolist()), samples):
        with torch.no_grad():
            expected = alone(input_ids=torch.tensor([sample["input_ids"]])).logits[0]
        difference = max(difference, float((logits - expected).abs().max()))
    return report(status, packed, padded, difference, float(packed_logits.abs().max()))


def describe(model, status, place: str) -> None:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    names = {kind: kind.removesuffix("_attention").replace("_", " ") for kind in kinds}
    layers = " + ".join(f"{kinds.count(kind)} {name}" for kind, name in names.items())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say("Model", f"{model.config.model_type}, {layers} attention layers, {parameters / 1e6:.1f} M parameters")
    say("Kernel", f'attn_implementation="{KERNEL}" from {place}:')
    say("", f"{status.variant}, tier {status.cpu_tier}")
    for line in textwrap.wrap(f"hooked: {', '.join(sorted(status.functions))}", 71):
        say("", line)
    print(flush=True)


class Run:
    """One training run with Trainer: loss and seconds of each step, its real tokens, and the slots of its batches."""

    def __init__(self, name: str, model, collator, samples: list[dict], given: argparse.Namespace):
        from transformers import PrinterCallback, Trainer, TrainingArguments

        self.losses, self.seconds, self.tokens, self.slots = [], [], [], []
        settings = TrainingArguments(
            output_dir=os.path.join(SCRATCH.name, name), max_steps=given.steps, per_device_train_batch_size=given.batch,
            learning_rate=given.learning_rate or (1e-5 if given.model else 2e-3), warmup_steps=min(5, given.steps // 4),
            lr_scheduler_type="constant_with_warmup", logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, seed=SEED, disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip

        def counting_collator(features: list[dict]) -> dict:
            batch = collator(features, return_tensors="pt")
            self.tokens.append(sum(len(feature["input_ids"]) for feature in features))
            self.slots.append(batch["input_ids"].numel())
            return batch

        trainer = Trainer(model, settings, train_dataset=samples, data_collator=counting_collator)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(progress(self, name))
        trainer.train()

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens[WARM_UP_STEPS:]) / sum(self.seconds[WARM_UP_STEPS:])

    @property
    def pads_per_token(self) -> float:
        return sum(self.slots) / sum(self.tokens) - 1


def progress(run: Run, name: str):
    """A callback with one bar for the run; each step's time includes what the collator took for it."""
    from tqdm import tqdm
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.bar = tqdm(total=state.max_steps, desc=name, ncols=79, file=sys.stdout, unit="step")
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                now = time.perf_counter()
                run.losses.append(logs["loss"])
                run.seconds.append(now - self.start)
                self.start = now
                self.bar.set_postfix_str(f"loss {logs['loss']:.3f}", refresh=False)
                self.bar.update()

        def on_train_end(self, args, state, control, **kwargs):
            self.bar.close()

    return Progress()


def report(status, packed: Run, padded: Run, difference: float, largest: float) -> int:
    """The table and the line of JSON that ends the demo, and its exit status."""
    speedup = packed.tokens_per_second / padded.tokens_per_second
    print(f"\n{'':<26}{'packed':>12}{'stock padded':>16}")
    for label, value in (
        ("real tokens per second", lambda run: f"{run.tokens_per_second:,.0f}"),
        ("pads per real token", lambda run: f"{run.pads_per_token:.2f}"),
        ("loss of the first step", lambda run: f"{run.losses[0]:.4f}"),
        ("loss of the last step", lambda run: f"{run.losses[-1]:.4f}"),
    ):
        print(f"{label:<26}{value(packed):>12}{value(padded):>16}")
    print(f"\npacked is {speedup:.1f} times as fast on the same samples")
    print(f"largest logit difference, packed against each sample alone: {difference:.1e}")
    print(f"(fp32; the largest logit is {largest:.1f})\n")
    summary = {
        "variant": status.variant,
        "tier": status.cpu_tier,
        "hooks": sorted(status.functions),
        "loss_first": packed.losses[0],
        "loss_last": packed.losses[-1],
        "tokens_per_second_packed": round(packed.tokens_per_second, 1),
        "tokens_per_second_padded": round(padded.tokens_per_second, 1),
        "speedup": round(speedup, 2),
        "max_logit_difference_packed_vs_alone": difference,
    }
    print("DEMO " + json.dumps(summary), flush=True)
    if difference > TOLERANCE * largest:
        print("demo: packed logits are not those of the samples alone", file=sys.stderr)
        return 1
    return 0


def say(label: str, text: str) -> None:
    print(f"{label:<8}{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
