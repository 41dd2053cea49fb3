"""What is no pack behaves as with transformers alone: padding anywhere, generation of every kind, prepared masks.

Under transformers' own attention the hooks must not change a bit where plain calls are left to transformers; where ours
serve them, and under our attention, the logits and tokens are those of eager.
"""

import pytest
import torch
from transformers import StaticCache

from tests.models.tiny_models import (
    ENCODERS,
    MODELS,
    NAME,
    VOCABULARY,
    assert_logits_equal,
    build,
    left_padded,
    load,
    pack,
    samples,
)

# Every model with a function of the table, and one with attention alone.
MIXING = [
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe", "bamba", "falcon_h1",
    "granitemoehybrid", "nemotron_h", "zamba2", "mamba2", "mamba", "falcon_mamba", "jamba", "zamba", "kimi_linear",
    "bailing_hybrid",
]  # fmt: skip
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")
GREEDY = dict(max_new_tokens=3, do_sample=False, eos_token_id=None)


@pytest.fixture
def without_hooks(kernel):
    """Calls a function while transformers is as if this package were not there."""

    def call(function, *args, **kwargs):
        kernel.remove_hooks()
        try:
            return function(*args, **kwargs)
        finally:
            kernel.install_hooks()

    return call


@pytest.fixture
def without_plain_calls(kernel):
    """Calls a function while the hooks leave calls that hold no pack to transformers."""

    def call(function, *args, **kwargs):
        kernel.install_hooks(plain=False)
        try:
            return function(*args, **kwargs)
        finally:
            kernel.install_hooks(plain=True)

    return call


def counted(mask):
    """Positions as generate() makes them: real tokens count, padding is 0."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def turns():
    """A batch of prompts of several turns, padded between the turns and on the left."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 1, 1]])
    return dict(input_ids=torch.arange(3, 3 + mask.numel()).view_as(mask) % VOCABULARY, attention_mask=mask)


def forwards(model):
    """Logits of real tokens in each form that padding inside a row may take, in evaluation and in training."""
    found = []
    for mode in (model.eval(), model.train()):
        batch = turns()
        mask = batch["attention_mask"]
        # Counted tokens, counted tokens that stand still on padding, places in the row, none.
        still = (mask.cumsum(-1) - 1).clamp(min=0)
        for positions in (counted(mask), still, torch.arange(mask.shape[1]).expand_as(mask), None):
            for rows in (slice(0, 3), slice(0, 1)):
                call = {name: value[rows] for name, value in batch.items()}
                if positions is not None:
                    call["position_ids"] = positions[rows]
                with torch.no_grad():
                    found.append(mode(**call).logits[mask[rows].bool()])
    return found


@pytest.mark.parametrize(
    "model_type, attention",
    [
        (model_type, attention)
        for model_type in ("llama", *MIXING)
        for attention in ("eager", "sdpa", NAME)
        if attention != "sdpa" or model_type not in WITHOUT_ATTENTION  # transformers has no sdpa for these
    ],
)
def test_padding_inside_a_row(model_type, attention, without_hooks, without_plain_calls):
    stock = attention if attention != NAME else "eager"
    expected = without_hooks(lambda: forwards(build(model_type, stock)))
    model = load(model_type) if attention == NAME else build(model_type, attention)
    for ours, theirs in zip(forwards(model), expected):
        assert_logits_equal(ours, theirs)
    if attention != NAME:
        for ours, theirs in zip(without_plain_calls(forwards, model), expected):
            assert torch.equal(ours, theirs)


GENERATION = {
    "greedy": dict(),
    "without a cache": dict(use_cache=False, max_new_tokens=2),
    "beams": dict(num_beams=2),
}


@pytest.mark.parametrize("model_type", ["llama", "jamba", "zamba2", "nemotron_h", "bamba", "lfm2", "qwen3_5_text"])
def test_generation_from_prompts_of_several_turns(model_type, without_hooks):
    stock = build(model_type, "eager").eval()
    for name, arguments in GENERATION.items():
        call = {**turns(), **GREEDY, **arguments}
        expected = without_hooks(stock.generate, **call)
        for attention in ("eager", "sdpa", NAME):
            model = (load(model_type) if attention == NAME else build(model_type, attention)).eval()
            assert torch.equal(model.generate(**call), expected), (name, attention)


@pytest.mark.parametrize("model_type", ["llama", "jamba", "zamba2", "nemotron_h"])
def test_generation_from_prompts_that_end_in_padding(model_type, without_hooks):
    """generate() then counts on from the padding's position. Under ours, what a padding token answers is its own."""
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 0]])
    prompt = dict(input_ids=torch.arange(3, 13).view(2, 5), attention_mask=mask)
    stock = build(model_type, "eager").eval()
    for arguments in GENERATION.values():
        call = {**prompt, **GREEDY, **arguments}
        expected = without_hooks(stock.generate, **call)
        for attention in ("eager", "sdpa"):
            assert torch.equal(build(model_type, attention).eval().generate(**call), expected), attention
        assert load(model_type).eval().generate(**call).shape == expected.shape


def test_a_sample_behind_padding_is_not_taken_for_its_continuation(kernel):
    """RoBERTa's kind counts from 2 and gives padding 1, so the first token of a sample counts on from padding."""
    model = load("xlm-roberta").eval()
    call = dict(input_ids=torch.tensor([[5, 6, 7, 1, 8, 9]]), attention_mask=torch.tensor([[1, 1, 1, 0, 1, 1]]))
    with pytest.raises(ValueError, match="attention_mask must be left out or mask nothing in a packed call"):
        model(**call, position_ids=torch.tensor([[2, 3, 4, 1, 2, 3]]))


@pytest.mark.parametrize("model_type", ["llama", "lfm2", "bamba"])
def test_generation_in_steps_of_several_tokens(model_type):
    """Tokens that come several at a time beside a cache: guesses from the prompt, and a prompt read in chunks."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    expected = stock.generate(prompt, **{**GREEDY, "max_new_tokens": 6})
    for arguments in (dict(prompt_lookup_num_tokens=3), dict(prefill_chunk_size=4)):
        if model_type == "llama" or "prefill_chunk_size" in arguments:  # states cannot be rolled back
            assert torch.equal(model.generate(prompt, **{**GREEDY, "max_new_tokens": 6}, **arguments), expected)


@pytest.mark.parametrize("model_type", [name for name in MODELS if name not in (*ENCODERS, *WITHOUT_ATTENTION)])
def test_static_cache_c93(model_type):
    """C93: the tokens of a dynamic cache under eager attention, one prompt and a left-padded batch."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    for prompt in (dict(input_ids=torch.tensor([samples([6])[0]["input_ids"]])), left_padded([3, 8])):
        call = {**prompt, **GREEDY, "max_new_tokens": 6}
        assert torch.equal(model.generate(**call, cache_implementation="static"), stock.generate(**call))


# ---- masks that the caller prepares ----


def prepared(visible, dtype=torch.float32):
    """An additive mask ``[1, 1, T, T]`` of what each token sees."""
    mask = torch.zeros(1, 1, *visible.shape, dtype=dtype)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


BRANCHES = torch.tensor([[0, 1, 2, 3, 3, 3]])


def branches():
    """Three ends of one beginning: each sees the beginning and itself."""
    visible = torch.ones(6, 6).tril().bool()
    visible[4, 3] = visible[5, 3] = visible[5, 4] = False
    return visible


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba", "jamba", "kimi_linear"])
def test_positions_that_branch_are_refused(model_type, attention, kernel):
    """A tree is no pack to attention and several to the other layers, whose states cannot branch."""
    model = build(model_type, attention).train()
    call = dict(input_ids=torch.arange(3, 9)[None], position_ids=BRANCHES)
    for mask in (prepared(branches()), branches()[None, None]):
        with pytest.raises(ValueError, match=f"^{type(model).__name__}: attention_mask must "):
            model(**call, attention_mask=mask)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba"])
def test_prepared_mask_of_a_pack(model_type, attention, without_hooks, without_plain_calls):
    """One that cuts where the positions do says the same, so it is served; one for a single sample is left alone."""
    model = build(model_type, attention).train()
    batch = pack(model_type, lengths=[5, 3])
    sample = torch.tensor([0] * 5 + [1] * 3)
    visible = (sample[:, None] == sample) & torch.ones(8, 8).tril().bool()
    with torch.no_grad():
        expected = model(**batch).logits
        assert_logits_equal(model(**batch, attention_mask=prepared(visible)).logits, expected)
        prefix = torch.ones(8, 8).tril().bool()
        prefix[:, :3] = True
        alone = dict(input_ids=batch["input_ids"], position_ids=torch.arange(8)[None], attention_mask=prepared(prefix))
        expected = without_hooks(lambda: model(**alone).logits)
        assert torch.equal(without_plain_calls(lambda: model(**alone).logits), expected)
        assert_logits_equal(model(**alone).logits, expected)


def test_static_cache_beside_a_pack(kernel):
    for model_type in ("llama", "bamba", "qwen3_5_text"):
        model = load(model_type).eval()
        cache = StaticCache(config=model.config, max_cache_len=16)
        with pytest.raises(ValueError, match=f"^{type(model).__name__}: past_key_values must .*StaticCache"):
            model(**pack(lengths=[5, 3]), past_key_values=cache)
