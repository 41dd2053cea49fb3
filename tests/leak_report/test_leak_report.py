"""``leak_report``: stock transformers leaks where it does, ours does not, and the report says where and why."""

import sys

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from PIL import Image
from transformers import AttentionInterface, AutoModelForTokenClassification

from tests.hooks.test_hooks_multimodal import qwen
from tests.models import head_models
from tests.models.tiny_models import LOGIT_TOLERANCE, NAME, SETTINGS, build, first_position, load, pack

SECOND_SAMPLE = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring on models this small, much more where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def hooks_in_place(kernel):
    """Tests that take the hooks off put them back; none may leave them off."""
    assert kernel.hooks_status().installed
    yield
    assert kernel.hooks_status().installed


@pytest.fixture
def stock(kernel):
    """transformers without our hooks."""
    kernel.remove_hooks()
    yield
    kernel.install_hooks()


def verdicts(report):
    return [(row.layer, row.verdict) for row in report.layers]


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


# ---- stock and ours ----

STOCK = [
    # On position_ids alone, its functions are never told; with more, they refuse (below).
    ("qwen3_5_text", "position_ids", "gated delta rule", "inherits", "return_flash_attn_kwargs=True"),
    ("bamba", "position_ids", "Mamba-2", "inherits", "return_seq_idx=True"),
    # Its functions read seq_idx alone, and the model hands down everything it gets.
    ("bamba", "cu_seq_lens", "Mamba-2", "inherits", "return_seq_idx=True"),
    ("mamba", "position_ids", "Mamba-1", "leaks", "selective_scan_fn cannot be told boundaries"),
    ("mamba", "cu_seq_lens", "Mamba-1", "leaks", "return_seq_idx=True"),
    ("mamba", "seq_idx", "Mamba-1", "leaks", "seq_idx, which MambaForCausalLM drops on the way"),
]


@pytest.mark.parametrize("model_type, setting, kind, second, reason", STOCK)
def test_stock_leaks(kernel, stock, model_type, setting, kind, second, reason):
    report = kernel.leak_report(build(model_type, "eager"), pack(model_type, setting))
    assert report.leaks and report.verdict == "leaks"
    assert verdicts(report) == [("layers.0", "leaks"), ("layers.1", second)]
    assert report.layers[0].kind == kind
    assert all(row.first_token == SECOND_SAMPLE and row.first_sample == (1, 0) for row in report.layers)
    assert all(row.difference > 0.1 for row in report.layers) and report.layers[0].influence > 0.1
    assert report.sentence.startswith(f"Leak: layers.0 ({kind}) is the ") and "causal_conv1d_fn" in report.sentence
    assert reason in report.sentence and "hooks of packfree-kernels" in report.sentence


@pytest.mark.parametrize(
    "model_type, setting",
    [
        *[(name, setting) for name in ("qwen3_5_text", "bamba", "mamba") for setting in SETTINGS],
        # Experts, a mixer in two layers, two mixers in one layer, windows and sinks, an encoder, positions from 2.
        *[(name, "position_ids") for name in ("qwen3_next", "zamba2", "falcon_h1", "gpt_oss", "modernbert")],
        ("xlm-roberta", "position_ids"),
    ],
)
def test_ours_keeps_apart(kernel, model_type, setting):
    report = kernel.leak_report(load(model_type), pack(model_type, setting))
    assert report.verdict == "apart" and report.packed_equals_alone and not report.leaks
    assert {row.verdict for row in report.layers} == {"apart"} and len(report.layers) >= 2
    assert all(row.first_token is None for row in report.layers)
    assert all(row.difference < LOGIT_TOLERANCE * row.scale for row in report.layers)
    assert report.sentence.startswith("No leak: ") and "5 samples" in report.sentence
    if model_type not in ("qwen3_next", "gpt_oss"):  # experts get all samples in one matmul
        assert {row.influence for row in report.layers} == {0.0}


def test_stock_refuses(kernel, stock):
    report = kernel.leak_report(build("qwen3_5_text", "eager"), pack(setting="seq_idx"))
    assert report.verdict == "refused" and not report.leaks and report.layers == ()
    assert not report.packed_equals_alone
    assert "in layers.0 (gated delta rule): ValueError: `causal_conv1d_fn` can't keep packed" in report.sentence


def test_ours_refuses_a_model_that_leaks_elsewhere(kernel, stock):
    """Stock leaks and the hooks refuse, both for the reason in the hooks' list."""
    reason = "its recurrence carries one state through the row"
    model = build("rwkv", "eager")
    report = kernel.leak_report(model, pack())
    assert report.leaks and report.sentence.endswith(f"because {reason}.")
    kernel.install_hooks()
    report = kernel.leak_report(model, pack())
    assert report.verdict == "refused" and reason in report.sentence


def test_half_precision(kernel, stock):
    model = build("qwen3_5_text", "eager").to(torch.bfloat16)
    assert verdicts(kernel.leak_report(model, pack())) == [("layers.0", "leaks"), ("layers.1", "inherits")]
    kernel.install_hooks()
    assert kernel.leak_report(load("qwen3_5_text").to(torch.bfloat16), pack()).verdict == "apart"


# ---- attention ----


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_needs_position_ids(kernel, attention):
    """Under a mask, boundaries are read from position_ids alone."""
    model = build("llama", attention)
    assert kernel.leak_report(model, pack()).verdict == "apart"
    report = kernel.leak_report(model, without(pack(setting="seq_idx"), "position_ids"))
    assert verdicts(report) == [("layers.0", "leaks"), ("layers.1", "leaks")]
    assert f"{attention} attention cuts a pack by position_ids alone, which the batch lacks" in report.sentence


def test_attention_mask_beside_a_pack(kernel):
    report = kernel.leak_report(build("llama", "sdpa"), pack(attention_mask=torch.ones(1, 35, dtype=torch.long)))
    assert report.leaks and "the attention_mask in the batch" in report.sentence


def test_model_that_drops_position_ids(kernel, stock):
    report = kernel.leak_report(build("gpt_oss", "eager"), pack())
    assert verdicts(report)[0] == ("layers.0", "leaks")
    assert "GptOssForCausalLM makes the mask of eager attention without position_ids" in report.sentence


def test_encoder_leaks_backwards(kernel, stock):
    """The window of the first layer reaches 3 tokens ahead, over the end of the first sample."""
    report = kernel.leak_report(build("modernbert", "eager"), pack())
    assert [row.first_token for row in report.layers] == [SECOND_SAMPLE - 3, 0] and report.leaks


# ---- each layer by itself ----


def shifted(amount):
    """A forward hook that adds ``amount`` times the previous token to what a module returns."""

    def hook(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        leaking = hidden + amount * hidden.roll(1, dims=1)
        return (leaking, *output[1:]) if isinstance(output, tuple) else leaking

    return hook


@pytest.mark.parametrize("amount", [1.0, 1e-6])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_only_the_leaking_layer_is_blamed(kernel, part, amount):
    """Also for a leak as small as rounding: another sample must not change one bit."""
    model = build("llama", "sdpa", num_hidden_layers=3)
    model.model.layers[1].get_submodule(part).register_forward_hook(shifted(amount))
    report = kernel.leak_report(model, pack())
    assert verdicts(report) == [("layers.0", "apart"), ("layers.1", "leaks"), ("layers.2", "inherits")]
    # The roll takes the last token round to the first.
    assert [row.first_token for row in report.layers] == [None, 0, 0]
    assert report.layers[1].culprit == ("self_attn" if part == "self_attn" else "")
    assert ("something in it other than its attention" in report.sentence) == (part == "mlp")


def test_a_mixer_among_several_is_named(kernel):
    model = load("falcon_h1")
    model.model.layers[1].self_attn.register_forward_hook(shifted(1.0))
    report = kernel.leak_report(model, pack("falcon_h1"))
    assert verdicts(report) == [("layers.0", "apart"), ("layers.1", "leaks")]
    assert report.layers[1].culprit == "self_attn" and "layers.1 (attention) is the only place" in report.sentence


@pytest.mark.parametrize("where, row", [("model.embed_tokens", "embeddings"), ("model.norm", "output")])
def test_leaks_outside_the_layers(kernel, where, row):
    model = build("llama", "sdpa")
    model.get_submodule(where).register_forward_hook(shifted(1.0))
    report = kernel.leak_report(model, pack())
    assert [layer for layer, verdict in verdicts(report) if verdict == "leaks"] == [row]
    assert f"the {row} of LlamaForCausalLM read tokens of other samples" in report.sentence


def test_wrong_positions_differ_without_a_leak(kernel):
    """Samples are kept apart, but RoBERTa's positions count from 2."""
    report = kernel.leak_report(load("xlm-roberta"), pack("llama"))
    assert first_position("xlm-roberta") == 2
    assert verdicts(report) == [("embeddings", "differs"), ("layer.0", "inherits"), ("layer.1", "inherits")]
    assert report.verdict == "differs" and not report.leaks and report.layers[0].first_token == 0
    assert not report.packed_equals_alone
    assert "No sample reaches another" in report.sentence and "position_ids_start=2" in report.sentence


def test_rounding_is_no_difference_in_a_layer_that_does_not_repeat_itself(kernel):
    """A layer whose bits change from run to run, as atomics on a GPU do, is judged by what is above rounding."""
    model = build("llama", "sdpa")
    generator = torch.Generator().manual_seed(0)

    def jitter(module, args, output):
        return output + 1e-7 * torch.randn(output.shape, generator=generator)

    model.model.layers[0].register_forward_hook(jitter)
    assert kernel.leak_report(model, pack()).verdict == "apart"
    model.model.layers[0].self_attn.register_forward_hook(shifted(0.1))
    assert verdicts(kernel.leak_report(model, pack()))[0] == ("layers.0", "leaks")


# ---- batches and models of other forms ----


def test_padding_after_the_last_sample_belongs_to_none(kernel):
    batch = pack("mamba", "seq_idx", lengths=[5, 9, 4])
    batch = {name: batch[name] for name in ("input_ids", "seq_idx")}
    batch["seq_idx"][0, -4:] = -1
    model = load("mamba")
    report = kernel.leak_report(model, batch)
    assert report.verdict == "apart" and "2 samples" in report.sentence


@pytest.mark.parametrize("rows", [None, 3, 4])
def test_text_pack_of_a_multimodal_model(kernel, rows):
    batch = pack()
    if rows is not None:
        batch["position_ids"] = batch["position_ids"].expand(rows, 1, -1)
    report = kernel.leak_report(qwen(NAME), batch)
    assert report.verdict == "apart" and [row.kind for row in report.layers] == ["gated delta rule", "attention"]


def test_wrapped_models(kernel, stock):
    """A compiled model runs as the module inside it; a wrapper's name is not the model's."""
    for wrap in (torch.compile, lambda model: get_peft_model(model, LoraConfig(target_modules=["in_proj"]))):
        report = kernel.leak_report(wrap(build("mamba", "eager")), pack("mamba", "seq_idx"))
        assert verdicts(report) == [("layers.0", "leaks"), ("layers.1", "leaks")]
        assert "which MambaForCausalLM drops" in report.sentence


class SumLayer(torch.nn.Module):
    """Adds the sum of a sample's earlier tokens, in place; ``sample`` ``[T]`` numbers the samples."""

    def forward(self, hidden, sample):
        return hidden.add_((sample[:, None] == sample).tril(-1).to(hidden) @ hidden)


class SumModel(torch.nn.Module):
    """Nothing of transformers; cuts a pack where it is told ``heed``."""

    def __init__(self, heed):
        super().__init__()
        self.heed = heed
        self.embed = torch.nn.Embedding(128, 8)
        self.blocks = torch.nn.ModuleList([SumLayer(), SumLayer()])

    def forward(self, input_ids, position_ids=None):
        cut = self.heed and position_ids is not None
        sample = (position_ids[0] == 0).cumsum(0) if cut else torch.zeros_like(input_ids[0])
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, sample)
        return hidden


def test_models_of_other_makes(kernel):
    assert kernel.leak_report(SumModel(heed=True), pack()).verdict == "apart"
    report = kernel.leak_report(SumModel(heed=False), pack())
    assert verdicts(report) == [("blocks.0", "leaks"), ("blocks.1", "leaks")]
    assert "SumLayer mixes tokens outside the functions that can be told boundaries" in report.sentence


BATCHES = {
    "batch must be a mapping": lambda: [1, 2],
    "batch must hold input_ids": lambda: without(pack(), "input_ids"),
    "input_ids must have 2 dimensions": lambda: {**pack(), "input_ids": pack()["input_ids"][0]},
    r"input_ids must have shape \[1, T\]": lambda: {**pack(), "input_ids": pack()["input_ids"].expand(2, -1)},
    "batch must hold position_ids, cu_seq_lens_q or seq_idx": lambda: without(pack(), "position_ids"),
    "batch must pack two samples or more, got 1": lambda: pack(lengths=[7]),
    "seq_idx must cut the row where cu_seqlens does": lambda: {
        **pack(setting="cu_seq_lens"),
        "seq_idx": torch.zeros(1, 35, dtype=torch.int32),
    },
    "cu_seqlens must end at the number of tokens": lambda: {
        **pack(),
        "cu_seq_lens_q": torch.tensor([0, 5, 36], dtype=torch.int32),
    },
    r"pixel_values must have shape \(1, 35\)": lambda: {**pack(), "pixel_values": torch.zeros(4, 8)},
}


@pytest.mark.parametrize("message", BATCHES)
def test_bad_batches(kernel, message):
    with pytest.raises((ValueError, TypeError), match=f"leak_report: {message}"):
        kernel.leak_report(build("llama", "sdpa"), BATCHES[message]())


def test_bad_models(kernel):
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        kernel.leak_report("llama", pack())
    model = build("llama", "sdpa")
    model.model.layers = torch.nn.Sequential()
    with pytest.raises(ValueError, match="model must have layers in a ModuleList"):
        kernel.leak_report(model, pack())


# ---- the model is left as it was ----


def state_of(model):
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return [module.training for module in model.modules()], hooks, [p.grad for p in model.parameters()]


def test_model_is_left_alone(kernel):
    model = load("qwen3_5_text", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    before, seed = state_of(model), torch.get_rng_state()
    batch = pack(labels=torch.arange(35)[None])
    kept = {name: value.clone() for name, value in batch.items()}
    model.eval()
    expected = model(**batch).logits
    for module, training in zip(model.modules(), before[0]):
        module.training = training
    assert kernel.leak_report(model, batch).verdict == "apart"
    assert state_of(model) == before and torch.equal(torch.get_rng_state(), seed) and torch.is_grad_enabled()
    assert batch.keys() == kept.keys() and all(torch.equal(batch[name], kept[name]) for name in kept)
    assert torch.equal(model.eval()(**batch).logits, expected)


@pytest.mark.parametrize("error, length", [(RuntimeError, 5), (RuntimeError, 35), (ValueError, 5), (ValueError, 35)])
def test_an_error_leaves_nothing_behind(kernel, error, length):
    """Errors go through, except a refusal of the pack (35 tokens), which is a report."""
    model = build("llama", "sdpa").train()

    def fail(module, args):
        if args[0].shape[1] == length:
            raise error("on purpose")

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    before = state_of(model)
    if (error, length) == (ValueError, 35):
        report = kernel.leak_report(model, pack())
        assert report.sentence == "Refused: LlamaForCausalLM does not run this batch in layers.1 (attention): " + (
            "ValueError: on purpose."
        )
    else:
        with pytest.raises(error, match="on purpose"):
            kernel.leak_report(model, pack())
    assert state_of(model) == before and torch.is_grad_enabled()


# ---- table and picture ----


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "minimax", "zamba2", "mamba"])
def test_table_fits_a_page(kernel, stock, model_type):
    report = kernel.leak_report(build(model_type, "eager"), pack(model_type))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    header = next(index for index, line in enumerate(lines) if line.startswith("layer "))
    assert lines[header].split("  ")[0] == "layer" and lines[header].endswith("verdict")
    for line, row in zip(lines[header + 1 :], report.layers):
        cells = [cell for cell in line.split("  ") if cell]
        assert cells[0] == row.layer and f"{row.difference:.1e}" in line
        assert line.endswith(row.verdict) and f"{row.first_token} (sample {row.first_sample[0]})" in line
    assert " ".join(lines).endswith(report.sentence)


def test_picture(kernel, stock, tmp_path):
    layers = dict(num_hidden_layers=8, layer_types=["linear_attention", "full_attention"] * 4)
    report = kernel.leak_report(build("qwen3_5_text", "eager", **layers), pack())
    report.save(tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=picture.width * picture.height)
        width, height = picture.size
    share = {colour: count / (width * height) for count, colour in colours}
    # Four bars that leak and four that inherit, as high and as wide as each other.
    assert share[(0xD5, 0x5E, 0x00)] > 0.05 and share[(0xE6, 0x9F, 0x00)] > 0.05


def test_picture_of_differences_without_a_logarithm(kernel, tmp_path):
    """Exactly 0 and infinite: both are drawn at an edge."""
    model = build("llama", "sdpa")

    def divide_in_the_pack(module, args, output):
        return output / 0 if output.shape[1] == 35 else output

    model.model.layers[1].register_forward_hook(divide_in_the_pack)
    report = kernel.leak_report(model, pack())
    assert report.layers[1].difference == float("inf")
    report.save(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 0


def test_picture_needs_matplotlib(kernel, tmp_path, monkeypatch):
    report = kernel.leak_report(build("llama", "sdpa"), pack())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib is needed to draw a report"):
        report.save(tmp_path / "report.png")


def test_picture_of_a_refusal(kernel, stock, tmp_path):
    report = kernel.leak_report(build("qwen3_5_text", "eager"), pack(setting="seq_idx"))
    with pytest.raises(ValueError, match="nothing to draw: Refused"):
        report.save(tmp_path / "report.png")


# ---- packed is not alone: one verdict ----


@pytest.mark.parametrize("model_type, index", [("llama", 0), ("bert", 0), ("modernbert", 1)])
def test_a_head_that_gives_one_result_a_sample(kernel, model_type, index):
    for setting in SETTINGS:
        report = kernel.leak_report(head_models.build(model_type, index), head_models.packed(model_type, setting))
        assert report.packed_equals_alone, report.sentence
        assert report.layers[-1].layer == "logits" and report.layers[-1].verdict == "apart"


def test_a_head_that_gives_one_result_for_the_row(kernel, stock):
    """C66: attention keeps the samples apart, and the head does not."""
    report = kernel.leak_report(head_models.build("llama", 0, "sdpa"), head_models.packed("llama", "position_ids"))
    assert verdicts(report) == [("layers.0", "apart"), ("layers.1", "apart"), ("logits", "leaks")]
    assert report.leaks and not report.packed_equals_alone
    assert "LlamaForSequenceClassification reads one place of the row for its logits" in report.sentence


@pytest.mark.parametrize("prompts", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens(kernel, prompts):
    """C68: refused by the hooks; without them, the report names the adapter."""
    options = dict(task_type="CAUSAL_LM", num_virtual_tokens=4)
    report = kernel.leak_report(get_peft_model(load("llama"), prompts(**options)), pack())
    assert report.verdict == "refused" and not report.packed_equals_alone and "virtual tokens" in report.sentence
    kernel.remove_hooks()
    try:
        report = kernel.leak_report(get_peft_model(build("llama", "sdpa"), prompts(**options)), pack())
    finally:
        kernel.install_hooks()
    assert report.leaks and "tuning puts its virtual tokens before the row" in report.sentence


@pytest.mark.parametrize("who", ["a wrapper of PEFT", "transformers"])
def test_a_model_that_holds_adapters_without_their_wrapper(kernel, who):
    """PEFT puts its layers into the model that it wraps, and transformers knows PEFT too: neither is a wrapper."""
    model, lora = load("llama"), LoraConfig(target_modules=["q_proj"])
    if who == "transformers":
        model.add_adapter(lora)
    else:
        get_peft_model(model, lora)
    assert kernel.leak_report(model, pack()).packed_equals_alone


def test_rotary_tables_of_a_length(kernel):
    """C61: no sample reaches another, and the longest one decides for all."""
    rope = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=8)
    assert kernel.leak_report(load("llama", **rope), pack()).packed_equals_alone
    kernel.remove_hooks()
    try:
        report = kernel.leak_report(build("llama", "sdpa", **rope), pack())
    finally:
        kernel.install_hooks()
    assert report.verdict == "differs" and not report.leaks and not report.packed_equals_alone
    assert "its rotary tables (dynamic) are chosen by the longest sample" in report.sentence


def causal_by_offsets(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """Attention of the flash kind: it cuts the row, sees back only, and is handed no mask."""
    ends = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q[1:].tolist()
    starts = [0, *ends[:-1]]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, bos:eos], key[:, :, bos:eos], value[:, :, bos:eos], is_causal=True, scale=scaling
        )
        for bos, eos in zip(starts, ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def test_a_mask_that_attention_is_not_handed(kernel):
    """C80: packed equals alone, and neither is what the model computes through its mask."""
    AttentionInterface.register("causal_by_offsets", causal_by_offsets)
    model = head_models.build("bert", 0, "causal_by_offsets", auto=AutoModelForTokenClassification)
    report = kernel.leak_report(model, head_models.packed("bert", "cu_seq_lens"))
    assert report.verdict == "differs" and not report.packed_equals_alone, report
    assert "causal_by_offsets attention is handed no mask" in report.sentence
    assert model.config._attn_implementation == "causal_by_offsets"
