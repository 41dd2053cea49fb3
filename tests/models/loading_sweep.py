"""Loads every text model type of transformers by our name and packs it: python -m tests.models.loading_sweep [TYPE ...]

Each type is built in a few thousand parameters (``tests/models/shrink.py``), run sample by sample under transformers'
own eager attention, then loaded by the one string and run unpacked, padded and packed, told by each of the collator's
settings. Without types it tries all and writes the results: ``tests/data/loading_sweep.json`` and, for readers,
``docs/models.md``.

Outcomes of a type:

- *equal*: it loads, and its outputs packed equal those of each sample alone;
- *refused packed*, *refused at loading*: an error of ours, which names the model and the way out, before computing;
- *not built*: transformers itself cannot build or run it here, and why;
- *fault*: anything else. The exit status is then 1.
"""

import argparse
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import torch

from tests.conftest import ROOT, load_kernel  # sets the environment before transformers is imported
from tests.models.shrink import tiny_config
from tests.models.tiny_models import LOGIT_TOLERANCE, NAME, SETTINGS, alone, pack, redraw

import transformers  # isort: skip
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

RESULTS = ROOT / "tests" / "data" / "loading_sweep.json"
PAGE = ROOT / "docs" / "models.md"
# What tests/models/models_table.py printed; the page shows it above what is found here.
TABLE = ROOT / "tests" / "data" / "models_table.md"

EQUAL, REFUSED_PACKED, REFUSED, NOT_BUILT, FAULT = OUTCOMES = (
    "equal",
    "refused packed",
    "refused at loading",
    "not built",
    "fault",
)
# Packed by what some callers tell and the collator never does: offsets, and no position_ids.
OFFSETS_ALONE = "cu_seq_lens alone"
# More parameters than any shrunk model has; beyond, a size has been missed.
MOST_PARAMETERS = 3_000_000
SECONDS_A_TYPE = 60


class Kind(NamedTuple):
    """How a type is built: the name of transformers' automatic class, and what its forward needs beside input_ids."""

    auto: str
    mapping: str
    decoder_too: bool = False


# In the order in which they are tried for a type. Decoder-only classes of BART and its kin come before their encoders.
KINDS = {
    "masked": Kind("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal": Kind("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image-text": Kind("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "seq2seq": Kind("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", decoder_too=True),
    "text": Kind("AutoModel", "MODEL_MAPPING_NAMES"),
}
# Types that have a masked head and are encoder-decoders, whose causal form is their decoder alone.
_DECODERS = ("bart", "mbart", "mvp")


def kind_of(model_type: str) -> Optional[str]:
    for name, kind in KINDS.items():
        if model_type in getattr(modeling_auto, kind.mapping) and not (name == "masked" and model_type in _DECODERS):
            return name
    return None


def _reads_text(model_type: str) -> bool:
    """Whether the first input is token ids and there is a vocabulary, which image and sound towers lack."""
    kind = KINDS[kind_of(model_type)]
    try:
        model_class = getattr(transformers, getattr(modeling_auto, kind.mapping)[model_type])
        return model_class.main_input_name == "input_ids" and hasattr(
            CONFIG_MAPPING[model_type]().get_text_config(), "vocab_size"
        )
    except Exception:
        return False


def model_types() -> List[str]:
    """Every type with a language model, an encoder of text or a text path."""
    sure = {name for kind in ("masked", "causal") for name in getattr(modeling_auto, KINDS[kind].mapping)}
    others = {name for kind in KINDS.values() for name in getattr(modeling_auto, kind.mapping)} - sure
    return sorted(sure | {name for name in others if name in CONFIG_MAPPING and _reads_text(name)})


def build(model_type: str, attention: str) -> torch.nn.Module:
    """A tiny model in evaluation mode; the same parameters for each ``attention``."""
    auto = getattr(transformers, KINDS[kind_of(model_type)].auto)
    with torch.device("meta"):
        model = auto.from_config(tiny_config(model_type), attn_implementation="eager")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise RuntimeError(f"{count} parameters: some size is not shrunk")
    torch.manual_seed(0)
    model = auto.from_config(tiny_config(model_type), attn_implementation=attention)
    return redraw(model).eval()


def outputs(model: torch.nn.Module, model_type: str, batch: Dict[str, Any], rows: bool = False) -> torch.Tensor:
    """Logits or hidden states: ``[T, ...]`` of the first row, or ``[B, T, ...]`` of all ``rows``."""
    extra = {"decoder_input_ids": batch["input_ids"]} if KINDS[kind_of(model_type)].decoder_too else {}
    with torch.no_grad():
        result = model(**batch, **extra)
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if getattr(result, name, None) is not None:
            return getattr(result, name) if rows else getattr(result, name)[0]
    return result[0] if rows else result[0][0]


def _brief(error: BaseException) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 160 else text[:157] + "..."


def is_ours(error: BaseException, kernel: Any) -> bool:
    """Whether this package raised ``error`` on purpose: of a kind that callers expect, from one of our frames."""
    if not isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return False
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").startswith(kernel.__name__)


def compare(run: Callable[[], torch.Tensor], expected: torch.Tensor, kernel: Any) -> str:
    """ "equal", "refused: ...", "differs by ..." or "error: ..."."""
    try:
        got = run()
    except Exception as error:
        return f"refused: {error}" if is_ours(error, kernel) else f"error: {_brief(error)}"
    if got.shape != expected.shape:
        return f"differs in shape: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    difference = (got - expected).abs().max().item()
    if difference <= LOGIT_TOLERANCE * max(1.0, expected.abs().max().item()):
        return EQUAL
    return f"differs by {difference:.1e}"


def _packed(setting: str, first_position: int) -> Dict[str, Any]:
    if setting == OFFSETS_ALONE:
        batch = pack(setting="cu_seq_lens")
        del batch["position_ids"]
        return batch
    batch = pack(setting=setting)
    batch["position_ids"] = batch["position_ids"] + first_position
    return batch


def _padded() -> Dict[str, torch.Tensor]:
    """Two samples in rows of one length, padding behind the shorter one."""
    rows = [one["input_ids"][0] for one in alone()[:2]]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }


def padded_outputs(model: torch.nn.Module, model_type: str) -> torch.Tensor:
    """Outputs ``[tokens, ...]`` of the tokens that are no padding."""
    batch = _padded()
    return outputs(model, model_type, batch, rows=True)[batch["attention_mask"].bool()]


def judge(model_type: str, kernel: Any) -> Dict[str, Any]:
    """One row of the results."""
    internals = sys.modules[f"{kernel.__name__}.hooks.internals"]
    row: Dict[str, Any] = {"model_type": model_type, "kind": kind_of(model_type)}
    try:
        stock = build(model_type, "eager")
        row["class"] = type(stock).__name__
        samples = [outputs(stock, model_type, batch) for batch in alone()]
        if any(torch.isnan(sample).any() for sample in samples):
            raise RuntimeError("the outputs of a sample alone are not numbers")
    except Exception as error:
        return {**row, "outcome": NOT_BUILT, "reason": _brief(error)}
    try:
        with allow_all_hub_kernels():
            model = build(model_type, NAME)
    except Exception as error:
        outcome = REFUSED if is_ours(error, kernel) else FAULT
        return {**row, "outcome": outcome, "reason": str(error) if outcome == REFUSED else _brief(error)}
    expected = torch.cat(samples)
    row["alone"] = compare(lambda: torch.cat([outputs(model, model_type, one) for one in alone()]), expected, kernel)
    try:
        padded = padded_outputs(stock, model_type)
    except Exception:
        row["padded"] = "transformers alone cannot"
    else:
        row["padded"] = compare(lambda: padded_outputs(model, model_type), padded, kernel)
    start = internals.first_position(model)
    row["packed"] = {
        setting: compare(lambda: outputs(model, model_type, _packed(setting, start)), expected, kernel)  # noqa: B023
        for setting in (*SETTINGS, OFFSETS_ALONE)
    }
    return {**row, **_summary(row)}


def _summary(row: Dict[str, Any]) -> Dict[str, str]:
    answers = [row["alone"], *row["packed"].values()]
    wrong = [answer for answer in answers if answer != EQUAL and not answer.startswith("refused: ")]
    if row["padded"] not in (EQUAL, "transformers alone cannot"):
        wrong.append(f"a padded batch: {row['padded']}")
    if wrong or row["alone"] != EQUAL:
        return {"outcome": FAULT, "reason": (wrong or answers)[0]}
    refused = [answer.partition(": ")[2] for answer in answers if answer != EQUAL]
    return {"outcome": REFUSED_PACKED, "reason": refused[0]} if refused else {"outcome": EQUAL}


def _out_of_time(*_: Any) -> None:
    raise TimeoutError(f"it takes more than {SECONDS_A_TYPE} s")


def sweep(types: List[str], kernel: Any) -> Iterator[Dict[str, Any]]:
    signal.signal(signal.SIGALRM, _out_of_time)
    for model_type in types:
        signal.alarm(SECONDS_A_TYPE)
        try:
            yield judge(model_type, kernel)
        finally:
            signal.alarm(0)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all of them if none")
    parser.add_argument("--write", action="store_true", help="write the rows of these types into the files too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kernel = load_kernel()
    types = options.types or model_types()
    rows = []
    for number, row in enumerate(sweep(types, kernel), start=1):
        rows.append(row)
        print(
            f"{number:3d}/{len(types)} {row['model_type']:28s} {row['outcome']:18s} {row.get('reason', '')[:70]}",
            flush=True,
        )
    for outcome in OUTCOMES:
        print(f"{outcome:18s} {sum(row['outcome'] == outcome for row in rows)}")
    if options.write or not options.types:
        write(rows if not options.types else merged(rows))
    return int(any(row["outcome"] == FAULT for row in rows))


def merged(rows: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The rows of the results with these in place of their types' own."""
    known = {row["model_type"]: row for row in json.loads(RESULTS.read_text())["types"]}
    known.update((row["model_type"], row) for row in rows)
    return [known[name] for name in sorted(known)]


def write(rows: List[Dict[str, Any]], results: Path = RESULTS, page: Path = PAGE) -> None:
    for path in (results, page):
        path.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps({"transformers": transformers.__version__, "types": rows}, indent=1) + "\n")
    page.write_text(render(rows, transformers.__version__))


TRAINED = """\
What `python -m tests.models.models_table` printed: tiny random models in float32, packed against each sample alone
through transformers' own eager path. "packed" covers logits in eval, and logits and every gradient in training with
activation checkpointing off, non-reentrant and reentrant, each with position_ids alone, with cu_seq_lens and with
seq_idx.
`generate()` compares greedy tokens and logits with eager, one prompt and a left-padded batch.

{table}
`python -m tests.models.ropes_table` does the same for causal types with each kind of rotary table.

Wrappers trained on text packs: qwen3_5 and qwen3_5_moe (also with 3 and 4 rows of positions), lfm2_vl, nemotron_h_omni.
Refused means a ValueError at loading that names the model, the reason and the way out."""

SECTIONS = {
    EQUAL: "Packed outputs equal those of each sample alone: told by `position_ids`, by `cu_seq_lens` with and "
    "without them, and by `seq_idx`. An unpacked row and a padded batch equal transformers' own eager attention.",
    REFUSED_PACKED: "These load, and run unpacked and padded as with transformers alone. A packed call is an error "
    "that names the model.",
    REFUSED: 'Loading by `attn_implementation="org/packfree-kernels"` is a ValueError that names the model, this '
    'reason and the way out, `attn_implementation="eager"`.',
    NOT_BUILT: "transformers itself does not build or run these here: a library is missing, the model wants more than "
    "text, or no small configuration was found.",
    FAULT: "To be mended.",
}


def render(rows: List[Dict[str, Any]], version: str) -> str:
    """The page of docs/ for readers: what is found here, and the table of models that are run more thoroughly."""
    groups = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in OUTCOMES}
    lines = [
        "# Model types",
        "",
        f"What `python -m tests.models.loading_sweep` found for the {len(rows)} text, encoder and image-text model "
        f"types of transformers {version}, as tiny random models in float32. A few of them were trained and generated "
        "with, too: [Trained and generated](#trained-and-generated).",
        "",
        "| outcome | types |",
        "| --- | --- |",
        *(
            f"| [{outcome}](#{outcome.replace(' ', '-')}) | {len(group)} |"
            for outcome, group in groups.items()
            if group
        ),
        "",
        "## Trained and generated",
        "",
        TRAINED.format(table=TABLE.read_text()),
    ]
    for outcome, group in groups.items():
        if group:
            lines += ["", f"## {outcome.capitalize()}", "", SECTIONS[outcome], "", *_listed(outcome, group)]
    return "\n".join(lines) + "\n"


def _listed(outcome: str, rows: List[Dict[str, Any]]) -> List[str]:
    key = "kind" if outcome == EQUAL else "reason"
    by_key: Dict[str, List[str]] = {}
    for row in rows:
        by_key.setdefault(short(row[key], row), []).append(row["model_type"])
    title = "built as" if outcome == EQUAL else "reason"
    ranked = sorted(by_key.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"| {title} | types |", "| --- | --- |", *(f"| {key} | {', '.join(types)} |" for key, types in ranked)]


def short(text: str, row: Dict[str, Any]) -> str:
    """A reason without the model's name, the way out and what would break a table."""
    text = re.sub(rf"^{row.get('class', '')}\b[^:]*: ", "", text) if row["outcome"] != NOT_BUILT else text
    return text.partition(". Load it")[0].partition(". Use padded")[0].replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
