"""Heads that give one result a sample: one score for each sample of a pack, equal to the sample alone (C66)."""

import inspect
import re

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaForSequenceClassification, LlamaPreTrainedModel

from tests.models import tiny_models
from tests.models.head_models import CASES, build, first_position, packed
from tests.models.tiny_models import (
    LENGTHS,
    SETTINGS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    pack,
    samples,
)

LABELS = torch.tensor([2, 0, 1, 1, 0])


def results(model, batches, labels=None):
    """Logits ``[N, num_labels]``, the mean loss, and the gradients of that loss."""
    model.zero_grad()
    logits, losses = [], []
    for index, batch in enumerate(batches):
        extra = {} if labels is None else {"labels": labels if len(batches) == 1 else labels[index : index + 1]}
        output = model(**batch, **extra)
        logits.append(output.logits)
        if labels is not None:
            losses.append(output.loss)
    if labels is None:
        return torch.cat(logits)
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(logits).detach(), loss.detach(), gradients


def check(got, expected):
    assert_logits_equal(got[0], expected[0])
    assert_logits_equal(got[1], expected[1])
    assert_gradients_equal(got[2], expected[2])


@pytest.mark.parametrize("model_type, index", CASES)
def test_one_score_a_sample(kernel, model_type, index):
    expected = results(build(model_type, index, "eager"), alone(), LABELS)
    model = build(model_type, index)
    for setting in SETTINGS:
        check(results(model, [packed(model_type, setting)], LABELS), expected)
    model.eval()
    with torch.no_grad():
        assert_logits_equal(results(model, [packed(model_type, "position_ids")]), expected[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type, index", [("llama", 0), ("qwen3_5_text", 0), ("bert", 0), ("modernbert", 1)])
def test_with_checkpointing(kernel, model_type, index, reentrant):
    expected = results(build(model_type, index, "eager").train(), alone(), LABELS)
    model = build(model_type, index).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for setting in SETTINGS:
        check(results(model, [packed(model_type, setting)], LABELS), expected)


PROBLEMS = {
    "regression": (1, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5])),
    "regression of several": (2, torch.randn(5, 2, generator=torch.Generator().manual_seed(0))),
    "single_label": (3, LABELS),
    "multi_label": (3, torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]])),
}


@pytest.mark.parametrize("model_type", ["llama", "bert", "modernbert", "gpt2"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_labels_of_each_problem_type(kernel, model_type, problem):
    num_labels, labels = PROBLEMS[problem]
    kind = "regression" if problem.startswith("regression") else f"{problem}_classification"
    expected = results(build(model_type, 0, "eager", num_labels=num_labels, problem_type=kind), alone(), labels)
    for given_kind in (kind, None if problem != "regression of several" else kind):
        model = build(model_type, num_labels=num_labels, problem_type=given_kind)
        for shaped in (labels, labels[None]):
            check(results(model, [packed(model_type, "position_ids")], shaped), expected)


@pytest.mark.parametrize("model_type", ["llama", "bert", "modernbert"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_labels_that_are_not_one_a_sample_are_refused(kernel, model_type, setting):
    model = build(model_type)
    for labels in (packed(model_type, setting)["input_ids"], LABELS[:4], LABELS[:1]):
        with pytest.raises(ValueError, match="labels must hold one label for each of the 5 samples"):
            model(**packed(model_type, setting), labels=labels)


@pytest.mark.parametrize("model_type", ["llama", "zamba2", "gpt2"])
def test_last_token_is_the_last_that_is_no_padding(kernel, model_type):
    """Many tokenizers pad with the token that ends a sample, which a head then does not read."""
    model, stock = build(model_type), build(model_type, 0, "eager")
    batch, single = packed(model_type, "position_ids"), alone()
    ends = torch.tensor(LENGTHS).cumsum(0)
    batch["input_ids"][0, ends[1] - 2 : ends[1]] = 0  # two at the end of a sample
    batch["input_ids"][0, ends[3] - LENGTHS[3] : ends[3]] = 0  # nothing else in a sample
    for one, ids in zip(single, batch["input_ids"][0].split(LENGTHS)):
        one["input_ids"] = ids[None]
    check(results(model, [batch], LABELS), results(stock, single, LABELS))
    embedded = {**batch, "inputs_embeds": model.get_input_embeddings()(batch.pop("input_ids"))}
    del embedded["input_ids"]
    for one in single:
        one["inputs_embeds"] = stock.get_input_embeddings()(one.pop("input_ids"))
    check(results(model, [embedded], LABELS), results(stock, single, LABELS))


@pytest.mark.parametrize("model_type, index", [("llama", 0), ("bert", 0), ("modernbert", 0), ("modernbert", 1)])
def test_padding_and_empty_sequences_have_no_score(kernel, model_type, index):
    expected = results(build(model_type, index, "eager"), alone(), LABELS)
    model, tokens = build(model_type, index), sum(LENGTHS)
    rows = [sample["input_ids"] for sample in samples(LENGTHS)]
    ids = torch.tensor([sum(rows, []) + [7, 8, 9]])
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS)).tolist() + [-1] * 3
    tail = dict(input_ids=ids, seq_idx=torch.tensor([labels], dtype=torch.int32))
    check(results(model, [tail], LABELS), expected)
    empty = torch.cat([offsets[:2], offsets[1:], offsets[-1:]])
    short = dict(input_ids=ids[:, :tokens], cu_seq_lens_q=empty, cu_seq_lens_k=empty)
    check(results(model, [short], LABELS), expected)
    # Two rows, each with padding at its end.
    split = [sum(rows[:2], []), sum(rows[2:], [])]
    longest = max(map(len, split)) + 2
    two = dict(
        input_ids=torch.tensor([row + [5] * (longest - len(row)) for row in split]),
        seq_idx=torch.tensor(
            [
                [0] * 5 + [1] * 9 + [-1] * (longest - 14),
                [0] * 17 + [1] * 3 + [2] * 1 + [-1] * (longest - 21),
            ]
        ),
    )
    check(results(model, [two], LABELS), expected)


@pytest.mark.parametrize(
    "model_type, index, setting",
    [
        ("llama", 0, "position_ids"),
        ("llama", 0, "cu_seq_lens"),
        ("bert", 0, "position_ids"),
        ("modernbert", 1, "seq_idx"),
    ],
)
def test_compiled_without_a_break_for_any_number_of_samples(kernel, model_type, index, setting):
    """One graph more once the number of samples turns dynamic, and one once the number of tokens does."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = build(model_type, index, num_hidden_layers=1, layer_types=None).train()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for lengths in ([5, 9, 17, 3], [6, 28], [4, 4, 4, 4, 8, 16], [30, 2, 7]):
        batch = packed(model_type, setting, lengths=lengths)
        labels = torch.arange(len(lengths)) % 3
        ours, plain = compiled(**batch, labels=labels), model(**batch, labels=labels)
        assert_logits_equal(ours.logits, plain.logits)
        assert_logits_equal(ours.loss, plain.loss)
    assert len(graphs) <= 3
    if setting == "position_ids":
        with pytest.raises(RuntimeError, match="one label for each"):
            compiled(**batch, labels=labels[:-1])


def test_compiled_without_labels(kernel):
    """How many samples there are is a shape of the result: offsets say it, positions do not."""
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1).eval()
    told, positions = packed("llama", "cu_seq_lens"), packed("llama", "position_ids")
    with torch.no_grad():
        expected = model(**positions).logits
        assert_logits_equal(torch.compile(model, fullgraph=True, backend="eager")(**told).logits, expected)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="cu_seq_lens_q must be given when|Observed exception"):
            torch.compile(model, fullgraph=True, backend="eager")(**positions, use_cache=False)
        # Without fullgraph the error sends the head back to eager mode, where the values tell.
        torch._dynamo.reset()
        assert_logits_equal(torch.compile(model, backend="eager")(**positions, use_cache=False).logits, expected)


def test_no_sample_reaches_the_score_of_another(kernel):
    for model_type, index in (("llama", 0), ("bert", 0), ("modernbert", 1)):
        model = build(model_type, index).eval()
        batch = packed(model_type, "position_ids")
        with torch.no_grad():
            before = model(**batch).logits
            batch["input_ids"][0, : LENGTHS[0]] = torch.randint(3, 100, (LENGTHS[0],))
            after = model(**batch).logits
        assert not torch.equal(before[0], after[0]) and torch.equal(before[1:], after[1:])


@pytest.mark.parametrize("model_type", ["llama", "bert", "modernbert", "opt"])
def test_what_is_no_pack_is_as_without_hooks(kernel, model_type):
    model = build(model_type).eval()
    rows = [sample["input_ids"] for sample in samples(LENGTHS)]
    ids = torch.tensor([row + [0] * (17 - len(row)) for row in rows])
    padded = dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=LABELS)
    one = dict(input_ids=ids[2:3], position_ids=torch.arange(17)[None] + first_position(model_type), labels=LABELS[2:3])
    found = []
    for hooked in (True, False):
        if not hooked:
            kernel.remove_hooks()
        try:
            for mode in (model.eval(), model.train()):
                with torch.no_grad():
                    found.append([tuple(mode(**batch).to_tuple()[:2]) for batch in (padded, one)])
        finally:
            kernel.install_hooks()
    for left, right in zip(found[:2], found[2:]):
        for ours, theirs in zip(left, right):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_pooled_output_of_an_encoder(kernel):
    for model_type in ("bert", "xlm-roberta", "xmod"):
        stock = build(model_type, 0, "eager", auto=AutoModel).eval()
        model = build(model_type, auto=AutoModel).eval()
        with torch.no_grad():
            expected = torch.cat([stock(**one).pooler_output for one in alone()])
            for setting in SETTINGS:
                output = model(**packed(model_type, setting))
                assert_logits_equal(output.pooler_output, expected)
                assert output.last_hidden_state.shape[:2] == (1, sum(LENGTHS))


def test_heads_that_give_one_result_a_token_stay(kernel):
    for model_type in ("llama", "bert", "modernbert"):
        for auto in (AutoModelForTokenClassification, AutoModelForQuestionAnswering):
            expected = [build(model_type, 0, "eager", auto=auto, num_labels=2).eval()(**one) for one in alone()]
            got = build(model_type, auto=auto, num_labels=2).eval()(**packed(model_type, "cu_seq_lens"))
            name = "logits" if auto is AutoModelForTokenClassification else "start_logits"
            assert_logits_equal(got[name][0], torch.cat([one[name][0] for one in expected]))


def test_sentence_pair_heads(kernel):
    stock = build("bert", 0, "eager", auto=AutoModelForNextSentencePrediction)
    pairs = torch.tensor([0, 1, 1, 0, 1])
    check(
        results(build("bert", auto=AutoModelForNextSentencePrediction), [packed("bert", "seq_idx")], pairs),
        results(stock, alone(), pairs),
    )
    both = build("bert", auto=AutoModelForPreTraining).eval()
    output = both(
        **packed("bert", "position_ids"), next_sentence_label=pairs, labels=packed("bert", "seq_idx")["input_ids"]
    )
    assert output.seq_relationship_logits.shape == (5, 2) and output.loss.isfinite()


class RewardModel(LlamaForSequenceClassification):
    """A user's head: the scores of the one it inherits, times two."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = 2 * output.logits
        return output


class FirstTokenModel(LlamaPreTrainedModel):
    """A user's head that knows nothing of packs."""

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.score(hidden[:, 0]))


def own(cls, **changes):
    config = tiny_models.config("llama", num_labels=3, **changes)
    config._attn_implementation = build("llama").config._attn_implementation
    return tiny_models.redraw(cls(config)).eval()


def test_a_head_of_the_users_own(kernel):
    batch = packed("llama", "position_ids")
    assert_logits_equal(own(RewardModel)(**batch).logits, 2 * own(LlamaForSequenceClassification)(**batch).logits)
    with pytest.raises(ValueError, match=r"FirstTokenModel .*its logits \(1, 3\) hold one result for each row"):
        own(FirstTokenModel)(**batch)
    assert own(FirstTokenModel)(**alone()[0]).logits.shape == (1, 3)


def test_without_a_padding_token(kernel):
    """As for a padded batch, the head must know which token is none of a sample's."""
    model = own(LlamaForSequenceClassification, pad_token_id=None)
    with pytest.raises(ValueError, match="config.pad_token_id must be set"):
        model(**packed("llama", "position_ids"))
    assert model(**alone()[0]).logits.shape == (1, 3)


def refused_models():
    clip = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    configurations = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    yield "CLIPTextModel", lambda name: transformers.CLIPTextModel(_named(transformers.CLIPTextConfig(**clip), name))
    yield (
        "SiglipTextModel",
        lambda name: transformers.SiglipTextModel(_named(transformers.SiglipTextConfig(**clip), name)),
    )
    yield (
        "AlbertModel",
        lambda name: transformers.AlbertModel(_named(configurations["albert"](**{**clip, "embedding_size": 16}), name)),
    )
    yield (
        "GPT2DoubleHeadsModel",
        lambda name: transformers.GPT2DoubleHeadsModel(_named(tiny_models.config("gpt2", num_labels=1), name)),
    )
    yield "EuroBertForSequenceClassification", lambda name: build("eurobert", classifier_pooling="late")


def _named(config, name):
    config._attn_implementation = name
    return config


@pytest.mark.parametrize("name, make", list(refused_models()), ids=[name for name, _ in refused_models()])
def test_what_reads_a_row_in_another_way_is_refused_before_it_computes(kernel, name, make):
    model = make(build("llama").config._attn_implementation).eval()
    computed = []
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda *_: computed.append(1))
    for setting in SETTINGS:
        with pytest.raises(ValueError, match=rf"{name} \(model type .* cannot run on packed samples: .*padded batches"):
            model(**pack("llama", setting, use_cache=False))
    assert not computed
    model(**alone()[0])


def test_an_encoder_without_its_pooling_layer_is_not_refused(kernel):
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING["albert"](
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=64, embedding_size=16,
    )  # fmt: skip
    config._attn_implementation = build("llama").config._attn_implementation
    model = transformers.AlbertModel(config, add_pooling_layer=False).eval()
    assert model(**pack("llama", "position_ids")).last_hidden_state.shape == (1, sum(LENGTHS), 32)


def test_multiple_choice_is_refused(kernel):
    for model_type in ("bert", "modernbert"):
        model = build(model_type, auto=AutoModelForMultipleChoice).eval()
        ids = torch.randint(3, 100, (1, 2, 8))
        packed_rows = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(1, 2, 8)
        with pytest.raises(ValueError, match="ForMultipleChoice .*choices of a sample are rows of their own"):
            model(input_ids=ids, position_ids=packed_rows)
        assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape == (1, 2)


def test_a_loss_over_the_row_is_refused(kernel):
    for model_type in ("llama", "bert"):
        model = build(model_type, auto=AutoModelForQuestionAnswering, num_labels=2).eval()
        spans = dict(start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))
        with pytest.raises(ValueError, match="start_positions, is a softmax over all tokens of the row"):
            model(**packed(model_type, "position_ids"), **spans)
        assert model(**alone()[1], **spans).loss.isfinite()


def test_embeddings_that_join_neighbours_are_refused(kernel):
    config = transformers.MobileBertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=128,
        embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match="mobilebert.*neighbouring tokens"):
        config._attn_implementation = build("llama").config._attn_implementation
        transformers.MobileBertForSequenceClassification(config)


# ---- the tables against transformers ----

_READS_A_ROW = re.compile(
    r"\[:, ?(0|-1)\b|argmax\(|\.(mean|sum)\((dim=)?1\b|\.pooler\(|pooled_output = outputs\[1\]|num_choices|_summary\("
)
# They match and give no result for a row of text: what they read are images, sound, queries or answers.
_SEEN = """
    CsmDepthDecoderModel DFineForObjectDetection Deimv2ForObjectDetection PPDocLayoutV2ForObjectDetection
    RTDetrForObjectDetection RTDetrV2ForObjectDetection CLIPSegForImageSegmentation
    InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration RagModel
    GradiumPhononTTSForConditionalGeneration PocketTTSForConditionalGeneration
    Qwen2_5OmniTalkerForConditionalGeneration MossTranscribeDiarizeModel VibeVoiceAsrModel
    BartForSequenceClassification MBartForSequenceClassification PLBartForSequenceClassification
"""


def _text_forwards():
    """Every class of transformers that defines a forward of tokens and can come up under our attention."""
    root = transformers.__path__[0]
    import glob
    import importlib

    for path in glob.glob(f"{root}/models/*/modeling_*.py"):
        try:
            importlib.import_module("transformers.models." + path[len(root) + 8 : -3].replace("/", "."))
        except ImportError:
            continue  # needs a library that is not installed
    waiting, seen = [transformers.PreTrainedModel], set()
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls not in seen and cls.__module__.startswith("transformers.models."):
                seen.add(cls)
                waiting.append(cls)
    for cls in sorted(seen, key=lambda cls: cls.__name__):
        forward = vars(cls).get("forward")
        tokens = forward and {"input_ids", "inputs_embeds"} & inspect.signature(forward).parameters.keys()
        if tokens and getattr(cls, "_supports_flash_attn", False):
            yield cls, inspect.getsource(inspect.unwrap(forward))


def test_every_class_that_reads_a_row_is_decided(kernel):
    kinds = _kinds(kernel)
    undecided = []
    for cls, source in _text_forwards():
        body = re.sub(r'""".*?"""', "", source, flags=re.S)
        lines = [line for line in body.splitlines() if not re.search(r"(image|video|audio|vision|qformer)_", line)]
        if not _READS_A_ROW.search("\n".join(lines)) or kinds.head_reads(cls) or cls.__name__ in _SEEN.split():
            continue
        poolers = [name for name in kinds.FIRST_TOKEN_MODULES if hasattr(inspect.getmodule(cls), name)]
        nested = re.search(r"text_(model|outputs|model_outputs)\b|self\.get_text_features", body)
        if not poolers and not nested:
            undecided.append(cls.__name__)
    assert not undecided


def test_first_token_modules_read_nothing_else(kernel):
    list(_text_forwards())
    found = set()
    for name, module in list(__import__("sys").modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for wanted in _kinds(kernel).FIRST_TOKEN_MODULES:
                cls = vars(module).get(wanted)
                if cls is not None and cls.__module__ == name:
                    source = inspect.getsource(inspect.unwrap(vars(cls)["forward"]))
                    argument = list(inspect.signature(inspect.unwrap(vars(cls)["forward"])).parameters)[1]
                    uses = re.findall(rf"\b{argument}\b(.{{0,5}})", source.split(":", 2)[2].split("->")[-1])
                    assert [use for use in uses if use.startswith("[:, 0")] == uses, (wanted, uses)
                    found.add(wanted)
    assert found == set(_kinds(kernel).FIRST_TOKEN_MODULES)


def _kinds(kernel):
    return __import__("importlib").import_module(f"{kernel.__name__}.hooks.head_kinds")


# ---- trainers ----


class ScoreCollator(transformers.DataCollatorWithFlattening):
    """One label a sample beside the flattened tokens."""

    def __call__(self, features, return_tensors=None, separator_id=None):
        batch = super().__call__([{"input_ids": f["input_ids"]} for f in features], return_tensors or "pt")
        return {**batch, "labels": torch.tensor([feature["label"] for feature in features])}


def test_trainer_on_packs(kernel, tmp_path):
    data = [{**sample, "label": int(label)} for sample, label in zip(samples(LENGTHS), LABELS)]
    model = build("llama")
    expected = results(build("llama", 0, "eager"), alone(), LABELS)[1]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=5, max_steps=1, logging_steps=1, report_to=[],
        use_cpu=True, remove_unused_columns=False, learning_rate=0.0, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=ScoreCollator())
    assert trainer.train().training_loss == pytest.approx(float(expected), rel=1e-5)
