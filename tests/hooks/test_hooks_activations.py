"""Convolutions behind which a model's configuration puts another activation than SiLU."""

import pytest
import torch
from transformers.activations import ACT2FN

from tests.models.tiny_models import (
    LENGTHS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    load,
    pack,
    run,
)

pytestmark = pytest.mark.usefixtures("kernel")

# Model type -> what its configuration calls the activation of the convolution.
MODELS = {
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"], "hidden_act"),
    **dict.fromkeys(["bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba"], "hidden_act"),
    **dict.fromkeys(["mamba", "mamba2", "falcon_mamba"], "hidden_act"),
    "nemotron_h": "mamba_hidden_act",
    "zamba": "hidden_mamba_act",
}


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_equals_alone(model_type):
    changes = {MODELS[model_type]: "gelu"}
    logits, gradients = run(load(model_type, **changes).train(), [pack(model_type)])
    expected, expected_gradients = run(build(model_type, "eager", **changes).train(), alone())
    assert_logits_equal(logits, expected)
    assert_gradients_equal(gradients, expected_gradients)


@pytest.mark.parametrize("name", ACT2FN)
def test_every_activation(name):
    """In a convolution alone, one layer of Mamba; the stock path is the truth."""
    changes = dict(hidden_act=name, num_hidden_layers=1)
    model, stock = load("mamba", **changes).eval(), build("mamba", "eager", **changes).eval()
    with torch.no_grad():
        expected = torch.cat([stock(**sample).logits[0] for sample in alone()])
        assert_logits_equal(model(**pack("mamba", "seq_idx")).logits[0], expected)


def test_final_states_are_not_activated(kernel):
    """A replaced function that returns the convolution's state too activates the outputs only."""
    from transformers.models.bamba import modeling_bamba

    x, weight, seq_idx = torch.randn(1, 8, 6), torch.randn(8, 4), torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    load("bamba")
    arguments = dict(seq_idx=seq_idx, return_final_states=True)
    out, state = modeling_bamba.causal_conv1d_fn(x, weight, activation="tanh", **arguments)
    plain, plain_state = kernel.causal_conv1d_fn(x, weight, **arguments)
    assert torch.equal(out, plain.tanh()) and torch.equal(state, plain_state)


def test_one_graph():
    torch._dynamo.reset()
    model = load("bamba", hidden_act="gelu").train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for lengths in (LENGTHS, [7, 20, 8]):
            batch = pack("bamba", lengths=lengths)
            assert torch.equal(compiled(**batch).logits, model(**batch).logits)
