"""Measure calls that hold no pack, with this package's hooks and with transformers alone, on this machine.

    python benchmarks/plain_calls.py                                 every model and call, some minutes
    python benchmarks/plain_calls.py --quick                         short rows, three rounds
    python benchmarks/plain_calls.py --models mamba --calls decode   some of them (several names may be given)

Models are those of benchmarks/models.py, 4 layers of 512, in float32: with transformers alone, with the hooks and
transformers' attention, and loaded by the one string, with our attention too. The three run in turn in one process on
one thread, whose own time is taken, so that neighbours count less. A call whose logits differ by more than 1e-5 is
reported and not timed, and the exit status is then 1. A complete run writes ``benchmarks/results/plain_calls.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LOCAL_KERNELS"] = f"org/packfree-kernels={Path(__file__).resolve().parents[1] / 'build'}"

import torch
from kernels import get_kernel
from measure import cpu_name
from models import FAMILIES, VOCABULARY, make_model
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
NAME = "org/packfree-kernels"
TOLERANCE = 1e-5
# A call of more than so many seconds gets fewer rounds: a stock function in a loop over tokens takes some.
ROUNDS, SLOW_ROUNDS, SLOW_SECONDS, QUICK_ROUNDS = 7, 3, 1.5, 3
SECONDS_PER_TURN = 0.05
CALLS = ("prefill", "padded prefill", "training step", "padded training step", "decode", "decode of 8 rows")
Call = Callable[[], Tensor]


def padded(rows: int, length: int) -> dict[str, Tensor]:
    """Rows of growing length, padded on the left to ``length``."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : length * row // (2 * rows)] = 0
    return dict(input_ids=torch.randint(1, VOCABULARY, (rows, length)) * mask, attention_mask=mask)


def make_call(model: torch.nn.Module, name: str, length: int) -> Call:
    """What is timed, with arguments of its own; it returns logits."""
    torch.manual_seed(1)
    row = dict(input_ids=torch.randint(1, VOCABULARY, (1, length)))
    if name.startswith("decode"):
        return decoding(model, 8 if "rows" in name else 1, length // 8)
    if name.endswith("training step"):
        row["input_ids"] = row["input_ids"][:, : length // 2]
        batch = padded(4, length // 8) if name.startswith("padded") else row

        def step() -> Tensor:
            model.zero_grad()
            logits = model.train()(**batch, use_cache=False).logits
            logits.square().mean().backward()
            return logits.detach()

        return step
    batch = padded(2, length // 2) if "padded" in name else row

    def prefill() -> Tensor:
        with torch.no_grad():
            # As generate() calls it: logits of the last token alone.
            return model.eval()(**batch, use_cache=True, logits_to_keep=1).logits

    return prefill


def decoding(model: torch.nn.Module, rows: int, length: int) -> Call:
    """One token a row beside the cache of a prompt, which grows with each call."""
    prompt = torch.randint(1, VOCABULARY, (rows, length))
    token = torch.randint(1, VOCABULARY, (rows, 1))
    cache: dict[str, object] = {}

    def step() -> Tensor:
        with torch.no_grad():
            if not cache:
                out = model.eval()(input_ids=prompt, use_cache=True)
                name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
                cache[name] = getattr(out, name)
            return model(input_ids=token, use_cache=True, **cache).logits

    return step


def under(way: str) -> None:
    """Hooks as ``way`` has them: "alone" has none."""
    if way == "alone":
        kernel.remove_hooks()
    else:
        kernel.install_hooks()


def time_calls(calls: dict[str, Call], most_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round of each way, in turns."""
    once = {}
    for way, call in calls.items():
        under(way)
        started = time.thread_time()
        call()
        once[way] = time.thread_time() - started
    slow = max(once.values()) > SLOW_SECONDS
    rounds = min(most_rounds, SLOW_ROUNDS if slow else ROUNDS)
    each = max(1, int(SECONDS_PER_TURN / max(once.values())))
    found: dict[str, list[float]] = {way: [] for way in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for way, call in calls.items():
                under(way)
                started = time.thread_time()
                for _ in range(each):
                    call()
                found[way].append(1e3 * (time.thread_time() - started) / each)
    finally:
        gc.enable()
        under("hooks")
    return found


def measure(family: str, name: str, length: int, most_rounds: int) -> dict[str, object]:
    """A row of the table.

    Raises:
        ValueError: a way's logits are not those of transformers alone.
    """
    alone = make_model(family, torch.float32)
    models = {"alone": alone, "hooks": alone, "string": make_model(family, torch.float32, NAME)}
    calls = {way: make_call(model, name, length) for way, model in models.items()}
    results = {}
    for way, call in calls.items():
        under(way)
        results[way] = call()
    mask = padded(4, length // 8)["attention_mask"].bool() if name == "padded training step" else None
    for way in ("hooks", "string"):
        difference = (results[way] - results["alone"]).abs()
        error = float((difference if mask is None else difference[mask]).max() / results["alone"].abs().max())
        if not error <= TOLERANCE:
            raise ValueError(f"{family}, {name}: logits of {way!r} differ by {error:.1e}; not timed")
    times = time_calls(calls, most_rounds)
    medians = {way: statistics.median(values) for way, values in times.items()}
    row: dict[str, object] = {"model": family, "call": name, "tokens": length, "rounds": len(times["alone"])}
    for way, values in times.items():
        row[f"{way}_ms"], row[f"{way}_least_ms"] = round(medians[way], 3), round(min(values), 3)
    for way in ("hooks", "string"):
        row[f"{way}_ratio"] = round(medians["alone"] / medians[way], 3)
    return row


def line(row: dict[str, object]) -> str:
    """At most 100 columns: medians in ms, and how many times as fast as transformers alone."""
    text = f"{row['model']:<14}{row['call']:<22}{row['alone_ms']:>11.2f}"
    for way in ("hooks", "string"):
        text += f"{row[f'{way}_ms']:>12.2f}{row[f'{way}_ratio']:>7.2f}x"
    return text


HEADING = f"{'':<36}{'alone, ms':>11}{'hooks, ms':>12}{'':>8}{'one string, ms':>20}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="TYPE")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--quick", action="store_true", help="rows of 256 tokens and three rounds")
    parser.add_argument("--out", type=Path, help="file for the JSON list of measurements")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    torch.set_num_threads(1)
    length, most_rounds = (256, QUICK_ROUNDS) if chosen.quick else (2048, ROUNDS)
    complete = not chosen.quick and chosen.models == list(FAMILIES) and chosen.calls == list(CALLS)
    out = chosen.out or (ROOT / "benchmarks" / "results" / "plain_calls.json" if complete else None)
    print(f"{cpu_name()}, one thread, torch {torch.__version__}, rows of {length} tokens, float32")
    print(HEADING)
    rows, wrong = [], []
    work = [(family, name) for family in chosen.models for name in chosen.calls]
    with tqdm(work, unit="call", leave=False, dynamic_ncols=True) as bar:
        for family, name in bar:
            bar.set_description(f"{family} {name}")
            try:
                rows.append(measure(family, name, length, most_rounds))
                bar.write(line(rows[-1]))
            except ValueError as error:
                wrong.append(str(error))
                bar.write(wrong[-1])
    if out is not None and not wrong:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"written to {out}")
    return 1 if wrong else 0


kernel = get_kernel(NAME, version=1)

if __name__ == "__main__":
    sys.exit(main())
