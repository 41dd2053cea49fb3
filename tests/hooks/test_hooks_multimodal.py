"""Packs of a multimodal model: its text is cut, its image tower is not."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening
from transformers.integrations.hub_kernels import allow_all_hub_kernels

from tests.models.tiny_models import (
    NAME,
    SETTINGS,
    VOCABULARY,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    config,
    pack,
    redraw,
    run,
)

pytestmark = pytest.mark.usefixtures("kernel")

IMAGE, VIDEO, START, END = range(VOCABULARY - 4, VOCABULARY)
# A 4 x 4 grid of patches; the tower merges 2 x 2 of them into one token.
GRID = torch.tensor([[1, 4, 4]])
PATCH = 4


def qwen(attention):
    whole = transformers.Qwen3_5Config(
        text_config=config("qwen3_5_text").to_dict(),
        vision_config=dict(
            depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=32, patch_size=PATCH
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with torch.random.fork_rng(), allow_all_hub_kernels():
        torch.manual_seed(0)
        model = transformers.Qwen3_5ForConditionalGeneration._from_config(whole, attn_implementation=attention)
    return redraw(model).eval()


@pytest.fixture(scope="module")
def models(kernel):
    return qwen(NAME), qwen("eager")


def test_text_packs(models):
    """Positions as one row, as three rotary rows, and as four with a text row."""
    model, stock = models
    with torch.no_grad():
        expected = torch.cat([stock(**sample).logits[0] for sample in alone()])
        for setting in SETTINGS:
            assert_logits_equal(model(**pack(setting=setting)).logits[0], expected)
        for rows in (3, 4):
            batch = pack()
            batch["position_ids"] = batch["position_ids"].expand(rows, -1, -1).contiguous()
            assert_logits_equal(model(**batch).logits[0], expected)


def test_three_rotary_rows_do_not_cut_a_mask(models):
    """transformers builds its mask from the text row alone, so under eager attention three rows are refused."""
    batch = pack()
    batch["position_ids"] = batch["position_ids"].expand(3, -1, -1).contiguous()
    with pytest.raises(ValueError, match="position_ids must hold text positions"):
        models[1](**batch)


def test_generation_from_padded_prompts_with_an_image(models):
    """Rotary rows that stand still or jump at an image, and padding around them, are no pack beside a cache."""
    prompts = [[5, 6, START, *[IMAGE] * 4, END, 7, 8, 9], [10, 11, 12], [13, START, *[IMAGE] * 4, END, 14]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    call = dict(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        mm_token_type_ids=(ids == IMAGE).int(),
        pixel_values=torch.randn(32, 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(2)),
        image_grid_thw=GRID.repeat(2, 1),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
    )
    model, stock = models
    for arguments in (dict(), dict(num_beams=2), dict(cache_implementation="static")):
        assert torch.equal(model.generate(**call, **arguments), stock.generate(**call, **arguments)), arguments


def hand_on_text(model, monkeypatch):
    """Let the tower's attention be called with the boundaries that the model got for its text."""
    text = {}

    def note(module, arguments, keywords):
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        text.update({name: keywords[name] for name in names if name in keywords})

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    for part in model.modules():
        if type(part).__name__ == "Qwen3_5VisionAttention":
            forward = functools.partial(type(part).forward, part)
            monkeypatch.setattr(
                part, "forward", lambda *given, forward=forward, **named: forward(*given, **{**named, **text})
            )


@pytest.mark.parametrize("handed_on", [False, True])
def test_packs_with_images(models, handed_on, monkeypatch):
    """The tower's patches are not cut where the text is, even if a model hands it the text's keywords."""
    model, stock = models
    generator = torch.Generator().manual_seed(1)

    def sample(length, has_image):
        ids = torch.randint(3, 100, (length,), generator=generator).tolist()
        if not has_image:
            return ids, None
        pixels = torch.randn(16, 3 * 2 * PATCH * PATCH, generator=generator)
        return [*ids[:2], START, *[IMAGE] * 4, END, *ids[2:]], pixels

    parts = [sample(5, True), sample(4, False), sample(3, True)]
    images = torch.cat([pixels for _, pixels in parts if pixels is not None])
    with torch.no_grad():
        expected = []
        for ids, pixels in parts:
            image = {} if pixels is None else dict(pixel_values=pixels, image_grid_thw=GRID)
            positions = torch.arange(len(ids))[None]
            expected.append(stock(input_ids=torch.tensor([ids]), position_ids=positions, **image).logits[0])
        for setting in SETTINGS.values():
            if handed_on and not setting:
                continue  # nothing to hand on
            batch = DataCollatorWithFlattening(**setting)(
                [dict(input_ids=ids) for ids, _ in parts], return_tensors="pt"
            )
            del batch["labels"]
            if handed_on:
                hand_on_text(model, monkeypatch)
            logits = model(**batch, pixel_values=images, image_grid_thw=GRID.repeat(2, 1)).logits[0]
            assert_logits_equal(logits, torch.cat(expected))


def test_tower_that_cannot_use_our_attention_keeps_its_own(kernel):
    """transformers does not trust SigLIP 2 with flash-style attention; the model still loads by one string."""
    whole = transformers.Lfm2VlConfig(
        text_config=config("lfm2").to_dict(),
        vision_config=dict(
            model_type="siglip2_vision_model",
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        ),
        image_token_id=IMAGE,
    )

    def build(attention):
        with torch.random.fork_rng(), allow_all_hub_kernels():
            torch.manual_seed(0)
            model = transformers.Lfm2VlForConditionalGeneration._from_config(
                copy.deepcopy(whole), attn_implementation=attention
            )
        return redraw(model).eval()

    model, stock = build(NAME), build("eager")
    assert model.model.language_model.config._attn_implementation == NAME
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    assert kernel.hooks_status().towers["Siglip2VisionModel"] == "sdpa"
    with torch.no_grad():
        expected = torch.cat([stock(**sample).logits[0] for sample in alone()])
        for setting in SETTINGS:
            assert_logits_equal(model(**pack(setting=setting)).logits[0], expected)


_QWEN_TOWER = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=32, patch_size=PATCH)
# A model around a language model -> its text model's type and the rest of its configuration.
WRAPPERS = {
    "qwen3_5": ("qwen3_5_text", dict(vision_config=_QWEN_TOWER)),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(vision_config=_QWEN_TOWER)),
    "lfm2_vl": (
        "lfm2",
        dict(
            vision_config=dict(
                model_type="siglip2_vision_model",
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        ),
    ),
    "nemotron_h_omni": (
        "nemotron_h",
        dict(
            vision_config=dict(
                model_type="radio",
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                video_temporal_patch_size=2,
            ),
            vision_hidden_size=32,
            projector_hidden_size=32,
        ),
    ),
}


def wrapper(model_type, attention):
    text, rest = WRAPPERS[model_type]
    whole = transformers.CONFIG_MAPPING[model_type](
        text_config=config(text).to_dict(), image_token_id=IMAGE, **copy.deepcopy(rest)
    )
    with torch.random.fork_rng(), allow_all_hub_kernels():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(whole, attn_implementation=attention)
    return redraw(model).train()


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_text_training_through_the_wrapper(model_type):
    """Packed text through the whole model, with and without checkpointing; rotary rows of positions for Qwen."""
    logits, gradients = run(wrapper(model_type, "eager"), alone())
    model = wrapper(model_type, NAME)
    batches = [pack(setting=setting) for setting in SETTINGS]
    if model_type.startswith("qwen"):
        batches += [{**pack(), "position_ids": pack()["position_ids"].expand(rows, -1, -1)} for rows in (3, 4)]
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        for batch in batches:
            packed_logits, packed_gradients = run(model, [dict(batch)])
            assert_logits_equal(packed_logits, logits)
            assert_gradients_equal(packed_gradients, gradients)
