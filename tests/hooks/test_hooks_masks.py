"""Attention that sees more than causal: blocks and prefixes whose tokens see each other both ways, and chains (C80)."""

import importlib
import inspect

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4_unified import modeling_gemma4_unified

from tests.models import tiny_masks, tiny_models
from tests.models.tiny_masks import MODELS, Kind, alone, build, packed, padded
from tests.models.tiny_models import NAME, SETTINGS, assert_gradients_equal, assert_logits_equal, run

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.fixture(scope="module", params=MODELS)
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def expected(model_type):
    """Logits and gradients of stock transformers' eager attention, sample by sample."""
    return run(build(model_type, "eager").train(), alone(model_type))


def test_alone_equals_eager(model_type, expected):
    logits, gradients = run(build(model_type).train(), alone(model_type))
    assert_logits_equal(logits, expected[0])
    assert_gradients_equal(gradients, expected[1])


def test_packed_equals_alone(model_type, expected):
    """No block joins its neighbour in the next sample; with each form of boundaries and of checkpointing."""
    model = build(model_type).train()
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        for setting in SETTINGS:
            logits, gradients = run(model, [packed(model_type, setting)])
            assert_logits_equal(logits, expected[0])
            assert_gradients_equal(gradients, expected[1])
    model.eval()
    with torch.no_grad():
        assert_logits_equal(model(**packed(model_type), use_cache=False).logits[0], expected[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_eager(model_type, side):
    batch = padded(model_type, alone(model_type)[:2], side)
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        logits, wanted = (build(model_type, name).eval()(**batch).logits for name in (NAME, "eager"))
    assert_logits_equal(logits[seen], wanted[seen])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(model_type, cache):
    """The prompt's block is seen both ways, what follows is causal: one prompt, and a left-padded batch."""
    model, stock = build(model_type).eval(), build(model_type, "eager").eval()
    prompts = alone(model_type)[:2]
    for prompt in (dict(prompts[0]), padded(model_type, prompts, "left")):
        settings = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
        settings["disable_compile"] = True
        got, wanted = (m.generate(**prompt, **settings, cache_implementation=cache) for m in (model, stock))
        assert torch.equal(got.sequences, wanted.sequences)
        for ours, theirs in zip(got.logits, wanted.logits):
            assert_logits_equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_5_text"])
def test_a_cache_longer_than_what_is_in_it(name):
    """Static caches, whose last key is not the last query's: the tokens are eager's, with and without padding."""
    model, stock = tiny_models.load(name).eval(), tiny_models.build(name, "eager").eval()
    one = dict(input_ids=torch.tensor([tiny_models.samples([6])[0]["input_ids"]]))
    for prompt in (one, tiny_models.left_padded([3, 6])):
        settings = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
        settings.update(cache_implementation="static", disable_compile=True)
        got, wanted = (m.generate(**prompt, **settings) for m in (model, stock))
        assert torch.equal(got.sequences, wanted.sequences)
        for ours, theirs in zip(got.logits, wanted.logits):
            assert_logits_equal(ours, theirs)


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_text_alone_needs_no_marks(name):
    """Without images both are causal, packed and not, and Gemma 3 with its marks all 0."""
    model, stock = build(name).eval(), build(name, "eager").eval()
    with torch.no_grad():
        wanted = torch.cat([stock(**sample).logits[0] for sample in tiny_models.alone()])
        assert_logits_equal(torch.cat([model(**sample).logits[0] for sample in tiny_models.alone()]), wanted)
        for setting in SETTINGS:
            assert_logits_equal(model(**tiny_models.pack(setting=setting)).logits[0], wanted)
        batch = tiny_models.pack()
        if name == "gemma3":
            assert_logits_equal(model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"])).logits[0], wanted)


def test_a_decoder_turned_encoder():
    """EmbeddingGemma's kind: its modules drop causality themselves."""
    changes = dict(use_bidirectional_attention=True, sliding_window=6, head_dim=8)
    settings = dict(tiny_models.config("llama").to_dict(), layer_types=["sliding_attention", "full_attention"])
    settings = {name: settings[name] for name in tiny_models._DECODER} | dict(layer_types=settings["layer_types"])
    model, stock = (tiny_models.load("gemma3_text", **settings, **changes).eval(), None)
    stock = tiny_models.build("gemma3_text", "eager", **settings, **changes).eval()
    with torch.no_grad():
        for sample in tiny_models.alone():
            assert_logits_equal(model(**sample).logits, stock(**sample).logits)


# ---- every form of mask, against the mask that eager attention gets ----


def from_vision(module, *layers):
    """The masks of a Gemma type for these kinds of layers."""

    def masks(config, past_key_values, **call):
        taken = inspect.signature(module.create_masks_for_vision_model).parameters
        # Renamed in transformers 5.24.
        call["past_key_values" if "past_key_values" in taken else "cache"] = past_key_values
        marks = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]])
        numbered = module.get_block_sequence_ids_for_mask(marks, device=torch.device("cpu"))
        found = module.create_masks_for_vision_model(config, block_sequence_ids=numbered, **call)
        return [found[layer] for layer in layers]

    return masks


def with_blocks(*ids, create=masking_utils.create_causal_mask):
    return lambda config, **call: [create(config, block_sequence_ids=torch.tensor([ids]), **call)]


def over_both_ways(build, *parts):
    def masks(config, past_key_values, position_ids, **call):
        # Built here, behind the hooks.
        overlay = getattr(masking_utils, build.__name__)(*parts)
        return [masking_utils.create_bidirectional_mask(config, and_mask_function=overlay, **call)]

    return masks


PREFIX = (0,) * 5 + (-1,) * 9
FORMS = {
    "gemma3": from_vision(modeling_gemma3, "full_attention", "sliding_attention"),
    "gemma4": from_vision(modeling_gemma4, "sliding_attention"),
    "gemma4_unified": from_vision(modeling_gemma4_unified, "sliding_attention"),
    "prefix": with_blocks(*PREFIX),
    "prefix and a window": with_blocks(*PREFIX, create=masking_utils.create_sliding_window_causal_mask),
    "block in the middle": with_blocks(*(-1,) * 4, *(7,) * 6, *(-1,) * 4),
    "chains": over_both_ways(masking_utils.packed_sequence_mask_function, torch.tensor([[0] * 6 + [3] * 8])),
    "window both ways": over_both_ways(masking_utils.sliding_window_bidirectional_overlay, 3),
}


def filled(tokens):
    """A cache that holds ``tokens`` tokens: the queries behind them are told by the blocks of the whole row."""
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8), 0)
    return cache


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_ranges_say_what_the_mask_of_eager_attention_says(form, padding, before):
    if before and form in ("chains", "window both ways"):
        pytest.skip("encoders have no cache")
    seen = []
    for name in ("eager", NAME):
        config = tiny_models.config("mistral", sliding_window=5)
        config._attn_implementation = name
        mask = None
        if padding:
            mask = torch.ones(1, 14, dtype=torch.long)
            mask[:, :2] = padding != "left"
            mask[:, -2:] = padding != "right"
        call = dict(
            inputs_embeds=torch.zeros(1, 14 - before, 32), attention_mask=mask, position_ids=None,
            past_key_values=filled(before) if before else None,
        )  # fmt: skip
        seen.append(FORMS[form](config, **call))
    for dense, ranges in zip(*seen):
        assert ranges.shape == (1, 1, 14 - before, 2) and ranges.dtype == torch.int32
        visible = (dense[0, 0] == 0).nonzero().tolist()
        ours = [[i, j] for i, (first, last) in enumerate(ranges[0, 0].tolist()) for j in range(first, last + 1)]
        queries = {i for i, _ in visible if mask is None or bool(mask[0, before + i])}
        assert [pair for pair in ours if pair[0] in queries] == [pair for pair in visible if pair[0] in queries]


# ---- chains: attention that sees less ----

ESMC = Kind(transformers.EsmcForMaskedLM, tiny_masks._esmc, "sequence_id", 0, 1, [])


def test_chains_equal_eager_and_do_not_join_across_samples():
    model, stock = build("esmc", NAME, ESMC).eval(), build("esmc", "eager", ESMC).eval()
    batches = [tiny_masks.batch_of(ESMC, sample, 0) for sample in ([("block", 5), ("text", 4)], [("text", 3)])]
    with torch.no_grad():
        wanted = torch.cat([stock(**batch).logits[0] for batch in batches])
        assert_logits_equal(torch.cat([model(**batch).logits[0] for batch in batches]), wanted)
        one = {name: torch.cat([batch[name] for batch in batches], 1) for name in batches[0]}
        one["position_ids"] = torch.cat([torch.arange(9), torch.arange(3)])[None]
        assert_logits_equal(model(**one, use_cache=False).logits[0], wanted)
    apart = dict(batches[0], sequence_id=torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="esmc: tokens of one sequence_id must lie side by side .* in several pieces"):
        model(**apart)


@pytest.fixture
def of_positions(kernel, monkeypatch):
    """What transformers from 5.23 on lays over the mask of a pack, or the same for an older release."""

    def remap_positions_for_packed_sequence(mask_function, position_ids):
        return lambda b, h, q, k: mask_function(b, h, position_ids[b, q], position_ids[b, k])

    tiny_models.load("mistral")
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        masks = importlib.import_module(f"{kernel.__name__}.hooks.masks")
        name, stand_in = "remap_positions_for_packed_sequence", remap_positions_for_packed_sequence
        monkeypatch.setattr(masking_utils, name, masks._noting(name, stand_in), raising=False)
    return lambda *parts: masking_utils.remap_positions_for_packed_sequence(*parts)


POSITIONS, CHAINS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]), torch.tensor([[0] * 5 + [1] * 3])


def ours_of(mask_function):
    config = tiny_models.load("mistral", sliding_window=3).config
    mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[NAME]
    return mask(batch_size=1, q_length=8, kv_length=8, mask_function=mask_function, config=config)


@pytest.mark.parametrize("kind", ["causal", "window", "window both ways", "blocks"])
def test_positions_in_a_chain_say_what_places_in_the_row_say(of_positions, kind):
    window, causal = masking_utils.sliding_window_overlay(3), masking_utils.causal_mask_function
    inner = {
        "causal": causal,
        "window": masking_utils.and_masks(window, causal),
        "window both ways": masking_utils.sliding_window_bidirectional_overlay(2),
        # Gemma 3's; read at a position, the blocks would be those of the first sample.
        "blocks": masking_utils.or_masks(
            causal, masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1, 1, 1, -1]]))
        ),
    }[kind]
    chains = masking_utils.packed_sequence_mask_function(CHAINS)
    got = ours_of(masking_utils.and_masks(of_positions(inner, POSITIONS), chains))
    wanted = ours_of(masking_utils.and_masks(inner, chains))
    assert (got is None) == (wanted is None) == (kind in ("causal", "window"))
    assert got is None or torch.equal(got, wanted)


def test_an_unknown_mask_of_positions_is_refused_by_its_own_name(of_positions):
    def every_second_key(batch, head, query, key):
        return key % 2 == 0

    chains = masking_utils.packed_sequence_mask_function(CHAINS)
    either = masking_utils.or_masks(masking_utils.causal_mask_function, every_second_key)
    for mask_function in (every_second_key, either):
        with pytest.raises(ValueError, match="mistral: its attention mask must be .* mask function .*every_second"):
            ours_of(masking_utils.and_masks(of_positions(mask_function, POSITIONS), chains))


# ---- what is refused ----


def test_a_block_in_several_pieces_is_refused():
    model = build("hrm_text").eval()
    batch = tiny_masks.batch_of(MODELS["hrm_text"], [("block", 3), ("text", 2), ("block", 2)], 0)
    with pytest.raises(ValueError, match="hrm_text: blocks of tokens that see each other both ways must lie side by"):
        model(**batch)
    # In a pack each sample has a block of that number.
    kept_apart = packed("hrm_text")
    with torch.no_grad():
        model(**kept_apart)


def test_a_padding_mask_with_a_gap_is_refused_beside_blocks():
    batch = tiny_masks.batch_of(MODELS["hrm_text"], [("block", 3), ("text", 5)], 0)
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="hrm_text: attention_mask must hide nothing but the ends of a row"):
        build("hrm_text").eval()(**batch)


@pytest.mark.parametrize("overlay", ["or_mask_function", "and_mask_function"])
def test_an_unknown_mask_function_is_refused_by_name(overlay):
    def every_second_key(batch, head, query, key):
        return key % 2 == 0

    model = tiny_models.load("llama")
    with pytest.raises(ValueError, match="llama: its attention mask must be .* got the mask function .*every_second"):
        masking_utils.create_causal_mask(
            config=model.config, inputs_embeds=torch.zeros(1, 5, 32), attention_mask=None, past_key_values=None,
            **{overlay: every_second_key},
        )  # fmt: skip


def test_a_mask_of_four_dimensions_is_refused_by_name():
    model = tiny_models.load("llama").eval()
    mask = torch.zeros(1, 1, 6, 6)
    with pytest.raises(ValueError, match=r"llama: attention_mask must have the form \[B, T\].*\(1, 1, 6, 6\)"):
        model(input_ids=torch.arange(3, 9)[None], attention_mask=mask)


# ---- under torch.compile ----


def test_one_graph_and_no_recompile_for_new_blocks_or_samples():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = build("hrm_text").train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for count in (4, 3, 2, 4):
        batches = [tiny_masks.batch_of(MODELS["hrm_text"], s, 0) for s in MODELS["hrm_text"].samples[:count]]
        batch = packed("hrm_text", batches=batches)
        rest = 40 - batch["input_ids"].shape[1]
        last = tiny_masks.batch_of(MODELS["hrm_text"], [("block", rest // 2), ("text", rest - rest // 2)], 9)
        batch = packed("hrm_text", batches=[*batches, last])
        logits, gradients = run(model, [dict(batch)])
        traced_logits, traced_gradients = run(compiled, [dict(batch)])
        assert_logits_equal(traced_logits, logits)
        traced_gradients = {name.removeprefix("_orig_mod."): value for name, value in traced_gradients.items()}
        assert_gradients_equal(traced_gradients, gradients)
    assert counter.frame_count == 1


# ---- taken back ----


def test_removing_the_hooks_takes_it_back(kernel):
    stock = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    tiny_models.load("llama")
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[NAME] is not stock
    kernel.remove_hooks()
    try:
        assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[NAME] is stock
        assert not hasattr(masking_utils.blockwise_overlay, "packfree_stock")
    finally:
        kernel.install_hooks()
