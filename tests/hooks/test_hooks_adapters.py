"""Adapters of PEFT on packs: those that act on each token are right, those that act on the row are refused (C68)."""

import subprocess
import sys

import peft
import pytest
import torch
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import PeftType

from tests.conftest import ROOT
from tests.models.head_models import build, packed
from tests.models.tiny_models import SETTINGS, alone, assert_logits_equal, load, pack, samples

pytestmark = pytest.mark.usefixtures("kernel")

_PROMPT = dict(num_virtual_tokens=4)
# PEFT type -> options, and a part of the reason.
REFUSED = {
    "PROMPT_TUNING": (_PROMPT, "prompt tuning puts its virtual tokens before the row"),
    "P_TUNING": (dict(_PROMPT, encoder_hidden_size=16), "p tuning puts its virtual tokens before the row"),
    "PREFIX_TUNING": (_PROMPT, "prefix tuning puts its virtual tokens before the row"),
    "MULTITASK_PROMPT_TUNING": (dict(_PROMPT, num_tasks=1), "multitask prompt tuning puts its virtual tokens"),
    "CARTRIDGE": (_PROMPT, "cartridge puts its virtual tokens before the row"),
    "CPT": (
        dict(cpt_token_ids=[5, 6, 7, 8], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4]),
        "cpt puts its virtual tokens before the row",
    ),
    "LILY": (dict(target_modules=["q_proj", "v_proj"]), "its router averages over all tokens"),
}
_LINEAR = dict(target_modules=["q_proj", "v_proj"])
_QUERY = dict(target_modules=["q_proj"])
SERVED = {
    **dict.fromkeys(
        ("LORA", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "HRA", "RANDLORA", "DELORA", "GRALORA", "HIRA", "OSF", "BEFT"),
        _LINEAR,
    ),
    "IA3": dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ADAPTION_PROMPT": dict(adapter_len=4, adapter_layers=2),
    "LN_TUNING": {},
    "TRAINABLE_TOKENS": dict(token_indices=[5, 6, 7]),
    "POLY": dict(_QUERY, r=4, n_tasks=1, n_skills=2, n_splits=1),
    "ADALORA": dict(_QUERY, total_step=10),
    "C3A": dict(_QUERY, block_size=16),
    "FOURIERFT": dict(_QUERY, n_frequency=100),
    "MISS": dict(_QUERY, r=4),
    "SHIRA": dict(_QUERY, r=2),
    "ROAD": dict(_QUERY, group_size=8),
    "VBLORA": dict(_QUERY, vector_length=8, num_vectors=16, topk=2),
    "WAVEFT": dict(_QUERY, n_frequency=100),
}


def adapted(name, model=None, **options):
    """A model with an adapter whose parameters all matter."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[getattr(PeftType, name)]
    model = get_peft_model(model or load("llama"), config(**{"task_type": "CAUSAL_LM", **options})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", SERVED)
def test_what_acts_on_each_token_is_as_alone(name):
    model = adapted(name, **SERVED[name])
    extra = {"task_ids": torch.tensor([0])} if name == "POLY" else {}
    with torch.no_grad():
        expected = torch.cat([model(**one, **extra).logits[0] for one in alone()])
        plain = torch.cat([load("llama").eval()(**one).logits[0] for one in alone()])
        assert (expected - plain).abs().max() > 1e-3
        for setting in SETTINGS:
            assert_logits_equal(model(**pack("llama", setting), **extra).logits[0], expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_acts_on_the_row_is_refused(name):
    options, why = REFUSED[name]
    model = adapted(name, **options)
    extra = {"task_ids": torch.tensor([0])} if name == "MULTITASK_PROMPT_TUNING" else {}
    computed = []
    model.get_input_embeddings().register_forward_hook(lambda *_: computed.append(1))
    batches = [pack("llama", setting) for setting in SETTINGS]
    numbered = pack("llama", "seq_idx")
    batches.append(dict(input_ids=numbered["input_ids"], attention_mask=numbered["seq_idx"] + 1))
    for mode in (model.eval(), model.train()):
        for batch in batches:
            with pytest.raises(ValueError, match=f"PeftModelForCausalLM of LlamaForCausalLM .*{why}.*such as LoRA"):
                mode(**batch, **extra)
    assert not computed
    model.eval()
    ids = torch.tensor([sample["input_ids"] for sample in samples([6, 6])])
    extra = {name: value.expand(2) for name, value in extra.items()}
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits.isfinite().all()
    if name != "LILY":
        with model.disable_adapter():
            assert model(**batches[0]).logits.isfinite().all()


def test_activated_lora_and_several_tasks_are_refused():
    activated = adapted("LORA", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    with pytest.raises(ValueError, match="alora_invocation_tokens"):
        activated(**pack("llama", "position_ids"))
    tasks = adapted("POLY", target_modules=["q_proj"], r=4, n_tasks=3, n_skills=2, n_splits=1)
    with pytest.raises(ValueError, match="task_ids choose an adapter for each row"):
        tasks(**pack("llama", "position_ids"), task_ids=torch.tensor([0, 1, 2, 0, 1]))


def test_other_tasks_are_looked_at_too():
    """Each of PEFT's wrappers has a forward of its own."""
    model = adapted("PROMPT_TUNING", build("llama"), task_type="SEQ_CLS", **_PROMPT)
    with pytest.raises(ValueError, match="PeftModelForSequenceClassification .*virtual tokens"):
        model(**packed("llama", "position_ids"))
    scored = adapted("LORA", build("llama"), task_type="SEQ_CLS", target_modules=["q_proj"])
    with torch.no_grad():
        expected = torch.cat([scored(**one).logits for one in alone()])
        assert_logits_equal(scored(**packed("llama", "seq_idx")).logits, expected)


def test_without_hooks_peft_is_left_alone(kernel):
    forward = peft.PeftModelForCausalLM.forward
    kernel.remove_hooks()
    try:
        assert peft.PeftModelForCausalLM.forward is not forward
    finally:
        kernel.install_hooks()
    assert hasattr(peft.PeftModelForCausalLM.forward, "packfree_stock")


def test_peft_imported_after_the_model():
    code = """
import tests.conftest, sys
from tests.models.tiny_models import load, pack
model = load("llama").eval()
assert "peft.peft_model" not in sys.modules
from peft import PromptTuningConfig, get_peft_model
model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
try:
    model(**pack("llama"))
except ValueError as error:
    assert "virtual tokens" in str(error), error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("refused"), done.stderr
