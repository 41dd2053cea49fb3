"""Packs every causal type with each kind of rotary table, prints a table: python -m tests.models.ropes_table [TYPE ...]

A type is built small (``tests/models/shrink.py``) with LongRoPE, dynamic NTK, linear, YaRN, Llama 3 and proportional
tables. Samples on both sides of the original length, packed and told by position_ids, by cu_seq_lens as well and by
seq_idx as well, must give stock transformers' logits of each alone. A cell is "equal", the difference, "refused", or
"–" where transformers itself cannot build or run the type so. A difference makes the exit status 1. All types take
minutes.
"""

import sys

import torch

from tests.conftest import load_kernel  # sets the environment before transformers is imported
from tests.models.shrink import tiny_config
from tests.models.tiny_models import LOGIT_TOLERANCE, NAME, SETTINGS, pack, redraw
from tests.models.tiny_ropes import KINDS, LENGTHS, each_alone, rope_changes

from transformers import AutoModelForCausalLM  # isort: skip
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def build(model_type, kind, attention):
    config = tiny_config(model_type)
    text = config.get_text_config()
    for name, value in rope_changes(text, kind).items():
        setattr(text, name, value)
    torch.manual_seed(0)
    with allow_all_hub_kernels():
        return redraw(AutoModelForCausalLM.from_config(config, attn_implementation=attention)).eval()


def cell(model_type, kind):
    """ "equal", "refused", what is wrong, or "–"; the largest difference of the settings speaks for the type."""
    try:
        expected = each_alone(build(model_type, kind, "eager"))
    except Exception:
        # Whatever transformers raises on its own: not every type takes every kind.
        return "–"
    try:
        model = build(model_type, kind, NAME)
        with torch.no_grad():
            got = [model(**pack(setting=setting, lengths=LENGTHS), use_cache=False).logits[0] for setting in SETTINGS]
    except (ValueError, NotImplementedError):
        return "refused"
    except Exception as error:
        return f"**{type(error).__name__}**"
    worst = max((logits - expected).abs().max().item() for logits in got)
    allowed = LOGIT_TOLERANCE * max(1.0, expected.abs().max().item())
    return "equal" if worst <= allowed else f"**differs by {worst:.1e}**"


def rotates(model_type):
    try:
        return rope_changes(tiny_config(model_type).get_text_config(), "linear") is not None
    except Exception:
        return False


def main():
    torch.set_num_threads(1)
    load_kernel()
    different = False
    print(f"| model type | {' | '.join(KINDS)} |", f"| --- |{' --- |' * len(KINDS)}", sep="\n")
    for model_type in filter(rotates, sys.argv[1:] or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))):
        cells = [cell(model_type, kind) for kind in KINDS]
        different |= any("**" in one for one in cells)
        print(f"| {model_type} | {' | '.join(cells)} |", flush=True)
    sys.exit(different)


if __name__ == "__main__":
    main()
