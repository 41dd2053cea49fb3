"""Runs the matrix of models and prints the table in docs/models.md: python -m tests.models.models_table [--write]

Every row is run here, now, on tiny models in float32, as ``test_hooks.py`` runs it. *Packed* is "equal" when logits and
the gradient of every parameter equal stock transformers' on the samples alone: in training without checkpointing, with
non-reentrant and with reentrant checkpointing, and (logits) in evaluation, each for a pack told by position_ids, by
cu_seq_lens as well, and by seq_idx as well. *generate()* is "equal" when greedy tokens and their logits equal stock
eager's, for one prompt and for a left-padded batch. A difference is printed and makes the exit status 1.

``--write`` puts the table into ``tests/data/models_table.md`` and, around it, writes ``docs/models.md`` again.
"""

import importlib
import json
import sys

import torch

from tests.conftest import load_kernel  # sets the environment before transformers is imported
from tests.models import loading_sweep
from tests.models.tiny_models import (
    CONFIG_MAPPING,
    EAGER_ONLY,
    ENCODERS,
    MODELS,
    REFUSED,
    alone,
    build,
    check_generation,
    check_packed_equals_alone,
    config,
    load,
    run,
)

HEADER = """\
| model type | layers | packed | generate() |
| --- | --- | --- | --- |"""


def layer_kinds(model, kernel):
    """What mixes the tokens of ``model``, as a leak report names it."""
    layers = importlib.import_module(f"{kernel.__name__}.leak_report.layers")
    mixers = [mixer for layer in layers.find_layers(model) for mixer in layer.mixers]
    return ", ".join(dict.fromkeys(mixer.kind for mixer in mixers))


def outcome(check, *arguments):
    """ "equal", or what differs; with the check's result."""
    try:
        return "equal", check(*arguments)
    except AssertionError as error:
        return f"**{error}**", None


def cells(model_type, kernel):
    """A row of the table without the model's name."""
    try:
        config(model_type)
    except Exception as error:  # another release of transformers may want another configuration
        return [f"not built: {type(error).__name__}", "–", "–"]
    if model_type not in MODELS:
        try:
            load(model_type)
        except ValueError as error:
            reason = str(error).partition(": ")[2].partition(". Load it")[0]
            if model_type not in EAGER_ONLY:
                return [f"refused: {reason}", "–", "–"]
            packed, _ = outcome(check_packed_equals_alone, model_type, reference(model_type), "eager")
            return [f"refused: {reason}", f'{packed}, with attn_implementation="eager"', "–"]
        return ["**loads, and should be refused**", "–", "–"]
    packed, model = outcome(check_packed_equals_alone, model_type, reference(model_type))
    generated = "–" if model_type in ENCODERS else outcome(check_generation, model_type)[0]
    return [layer_kinds(model or load(model_type), kernel), packed, generated]


def reference(model_type):
    return run(build(model_type, "eager").train(), alone())


def main():
    torch.set_num_threads(1)
    kernel = load_kernel()
    rows = []
    # Older releases of transformers lack some types.
    for model_type in filter(CONFIG_MAPPING.__contains__, sorted(MODELS) + sorted({**REFUSED, **EAGER_ONLY})):
        rows.append(f"| {model_type} | {' | '.join(cells(model_type, kernel))} |")
    print(HEADER, *rows, sep="\n")
    if "--write" in sys.argv[1:]:
        loading_sweep.TABLE.write_text("\n".join([HEADER, *rows]) + "\n")
        known = json.loads(loading_sweep.RESULTS.read_text())
        loading_sweep.PAGE.write_text(loading_sweep.render(known["types"], known["transformers"]))
    sys.exit(any("**" in row for row in rows))


if __name__ == "__main__":
    main()
