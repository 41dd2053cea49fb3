"""Whole models under torch.compile(fullgraph=True), forward and backward, float32 and bfloat16.

Seven training steps whose packs differ in the number of samples, then in the number of tokens. With position_ids alone
there is a second graph once the number of tokens turns dynamic; with cu_seq_lens and seq_idx a third, because their
number of entries does too. Nothing breaks a graph, and the results are those of eager mode.

A whole model of every kind of layer by PyTorch's default backend:

    PACKFREE_COMPILE=all .venv/bin/python -m pytest tests/compile/test_compile_models.py -k inductor
"""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.models.tiny_models import (
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    load,
    pack,
    run,
)

pytestmark = pytest.mark.usefixtures("kernel")

# Model type -> what makes it smaller; the others need two layers for two kinds.
MODELS = {
    "llama": dict(num_hidden_layers=1),
    "qwen3_5_text": {},
    "bamba": {},
    "lfm2": {},
    "mamba2": dict(num_hidden_layers=1),
    "jamba": {},
    "kimi_linear": {},
}
MOST_GRAPHS = {"position_ids": 2, "seq_idx": 3}

# AOTAutograd traces the backward pass too, after what "eager" does, and costs twice as much; so each dtype and each
# setting goes through it once, and the other two pairs are for a model of each path: float32 is the dtype in which
# transformers computes experts otherwise.
BACKENDS = {(torch.float32, "seq_idx"): "aot_eager", (torch.bfloat16, "position_ids"): "aot_eager"}
CROSSED = {(torch.float32, "position_ids"): "eager", (torch.bfloat16, "seq_idx"): "eager"}
CASES = [(name, *pair, backend) for name in MODELS for pair, backend in BACKENDS.items()]
CASES += [(name, *pair, backend) for name in ("llama", "jamba") for pair, backend in CROSSED.items()]

# Four samples, four others, three, six; then more tokens, still more, and the first number again.
STEPS = [
    [5, 9, 17, 3], [10, 8, 4, 12], [20, 1, 13], [4, 6, 6, 6, 6, 6],
    [5, 9, 17, 3, 6], [30, 1, 19], [16, 18],
]  # fmt: skip


def run_compiled(compiled, batch):
    logits, gradients = run(compiled, [batch])
    return logits, {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients.items()}


def check_steps(model, setting, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for lengths in STEPS:
        batch = pack(setting=setting, lengths=lengths)
        same_bits(run_compiled(compiled, batch), run(model, [batch]))
    assert 0 < counter.frame_count <= MOST_GRAPHS[setting]


def same_bits(got, expected):
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name


@pytest.mark.parametrize("model_type, dtype, setting, backend", CASES, ids=str)
def test_few_graphs_for_any_pack(model_type, dtype, setting, backend):
    """Graphs that do what eager mode does give its bits."""
    model = load(model_type, **MODELS[model_type]).to(dtype).train()
    check_steps(model, setting, backend)


# One small model of each kind of layer. Two of them by default: inductor takes a minute for a whole model.
INDUCTOR = {
    "llama": ("position_ids", dict(num_hidden_layers=1)),
    "lfm2": ("seq_idx", dict(num_hidden_layers=1, layer_types=["conv"])),
}
if os.environ.get("PACKFREE_COMPILE") == "all":
    INDUCTOR.update(
        mamba=("position_ids", dict(num_hidden_layers=1)),
        bamba=("seq_idx", {}),
        qwen3_5_text=("position_ids", {}),
        kimi_linear=("cu_seq_lens", {}),
    )


@pytest.mark.parametrize("model_type", INDUCTOR)
def test_inductor(model_type):
    """The default backend fuses, so it rounds otherwise; what it computes of a pack is what eager mode does of each
    sample alone."""
    torch._dynamo.reset()
    setting, changes = INDUCTOR[model_type]
    model, counter = load(model_type, **changes).train(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 9, 17, 3], [10, 8, 4, 12, 1], [30, 2, 19], [1] * 40 + [2] * 24, [37]):
        got = run_compiled(compiled, pack(model_type, setting, lengths))
        expected = run(model, [dict(sample, use_cache=False) for sample in alone(lengths)])
        assert_logits_equal(got[0], expected[0])
        assert_gradients_equal(got[1], expected[1])
    assert 0 < counter.frame_count <= 2


def test_checks_what_it_cannot_read():
    """What eager mode refuses by value is checked inside the graph."""
    torch._dynamo.reset()
    model = torch.compile(load("llama").eval(), fullgraph=True, backend="eager")
    with torch.no_grad():
        ones = pack(attention_mask=torch.ones(1, 35, dtype=torch.long))
        assert_logits_equal(model(**ones).logits, model._orig_mod(**ones).logits)
        zeros = {**ones, "attention_mask": ones["attention_mask"].clone()}
        zeros["attention_mask"][0, -1] = 0
        with pytest.raises(RuntimeError, match="attention_mask must mask nothing"):
            model(**zeros)
        hybrid = torch.compile(build("lfm2", "eager").eval(), fullgraph=True, backend="eager")
        with pytest.raises(RuntimeError, match="position_ids must not pack samples"):
            hybrid(**pack(), use_cache=True)


def test_sample_numbers_are_not_traced():
    """A mask of sample numbers has the form of an ordinary one; the graph of the ordinary one refuses it."""
    torch._dynamo.reset()
    model = torch.compile(load("mamba", num_hidden_layers=1).eval(), fullgraph=True, backend="eager")
    ids = pack("mamba")["input_ids"]
    with torch.no_grad():
        ones = torch.ones_like(ids)
        assert_logits_equal(model(ids, attention_mask=ones).logits, model._orig_mod(ids).logits)
        with pytest.raises(RuntimeError, match="attention_mask must hold 0 and 1 .* seq_idx"):
            model(ids, attention_mask=1 + (torch.arange(ids.shape[1])[None] > 9).long())


def test_offsets_of_keys_are_those_of_the_samples():
    """Compiled, nobody can compare cu_seq_lens_k with cu_seq_lens_q; another one must not reach the attention."""
    torch._dynamo.reset()
    model = torch.compile(load("llama", num_hidden_layers=1).eval(), fullgraph=True, backend="eager")
    batch = pack(setting="cu_seq_lens")
    with torch.no_grad():
        expected = model(**batch).logits
        other = torch.tensor([0, 1, 2, 3, 4, 35], dtype=torch.int32)
        assert torch.equal(model(**{**batch, "cu_seq_lens_k": other}).logits, expected)


def test_experts_formula_is_put_back(kernel):
    """The operator of transformers whose backward formula is replaced has its own again without the hooks."""
    from transformers.integrations import moe

    definition = torch._library.custom_ops._maybe_get_opdef("transformers::grouped_mm_fallback")
    load("jamba")
    assert definition._backward_fn is not moe._grouped_mm_fallback_backward
    kernel.remove_hooks()
    try:
        assert definition._backward_fn is moe._grouped_mm_fallback_backward
    finally:
        kernel.install_hooks()
    assert definition._backward_fn is not moe._grouped_mm_fallback_backward
