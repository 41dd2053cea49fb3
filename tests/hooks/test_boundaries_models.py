"""Malformed and contradictory boundaries in the call of a whole model: one table of faults.

Each must raise the listed exception from the model's forward, naming the model and the argument, whatever kind of layer
would have been the first to need the boundaries. What single functions refuse is in test_boundaries.py, whose faults of
offsets and labels are tried here too.
"""

import pytest
import torch

from tests.models.tiny_models import SETTINGS, build, load, pack
from tests.packing.test_boundaries import LABEL_FAULTS, OFFSET_FAULTS

pytestmark = pytest.mark.usefixtures("kernel")

# Attention alone; attention and a convolution; no attention, and a forward that drops every keyword.
MODELS = ["llama", "lfm2", "mamba"]

# Ten tokens, as many as the shared faults are about.
LENGTHS = [3, 7]


@pytest.fixture(scope="module")
def models():
    return {model_type: load(model_type) for model_type in MODELS}


def refuses(model, argument, error, setting, **changes):
    batch = {**pack(setting=setting, lengths=LENGTHS), **changes}
    with pytest.raises(error, match=f"^{type(model).__name__}: {argument} must "):
        model(**batch)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("fault", OFFSET_FAULTS)
def test_malformed_offsets(models, model_type, fault):
    value, error = OFFSET_FAULTS[fault]
    for setting in SETTINGS:
        refuses(models[model_type], "cu_seq_lens_q", error, setting, cu_seq_lens_q=value)
        refuses(models[model_type], "cu_seq_lens_k", error, setting, cu_seq_lens_k=value)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("fault", LABEL_FAULTS)
def test_malformed_labels(models, model_type, fault):
    value, error = LABEL_FAULTS[fault]
    for setting in SETTINGS:
        refuses(models[model_type], "seq_idx", error, setting, seq_idx=value)


def mask(*zeros):
    ones = torch.ones(1, sum(LENGTHS), dtype=torch.long)
    ones[0, list(zeros)] = 0
    return ones


POSITIONS = pack(lengths=LENGTHS)["position_ids"]

# Fault -> (what the call has beside the collator's arguments, the setting, the argument named, the exception).
CALLS = {
    "mask over the end": (dict(attention_mask=mask(8, 9)), "position_ids", "attention_mask", ValueError),
    "mask over the start": (dict(attention_mask=mask(0)), "seq_idx", "attention_mask", ValueError),
    "bool mask": (dict(attention_mask=mask(5).bool()), "cu_seq_lens", "attention_mask", ValueError),
    "float mask": (dict(attention_mask=mask(5).float()), "seq_idx", "attention_mask", ValueError),
    "mask of four axes": (dict(attention_mask=torch.ones(1, 1, 10, 10)), "seq_idx", "attention_mask", ValueError),
    "mask of another length": (dict(attention_mask=torch.ones(1, 12)), "seq_idx", "attention_mask", ValueError),
    "cache beside positions": (dict(use_cache=True), "position_ids", "use_cache", ValueError),
    "cache beside offsets": (dict(use_cache=True), "cu_seq_lens", "use_cache", ValueError),
    "labels cut elsewhere": (dict(seq_idx=torch.tensor([[0] * 4 + [1] * 6])), "cu_seq_lens", "seq_idx", ValueError),
    "offsets cut elsewhere": (dict(cu_seq_lens_q=torch.tensor([0, 4, 10])), "seq_idx", "seq_idx", ValueError),
    "keys cut elsewhere": (dict(cu_seq_lens_k=torch.tensor([0, 4, 10])), "cu_seq_lens", "cu_seq_lens_k", ValueError),
    "keys against positions": (
        dict(cu_seq_lens_k=torch.tensor([0, 10])), "position_ids", "cu_seq_lens_k", ValueError,
    ),
    "keys against labels": (dict(cu_seq_lens_k=torch.tensor([0, 3])), "seq_idx", "cu_seq_lens_k", ValueError),
    "longest query too small": (dict(max_length_q=6), "cu_seq_lens", "max_length_q", ValueError),
    "longest key too small": (dict(max_length_k=6), "seq_idx", "max_length_k", ValueError),
    "longest too small beside positions": (dict(max_length_q=6), "position_ids", "max_length_q", ValueError),
    "positions as floats": (dict(position_ids=POSITIONS.float()), "position_ids", "position_ids", TypeError),
    "positions as a list": (dict(position_ids=POSITIONS.tolist()), "position_ids", "position_ids", TypeError),
    "too few positions": (dict(position_ids=POSITIONS[:, :9]), "position_ids", "position_ids", ValueError),
    "too many positions": (
        dict(position_ids=torch.cat([POSITIONS, POSITIONS], 1)), "position_ids", "position_ids", ValueError,
    ),
    "positions of two rows": (dict(position_ids=POSITIONS.expand(2, 10)), "position_ids", "position_ids", ValueError),
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("fault", CALLS)
def test_contradictory_call(models, model_type, fault):
    changes, setting, argument, error = CALLS[fault]
    refuses(models[model_type], argument, error, setting, **changes)


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_that_no_offset_separates(models, model_type):
    model = models[model_type]
    batch = {name: value.repeat(2, 1) for name, value in pack(lengths=LENGTHS).items()}
    with pytest.raises(ValueError, match=f"^{type(model).__name__}: cu_seq_lens_q must "):
        model(**batch, cu_seq_lens_q=torch.tensor([0, 3, 13, 20]))


@pytest.mark.parametrize("model_type", MODELS)
def test_nothing_is_left_behind_after_a_refusal(models, model_type):
    """The next call is served as if the refused one had not been."""
    model = models[model_type].eval()
    with torch.no_grad():
        expected = model(**pack(lengths=LENGTHS)).logits
        refuses(model, "cu_seq_lens_q", ValueError, "position_ids", cu_seq_lens_q=torch.tensor([0, 6, 4, 10]))
        assert torch.equal(model(**pack(lengths=LENGTHS)).logits, expected)


def test_what_needs_no_hooks_may_be_called_as_ever():
    """Models whose packs the hooks do not serve keep transformers' own behaviour, float positions included."""
    model = build("llama", "sdpa").eval()
    batch = pack(lengths=LENGTHS)
    with torch.no_grad():
        assert model(**{**batch, "position_ids": batch["position_ids"].float()}).logits.shape == (1, 10, 128)
