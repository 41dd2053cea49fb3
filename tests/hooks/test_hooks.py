"""Packed whole models equal their samples alone, through the one string, with every setting of the collator.

The reference is always transformers' own code on one sample at a time: eager attention and its torch functions, which
see no pack. Everything runs in float32, so the tolerances of ``tiny_models`` are the only slack.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.tiny_models import (
    EAGER_ONLY,
    ENCODERS,
    MODELS,
    REFUSED,
    SETTINGS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    check_generation,
    check_packed_equals_alone,
    first_position,
    load,
    pack,
    run,
    samples,
)

GENERATING = [name for name in MODELS if name not in ENCODERS]


@pytest.fixture(autouse=True)
def hooks_in_place(kernel):
    """Tests that take the hooks off put them back; none may leave them off."""
    assert kernel.hooks_status().installed
    yield
    assert kernel.hooks_status().installed


@pytest.fixture(scope="module")
def reference():
    """model type -> logits and gradients of stock transformers, one sample at a time, computed once."""
    known = {}

    def of(model_type):
        if model_type not in known:
            with torch.enable_grad():
                known[model_type] = run(build(model_type, "eager").train(), alone())
        return known[model_type]

    return of


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[pytest.mark.kernels_ci] if name == "qwen3_5_text" else []) for name in MODELS],
)
def test_packed_equals_alone(model_type, reference):
    """Training with and without checkpointing of either kind, and evaluation, for each setting of the collator."""
    check_packed_equals_alone(model_type, reference(model_type))


@pytest.mark.parametrize("model_type", EAGER_ONLY)
def test_packed_equals_alone_under_eager_attention(model_type, reference):
    """Models that our attention cannot express still get their other layers' boundaries under transformers' own."""
    check_packed_equals_alone(model_type, reference(model_type), "eager")


def test_every_model_with_a_replaced_function_is_in_the_matrix():
    """A modeling file of transformers that uses a function of the table is served or refused by a test here."""
    known = {*MODELS, *REFUSED, *EAGER_ONLY}
    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "use_kernel_func_from_hub_with_fallback(" in text and "use_kernelized_func" in text:
            name = file.parent.name
            assert {name, f"{name}_text"} & known, name


def test_one_sample_does_not_reach_another():
    """Redrawing one sample leaves every other sample's logits bit-identical."""
    for model_type in ("llama", "qwen3_5_text", "lfm2", "zamba2", "jamba", "kimi_linear"):
        model = load(model_type).eval()
        batch = pack(model_type)
        with torch.no_grad():
            before = model(**batch).logits[0]
            batch["input_ids"] = batch["input_ids"].clone()
            batch["input_ids"][0, 5:14] = torch.arange(20, 29)
            after = model(**batch).logits[0]
        same = torch.ones(before.shape[0], dtype=torch.bool)
        same[5:14] = False
        assert torch.equal(before[same], after[same]), model_type
        assert not torch.equal(before[5:14], after[5:14]), model_type


@pytest.mark.parametrize("model_type", ["bamba", "qwen3_5_text"])
def test_checkpointing_gives_the_same_gradients_c39(model_type):
    """C39: boundary keywords reach the checkpointed layer; gradients equal those without checkpointing."""
    model = load(model_type).train()
    batch = pack(setting="seq_idx", lengths=[5, 9])
    _, expected = run(model, [batch])
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        _, gradients = run(model, [batch])
        for name in expected:
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_mask_that_masks_nothing_c42(model_type, setting):
    """C42: an all-ones attention_mask travels along and must not make the row one sample."""
    lengths = [5, 7]
    model = load(model_type).train()
    batch = pack(model_type, setting, lengths, attention_mask=torch.ones(1, 12, dtype=torch.long))
    logits, gradients = run(model, [batch])
    expected_logits, expected_gradients = run(build(model_type, "eager").train(), alone(lengths))
    assert_logits_equal(logits, expected_logits)
    assert_gradients_equal(gradients, expected_gradients)


def test_encoder_positions_that_start_at_two_c13():
    """C13: packed encoder hidden states equal those of the padded batch."""
    lengths = [3, 2, 4]
    packed_model, stock_model = load("xlm-roberta").eval(), build("xlm-roberta", "eager").eval()
    batch = pack("xlm-roberta", lengths=lengths)
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4, 5]]
    rows = [torch.tensor(sample["input_ids"]) for sample in samples(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    with torch.no_grad():
        got = packed_model.roberta(**batch).last_hidden_state[0]
        expected = stock_model.roberta(input_ids=padded, attention_mask=(padded != 1).long()).last_hidden_state
    expected = torch.cat([row[:length] for row, length in zip(expected, lengths)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_positions_are_counted_where_they_are_missing(reference):
    """Boundaries without position_ids: each sample counts from its own first token, from 2 in XLM-RoBERTa."""
    for model_type in ("gpt2", "xlm-roberta", "qwen3_5_text"):
        batch = pack(model_type, "seq_idx")
        del batch["position_ids"]
        with torch.no_grad():
            got = load(model_type).eval()(**batch).logits[0]
        assert_logits_equal(got, reference(model_type)[0])


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_5_text", "lfm2", "bamba", "mamba", "kimi_linear"])
def test_packed_rows(model_type):
    """Several rows, each packed: every row holds its own samples."""
    first, second = [5, 9], [3, 1, 10]
    batch = {
        key: torch.cat([pack(model_type, lengths=first)[key], pack(model_type, lengths=second)[key]])
        for key in ("input_ids", "position_ids")
    }
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    with torch.no_grad():
        got = model(**batch).logits
        labelled = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            seq_idx=torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in (first, second)]).int(),
        ).logits
        for row, lengths in enumerate((first, second)):
            expected = torch.cat([stock(**sample).logits[0] for sample in alone(lengths)])
            assert_logits_equal(got[row], expected)
            assert_logits_equal(labelled[row], expected)


def test_multimodal_position_rows(reference):
    """Four rows of positions (text first) cut where the text row starts again."""
    batch = pack()
    batch["position_ids"] = batch["position_ids"].expand(4, -1, -1).contiguous()
    with torch.no_grad():
        assert_logits_equal(load("qwen3_5_text").eval()(**batch).logits[0], reference("qwen3_5_text")[0])


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_5_text", "lfm2", "bamba", "mamba", "kimi_linear", "xlm-roberta"]
)
def test_batches_without_a_pack_stay_as_they_are(model_type):
    """One row with counting positions, a plain batch, and right- and left-padded batches equal stock transformers."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    start = first_position(model_type)
    row = torch.tensor([samples([11])[0]["input_ids"]])
    right = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
    positions = torch.arange(start, start + 11)[None]
    batches = [
        dict(input_ids=row, position_ids=positions),
        dict(input_ids=row, position_ids=positions, attention_mask=torch.ones_like(row)),
        dict(input_ids=row.repeat(2, 1), position_ids=positions.repeat(2, 1)),
        dict(input_ids=row.repeat(2, 1), attention_mask=right),
    ]
    if model_type != "xlm-roberta":
        left = right.flip(1)
        counted = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
        batches.append(dict(input_ids=row.repeat(2, 1), attention_mask=left, position_ids=counted))
    for batch in batches:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        with torch.no_grad():
            assert_logits_equal(model(**batch).logits[real], stock(**batch).logits[real])


@pytest.mark.parametrize("model_type", GENERATING)
def test_generation_equals_stock(model_type):
    """Greedy generation from one prompt and from a left-padded batch."""
    check_generation(model_type)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "lfm2", "mamba2", "bamba"])
def test_left_padding_in_a_batch_of_one_c47(model_type):
    """C47: a left-padded prompt alone in its batch goes on as the unpadded prompt does."""
    model = load(model_type).eval()
    prompt = torch.tensor([samples([3])[0]["input_ids"]])
    padded = torch.nn.functional.pad(prompt, (3, 0))
    arguments = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(input_ids=prompt, **arguments)
    got = model.generate(input_ids=padded, attention_mask=(padded != 0).long(), **arguments)
    assert torch.equal(got.sequences[:, 3:], expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits):
        assert_logits_equal(ours, theirs)


def test_evaluation_with_a_cache_in_the_configuration(reference):
    """What Trainer.evaluate does: eval mode, use_cache=True in the configuration, no use_cache in the call."""
    for model_type in ("llama", "qwen3_5_text", "lfm2"):
        model = load(model_type, use_cache=True).eval()
        for setting in SETTINGS:
            with torch.no_grad():
                output = model(**pack(model_type, setting))
            assert_logits_equal(output.logits[0], reference(model_type)[0])
            assert output.past_key_values is None


def test_one_sample_with_a_cache_keeps_the_cache():
    """A cache is refused beside several samples only; one sample still gets its cache."""
    model = load("qwen3_5_text").eval()
    stock = build("qwen3_5_text", "eager").eval()
    with torch.no_grad():
        expected = stock(**alone([7])[0], use_cache=True)
        for setting in SETTINGS:
            output = model(**pack(setting=setting, lengths=[7], use_cache=True))
            assert output.past_key_values.get_seq_length() == 7
            assert_logits_equal(output.logits, expected.logits)


def test_direct_forward_positional_arguments_and_copies(reference):
    """Wrappers such as PEFT call ``.forward``; arguments may be positional; a deep copy keeps the hooks."""
    batch = pack("qwen3_5_text")
    model = load("qwen3_5_text").eval()
    expected = reference("qwen3_5_text")[0]
    with torch.no_grad():
        assert_logits_equal(model.forward(**batch).logits[0], expected)
        assert_logits_equal(model(batch["input_ids"], None, batch["position_ids"]).logits[0], expected)
        ones = torch.ones_like(batch["input_ids"])
        assert_logits_equal(model(batch["input_ids"], ones, batch["position_ids"]).logits[0], expected)
    copied = copy.deepcopy(model).train()
    copied.gradient_checkpointing_enable()
    # A model saved whole must open where this package is not loaded.
    assert "packfree" not in str(pickle.dumps(copied.model.layers[0]._gradient_checkpointing_func))
    logits, gradients = run(copy.deepcopy(copied), [batch])
    assert_logits_equal(logits, expected)
    assert_gradients_equal(gradients, reference("qwen3_5_text")[1])


def test_stock_attention_is_served_too(reference):
    """A hybrid under eager or sdpa attention: its functions are ours, its mask cuts the attention."""
    for attention in ("eager", "sdpa"):
        model = build("qwen3_5_text", attention).train()
        for setting in SETTINGS:
            logits, gradients = run(model, [pack(setting=setting)])
            assert_logits_equal(logits, reference("qwen3_5_text")[0])
            assert_gradients_equal(gradients, reference("qwen3_5_text")[1])


def test_models_that_need_no_hooks_are_left_alone():
    """Softmax attention of transformers keeps its packs apart by itself; even a cache beside one is its own affair."""
    model = build("llama", "sdpa").eval()
    with torch.no_grad():
        output = model(**pack(), use_cache=True)
    assert output.past_key_values.get_seq_length() == 35
