"""Every model type loads by our name and packs right, or is refused by name: a part of loading_sweep.py."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import allow_all_hub_kernels

from tests.conftest import ROOT
from tests.models import loading_sweep
from tests.models.loading_sweep import EQUAL, FAULT, NOT_BUILT, REFUSED, REFUSED_PACKED, build, judge, outputs, sweep
from tests.models.shrink import tiny_config
from tests.models.tiny_models import MODELS, NAME, alone, assert_logits_equal, pack

RECORDED = {row["model_type"]: row for row in json.loads(loading_sweep.RESULTS.read_text())["types"]}

# Each stands for a kind: how positions get there, windows, latent and merged projections, experts, layers of several
# kinds, parts of a whole, decoders without positions, attention in classes of a modeling file's own, and what mixes.
SAMPLE = [
    "afmoe", "albert", "bart", "bloom", "cohere2", "cosmos3_edge", "dbrx", "deepseek_v2", "diffllama",
    "encoder-decoder", "esm", "falcon", "fnet", "gemma3", "gemma3n_text", "glm4v_moe", "gpt_neo", "gptj", "hunyuan_vl",
    "kosmos-2.5",
    "llama4_text", "minicpm3", "mobilebert", "mpt", "neomme", "opt", "perceiver", "phimoe", "qwen2_vl", "roberta", "t5",
    "t5gemma", "whisper", "xglm",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_what_the_table_says(model_type, kernel):
    (row,) = sweep([model_type], kernel)
    assert row == RECORDED[model_type]
    assert row["outcome"] in (EQUAL, REFUSED, REFUSED_PACKED)


def test_the_table_holds_no_fault_and_most_types():
    outcomes = [row["outcome"] for row in RECORDED.values()]
    assert FAULT not in outcomes
    assert len(outcomes) - outcomes.count(NOT_BUILT) >= 150
    assert outcomes.count(EQUAL) >= 200
    assert {row["outcome"] for name, row in RECORDED.items() if name in MODELS} == {EQUAL}
    assert loading_sweep.PAGE.read_text() == loading_sweep.render(
        list(RECORDED.values()), json.loads(loading_sweep.RESULTS.read_text())["transformers"]
    )


@pytest.mark.parametrize("refused", [row for row in RECORDED.values() if "refused" in row["outcome"]],
                         ids=lambda row: row["model_type"])  # fmt: skip
def test_a_refusal_names_the_model_and_the_way_out(refused):
    # A part of a whole is refused under its own name.
    assert refused["class"] in refused["reason"] or re.match(r"\w+ \(model type '\w+'\) cannot", refused["reason"])
    way_out = 'attn_implementation="eager"' if refused["outcome"] == REFUSED else "padded batches"
    assert way_out in refused["reason"]


def test_a_leak_and_a_load_that_breaks_are_reported_as_faults(kernel, monkeypatch):
    """The sweep sees what it is there for: without the hooks mamba mixes, without the check falcon is a KeyError."""
    kernel.remove_hooks()
    try:
        row = judge("mamba", kernel)
        assert row["outcome"] == FAULT and row["reason"].startswith("differs by"), row
        row = judge("falcon", kernel)
        assert row["outcome"] == FAULT and row["reason"].startswith("KeyError"), row
    finally:
        kernel.install_hooks()


@pytest.mark.parametrize("model_type", ["falcon", "gptj", "gpt_neo"])
def test_attention_classes_of_a_models_own_are_refused_by_name_in_a_new_process(model_type):
    """The first model of a process loads the package in the middle of its own __init__."""
    code = f"""
from tests import conftest
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from tests.models.shrink import tiny_config
try:
    with allow_all_hub_kernels():
        AutoModelForCausalLM.from_config(tiny_config("{model_type}"), attn_implementation="{NAME}")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"model type '{model_type}'" in done.stdout and 'Load it with attn_implementation="eager"' in done.stdout


def test_a_model_switched_to_our_attention_is_checked_too(kernel):
    """What may not be loaded by our name may not be switched to it either, and stays what it was."""
    model = build("inkling_text", "eager")
    with allow_all_hub_kernels(), pytest.raises(ValueError, match="InklingForCausalLM.*learned position bias"):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"
    outputs(model, "inkling_text", alone()[0])


def test_a_row_that_is_no_pack_is_not_refused_for_what_packs_would_do(kernel):
    """Training on one sample with its positions 0, 1, 2, ... packs nothing."""
    for model_type in ("minimax", "mobilebert"):
        model = build(model_type, "eager").train()
        sample = alone()[1]["input_ids"]
        positions = torch.arange(sample.shape[1])[None]
        kernel.remove_hooks()
        expected = model(input_ids=sample, position_ids=positions).logits
        kernel.install_hooks()
        assert_logits_equal(model(input_ids=sample, position_ids=positions).logits, expected)
        with pytest.raises(ValueError, match="cannot be trained on packed samples"):
            model(**pack(model_type))


def test_positions_that_reach_a_model_through_keywords_are_counted_too(kernel):
    """Whisper's decoder takes position_ids that its causal model does not name; offsets alone must restart them."""
    with allow_all_hub_kernels():
        model = AutoModelForCausalLM.from_config(tiny_config("whisper"), attn_implementation=NAME).eval()
    batch = pack(setting="cu_seq_lens")
    with torch.no_grad():
        told = model(**batch).logits
        del batch["position_ids"]
        assert torch.equal(model(**batch).logits, told)
