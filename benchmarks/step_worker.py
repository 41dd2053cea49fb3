"""Takes training steps for steps.py: requests come as lines of JSON, and so do the answers.

    python step_worker.py                  stock transformers
    python step_worker.py KERNEL           with the attention, and so the hooks, of this Hub kernel

``{"do": "model", "family": ..., "dtype": ..., "lengths": [...]}`` makes a model and its samples;
``{"do": "step", "way": "packed" | "padded" | "alone"}`` takes one forward and backward: seconds, loss and norm of the
gradients, the loss being the mean over all tokens but each sample's first; ``{"do": "profile", "way": ...}`` tells what
a step's time goes to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from case import DTYPES
from models import VOCABULARY, make_model
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

SAMPLES_SEED = 1
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
OURS = "packfree"


class Steps:
    """A model, its samples, and the three ways to train on them."""

    def __init__(self, kernel: str | None, family: str, dtype: str, lengths: list[int]) -> None:
        self.model = make_model(family, DTYPES[dtype], kernel)
        generator = torch.Generator().manual_seed(SAMPLES_SEED)
        self.samples = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
        self.counted = sum(length - 1 for length in lengths)

    def batches(self, way: str) -> Iterator[dict[str, Tensor]]:
        """What the model is called with, one call after the other."""
        if way == "packed":
            from transformers import DataCollatorWithFlattening

            collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
            yield collator([{"input_ids": sample.tolist()} for sample in self.samples], return_tensors="pt")
        elif way == "padded":
            pad = torch.nn.utils.rnn.pad_sequence
            ones = [torch.ones_like(sample) for sample in self.samples]
            labels = pad(self.samples, batch_first=True, padding_value=-100)
            yield {
                "input_ids": pad(self.samples, batch_first=True),
                "attention_mask": pad(ones, batch_first=True),
                "labels": labels,
            }
        else:
            yield from ({"input_ids": sample[None], "labels": sample[None]} for sample in self.samples)

    def step(self, way: str, batches: list[dict[str, Tensor]]) -> float:
        """Forward and backward of everything; returns the loss."""
        total = 0.0
        for batch in batches:
            # Not the model's own loss: not every family takes the number of tokens to divide by.
            labels = batch["labels"]
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = self.model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction="sum") / self.counted
            loss.backward()
            total += float(loss.detach())
        return total

    def timed(self, way: str) -> dict[str, float]:
        batches = list(self.batches(way))
        self.model.zero_grad()
        started = time.perf_counter()
        loss = self.step(way, batches)
        seconds = time.perf_counter() - started
        norms = [parameter.grad.float().norm() for parameter in self.model.parameters() if parameter.grad is not None]
        return {"seconds": seconds, "loss": loss, "gradient": float(torch.stack(norms).norm())}

    def profile(self, way: str) -> dict[str, float]:
        """Shares of a step's time: our operators, torch's matrix products, its other operators, and Python.

        What is in no operator counts as Python, the hooks among it; watching makes it longer, so it is at most that.
        """
        batches = list(self.batches(way))
        self.model.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            started = time.perf_counter()
            self.step(way, batches)
            seconds = time.perf_counter() - started
        inside = {"ours": 0.0, "products": 0.0, "other": 0.0}
        for event in profiler.key_averages():
            if "::" not in event.key:
                continue  # autograd's nodes: what they call is counted
            kind = "ours" if OURS in event.key else "products" if event.key in PRODUCTS else "other"
            inside[kind] += 1e-6 * event.self_cpu_time_total
        shares = {kind: value / seconds for kind, value in inside.items()}
        return {**shares, "python": max(0.0, 1 - sum(shares.values()))}


def main() -> None:
    kernel = sys.argv[1] if len(sys.argv) > 1 else None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever a library prints is no answer.
    logging.disable(logging.WARNING)
    disable_progress_bar()
    steps = None
    for text in sys.stdin:
        request = json.loads(text)
        do = request.pop("do")
        if do == "model":
            steps = None
            steps = Steps(kernel, **request)
            answer: dict[str, object] = {}
        elif do == "about":
            answer = {"threads": torch.get_num_threads(), "torch": torch.__version__, "tier": None}
            with contextlib.suppress(ImportError):
                from kernels import get_kernel

                answer["tier"] = get_kernel(kernel, version=1).cpu_tier() if kernel else None
        else:
            answer = steps.timed(**request) if do == "step" else steps.profile(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
