"""How a call of a whole model may tell its samples: each spelling is served as the samples alone, or refused by name.

One table of well-formed spellings, one of faults, and random mixtures of several spellings, some of them wrong, where a
call that is accepted keeps apart the samples of all its spellings. Malformed offsets and labels by themselves are in
test_boundaries_models.py.
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.models.tiny_models import (
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    first_position,
    load,
    run,
    samples,
)

pytestmark = pytest.mark.usefixtures("kernel")

# Attention alone, with each kind of mixing layer, without attention and with a forward that drops keywords, an encoder.
MODELS = [
    "llama", "gemma2", "gpt2", "lfm2", "bamba", "jamba", "qwen3_5_text", "kimi_linear", "mamba", "mamba2", "zamba2",
    "nemotron_h", "xlm-roberta", "modernbert",
]  # fmt: skip

LENGTHS = [5, 9, 3, 1]
TOKENS = sum(LENGTHS)
OFFSETS = [0, *itertools.accumulate(LENGTHS)]


def row(*values, dtype=torch.long):
    return torch.tensor([[*values]], dtype=dtype)


def repeated(values, dtype=torch.long):
    """Each value as often as the sample has tokens."""
    return row(*itertools.chain(*([value] * length for value, length in zip(values, LENGTHS))), dtype=dtype)


def counted(start=0):
    return row(*itertools.chain(*(range(start, start + length) for length in LENGTHS)))


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


NUMBERS = repeated([1, 2, 3, 4])
LABELS = repeated([0, 1, 2, 3], torch.int32)


@pytest.fixture(scope="module")
def models():
    """model type -> a model under our attention, in evaluation, and the stock logits of the samples alone."""
    known = {}

    def of(model_type):
        if model_type not in known:
            stock = build(model_type, "eager").eval()
            with torch.no_grad():
                logits = torch.cat([stock(**sample).logits[0] for sample in alone(LENGTHS)])
            known[model_type] = load(model_type).eval(), logits
        return known[model_type]

    return of


def ids():
    return row(*itertools.chain(*(sample["input_ids"] for sample in samples(LENGTHS))))


# Spelling -> what the call has beside input_ids; a function of the first position where it holds positions.
SERVED = {
    "positions": lambda first: dict(position_ids=counted(first)),
    "positions without a row": lambda first: dict(position_ids=counted(first)[0]),
    "positions of 32 bits": lambda first: dict(position_ids=counted(first).int()),
    "offsets": lambda first: dict(cu_seq_lens_q=offsets(*OFFSETS)),
    "offsets as a list": lambda first: dict(cu_seq_lens_q=OFFSETS),
    "offsets of keys alone": lambda first: dict(cu_seq_lens_k=offsets(*OFFSETS)),
    "offsets without the end": lambda first: dict(cu_seq_lens_q=offsets(0, 5), position_ids=counted(first)),
    "offsets without the last": lambda first: dict(cu_seq_lens_q=offsets(0, 5, 14, 17), position_ids=counted(first)),
    "offsets cut to one": lambda first: dict(
        cu_seq_lens_q=offsets(0), cu_seq_lens_k=offsets(0), max_length_q=9, max_length_k=9, position_ids=counted(first)
    ),
    "offsets cut to one beside labels": lambda first: dict(cu_seq_lens_q=offsets(0), seq_idx=LABELS),
    "labels": lambda first: dict(seq_idx=LABELS),
    "numbers": lambda first: dict(attention_mask=NUMBERS),
    "numbers of 8 bits": lambda first: dict(attention_mask=NUMBERS.to(torch.uint8)),
    "numbers of 32 bits": lambda first: dict(attention_mask=NUMBERS.int()),
    "numbers with gaps": lambda first: dict(attention_mask=repeated([2, 3, 7, 9])),
    "numbers beside positions": lambda first: dict(attention_mask=NUMBERS, position_ids=counted(first)),
    "numbers beside offsets": lambda first: dict(attention_mask=NUMBERS, cu_seq_lens_q=offsets(*OFFSETS)),
    "numbers beside labels": lambda first: dict(attention_mask=NUMBERS, seq_idx=LABELS),
    "all": lambda first: dict(
        attention_mask=NUMBERS, seq_idx=LABELS, cu_seq_lens_q=offsets(*OFFSETS), cu_seq_lens_k=OFFSETS,
        max_length_q=9, max_length_k=9, position_ids=counted(first),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("spelling", SERVED)
def test_served(models, model_type, spelling):
    model, expected = models(model_type)
    call = SERVED[spelling](first_position(model_type))
    with torch.no_grad():
        assert_logits_equal(model(input_ids=ids(), **call).logits[0], expected)


@pytest.mark.parametrize("model_type", ["llama", "bamba", "qwen3_5_text", "mamba", "xlm-roberta"])
def test_gradients_of_sample_numbers(model_type):
    model = load(model_type).train()
    logits, gradients = run(model, [dict(input_ids=ids(), attention_mask=NUMBERS)])
    expected, expected_gradients = run(build(model_type, "eager").train(), alone(LENGTHS))
    assert_logits_equal(logits, expected)
    assert_gradients_equal(gradients, expected_gradients)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("before, between, after", [(0, 0, 4), (3, 0, 0), (0, 2, 0), (1, 2, 3)])
def test_padding_beside_sample_numbers(models, model_type, before, between, after):
    """Padding in front, between samples and at the end, with positions and without; several rows with it."""
    model, expected = models(model_type)
    place = [before] * LENGTHS[0] + [before + between] * (TOKENS - LENGTHS[0])
    place = torch.arange(TOKENS) + torch.tensor(place)
    width = before + TOKENS + between + after
    batch = {name: torch.zeros(1, width, dtype=torch.long) for name in ("input_ids", "attention_mask", "position_ids")}
    batch["position_ids"] += first_position(model_type)
    for name, values in zip(batch, (ids(), NUMBERS, counted(first_position(model_type)))):
        batch[name][:, place] = values
    with torch.no_grad():
        assert_logits_equal(model(**batch).logits[0, place], expected)
        del batch["position_ids"]
        assert_logits_equal(model(**batch).logits[0, place], expected)
        two = {name: torch.cat([value, value.flip(1)]) for name, value in batch.items()}
        two["attention_mask"][1] = (5 - two["attention_mask"][1]) * (two["attention_mask"][1] != 0)
        assert_logits_equal(model(**two).logits[0, place], expected)


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sample_numbers_under_stock_attention(models, model_type, attention):
    """The mask that transformers builds of positions cuts the attention, our functions the rest."""
    model = build(model_type, attention).eval()
    with torch.no_grad():
        for call in (dict(attention_mask=NUMBERS), dict(attention_mask=NUMBERS, position_ids=counted())):
            assert_logits_equal(model(input_ids=ids(), **call).logits[0], models(model_type)[1])


@pytest.mark.parametrize("model_type", ["llama", "bamba", "lfm2", "mamba", "xlm-roberta"])
def test_one_number_a_row_is_an_ordinary_mask(model_type):
    """Rows 1, 1, 1 and 2, 2, 0 hold a sample each: the batch is that of the mask of 0 and 1."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    batch = ids()[:, :12].view(2, 6)
    numbers = torch.tensor([[1] * 6, [2] * 4 + [0] * 2])
    with torch.no_grad():
        expected = stock(input_ids=batch, attention_mask=(numbers != 0).long()).logits
        assert_logits_equal(model(input_ids=batch, attention_mask=numbers).logits[numbers != 0], expected[numbers != 0])
        twos = torch.full_like(batch, 2)
        assert_logits_equal(model(input_ids=batch, attention_mask=twos).logits, stock(input_ids=batch).logits)


MERGED = counted()
MERGED_NUMBERS = repeated([1, 2, 2, 3])

# Fault -> the argument that is named, the exception, and what the call has beside input_ids.
REFUSED = {
    "cu_seqlens": ("cu_seqlens", ValueError, dict(cu_seqlens=offsets(*OFFSETS))),
    "cu_seqlens beside offsets": (
        "cu_seqlens", ValueError, dict(cu_seqlens=offsets(0, 5, 18), cu_seq_lens_q=offsets(*OFFSETS)),
    ),
    "cu_seqlens_q": ("cu_seqlens_q", ValueError, dict(cu_seqlens_q=offsets(*OFFSETS))),
    "packed_seq_lengths": ("packed_seq_lengths", ValueError, dict(packed_seq_lengths=torch.tensor(LENGTHS))),
    "seq_lens": ("seq_lens", ValueError, dict(seq_lens=LENGTHS)),
    "segment_ids": ("segment_ids", ValueError, dict(segment_ids=LABELS)),
    "max_seqlen": ("max_seqlen", ValueError, dict(max_seqlen=9)),
    "longest alone": ("max_length_q", ValueError, dict(max_length_q=9)),
    "longest key alone": ("max_length_k", ValueError, dict(max_length_k=9, position_ids=torch.arange(TOKENS)[None])),
    "one offset": ("cu_seq_lens_q", ValueError, dict(cu_seq_lens_q=offsets(0))),
    "one offset beside positions that count on": (
        "cu_seq_lens_q", ValueError, dict(cu_seq_lens_q=offsets(0), position_ids=torch.arange(TOKENS)[None]),
    ),
    "one offset and a longest sample beside positions that count on": (
        "max_length_q", ValueError,
        dict(cu_seq_lens_q=offsets(0), max_length_q=9, position_ids=torch.arange(TOKENS)[None]),
    ),
    "offsets that merge": ("cu_seq_lens_q", ValueError, dict(cu_seq_lens_q=offsets(0, 5, 18), position_ids=MERGED)),
    "offsets that merge all": ("cu_seq_lens_q", ValueError, dict(cu_seq_lens_q=offsets(0, 18), position_ids=MERGED)),
    "labels that merge": ("seq_idx", ValueError, dict(seq_idx=repeated([0, 1, 1, 2]), position_ids=MERGED)),
    "labels that merge one-token samples": (
        "seq_idx", ValueError, dict(seq_idx=row(*[0] * 18), position_ids=row(*[0] * 18)),
    ),
    "numbers that merge": ("attention_mask", ValueError, dict(attention_mask=MERGED_NUMBERS, position_ids=MERGED)),
    "numbers beside positions that count on": (
        "attention_mask", ValueError, dict(attention_mask=NUMBERS, position_ids=torch.arange(TOKENS)[None]),
    ),
    "numbers against offsets": (
        "attention_mask", ValueError, dict(attention_mask=MERGED_NUMBERS, cu_seq_lens_q=offsets(*OFFSETS)),
    ),
    "numbers against offsets that end early": (
        "attention_mask", ValueError, dict(attention_mask=NUMBERS, cu_seq_lens_q=offsets(0, 5, 14)),
    ),
    "numbers against labels": ("attention_mask", ValueError, dict(attention_mask=MERGED_NUMBERS, seq_idx=LABELS)),
    "numbers that fall": ("attention_mask", ValueError, dict(attention_mask=repeated([4, 3, 2, 1]))),
    "numbers that come back": ("attention_mask", ValueError, dict(attention_mask=repeated([1, 2, 1, 2]))),
    "numbers with a hole": ("attention_mask", ValueError, dict(attention_mask=row(1, 0, *[1] * 4, *[2] * 12))),
    "numbers as floats": ("attention_mask", TypeError, dict(attention_mask=NUMBERS.float())),
    "an additive mask": ("attention_mask", TypeError, dict(attention_mask=row(*[0.0] * 17, -1e9, dtype=torch.float))),
    "negative numbers": ("attention_mask", ValueError, dict(attention_mask=repeated([1, 2, 3, -1]))),
    "numbers of other tokens": ("attention_mask", ValueError, dict(attention_mask=torch.cat([NUMBERS, NUMBERS], 1))),
    "numbers beside a cache": ("use_cache", ValueError, dict(attention_mask=NUMBERS, use_cache=True)),
    "positions beside a cache": ("use_cache", ValueError, dict(position_ids=counted(), use_cache=True)),
    "two rows of rotary positions": ("position_ids", ValueError, dict(position_ids=counted().expand(2, 1, TOKENS))),
    "rotary positions of other rows": ("position_ids", ValueError, dict(position_ids=counted().expand(3, 2, TOKENS))),
    "positions of four axes": ("position_ids", ValueError, dict(position_ids=counted()[None, None])),
    "too few positions": ("position_ids", ValueError, dict(position_ids=counted()[0, :9])),
    "positions as bools": ("position_ids", TypeError, dict(position_ids=counted().bool())),
    "wrong positions beside offsets": (
        "position_ids", ValueError, dict(position_ids=counted()[:, :9], cu_seq_lens_q=offsets(*OFFSETS)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "lfm2", "mamba", "xlm-roberta"])
@pytest.mark.parametrize("fault", REFUSED)
def test_refused(models, model_type, fault):
    argument, error, call = REFUSED[fault]
    model, _ = models(model_type)
    with pytest.raises(error, match=f"^{type(model).__name__}: {argument} must "):
        model(input_ids=ids(), **call)


@pytest.mark.parametrize("model_type", ["llama", "lfm2", "bamba", "qwen3_5_text", "kimi_linear", "jamba", "zamba2"])
def test_cache_object_beside_a_pack(models, model_type):
    """A cache in the call, full or empty, is refused as use_cache=True is; beside one sample all is as without us."""
    model, _ = models(model_type)
    stock = build(model_type, "eager").eval()
    for call in (SERVED["positions"](0), SERVED["labels"](0), SERVED["numbers"](0)):
        with pytest.raises(ValueError, match=f"^{type(model).__name__}: past_key_values must "), torch.no_grad():
            model(input_ids=ids(), past_key_values=DynamicCache(config=model.config), **call)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for start, end in ((0, 7), (7, 13), (13, 14), (14, TOKENS)):
            call = dict(input_ids=ids()[:, start:end], position_ids=torch.arange(start, end)[None])
            got, expected = (one(**call, past_key_values=cache) for one, cache in zip((model, stock), caches))
            assert_logits_equal(got.logits, expected.logits)


# ---- several spellings at once ----

_cuts = st.lists(st.integers(1, TOKENS - 1), max_size=5, unique=True).map(sorted)
_spelling = st.sampled_from(["position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"])


def spelled(name, cuts):
    """One argument that tells samples which end at ``cuts`` and at the end of the row."""
    ends = [0, *cuts, TOKENS]
    lengths = [right - left for left, right in zip(ends, ends[1:])]
    if name == "cu_seq_lens_q":
        return offsets(*ends)
    if name == "position_ids":
        return row(*itertools.chain(*map(range, lengths)))
    first = 1 if name == "attention_mask" else 0
    return row(*itertools.chain(*([number] * length for number, length in enumerate(lengths, first))))


def stock_logits(stock, tokens, cuts):
    ends = [0, *cuts, TOKENS]
    return torch.cat([stock(input_ids=tokens[:, left:right]).logits[0] for left, right in zip(ends, ends[1:])])


@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_any_mixture_is_right_or_refused(model_type):
    """Spellings that agree are served. Where they do not, the call is refused, or keeps apart what any of them does."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    tokens = ids()
    accepted, refused = [], []

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(told=st.dictionaries(_spelling, _cuts, min_size=1), common=_cuts, agree=st.booleans(), drop=st.booleans())
    def check(told, common, agree, drop):
        if agree:
            told = dict.fromkeys(told, common)
        call = {name: spelled(name, cuts) for name, cuts in told.items()}
        if drop and "cu_seq_lens_q" in call:
            call["cu_seq_lens_q"] = call["cu_seq_lens_q"][:-1]
        together = sorted(set().union(*told.values()))
        try:
            got = model(input_ids=tokens, use_cache=False, **call).logits[0]
        except (TypeError, ValueError) as error:
            assert not agree or drop, error
            assert any(f"{name} must " in str(error) for name in call), error
            refused.append(call)
            return
        # Without its last offset the row ends in padding, unless positions show samples there.
        end = TOKENS
        if drop and "position_ids" not in call and len(call.get("cu_seq_lens_q", [])) > 1:
            end = int(call["cu_seq_lens_q"][-1])
        if together or len(call) > 1:
            accepted.append(call)
        assert_logits_equal(got[:end], stock_logits(stock, tokens, together)[:end])

    with torch.no_grad():
        check()
    assert len(accepted) > 10 and len(refused) > 10
