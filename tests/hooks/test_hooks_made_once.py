"""What is made of a pack's boundaries is made once in a training step, whatever the number of layers."""

import functools
import gc
import importlib

import pytest
from torch.utils.checkpoint import checkpoint

from tests.models.tiny_models import build, load, pack
from tools.maintainers.launches import Launches, as_on_a_gpu


def _layers(kinds, of_two):
    return {"num_hidden_layers": 2 * of_two, "layer_types": kinds * of_two}


# Model type -> its configuration with twice that many layers.
MODELS = {
    "llama": lambda n: dict(num_hidden_layers=2 * n),
    "qwen3_5_text": lambda n: _layers(["linear_attention", "full_attention"], n),
    "kimi_linear": lambda n: dict(
        _layers(["linear_attention", "full_attention"], n), mlp_layer_types=["dense"] * (2 * n)
    ),
    "bamba": lambda n: dict(num_hidden_layers=2 * n, attn_layer_indices=list(range(1, 2 * n, 2))),
    "falcon_h1": lambda n: dict(num_hidden_layers=2 * n),
    "mamba": lambda n: dict(num_hidden_layers=2 * n),
    "mamba2": lambda n: dict(num_hidden_layers=2 * n),
    "lfm2": lambda n: _layers(["conv", "full_attention"], n),
}
# Whether layers run again in the backward pass, and how.
RECOMPUTE = {"kept": None, "again": dict(use_reentrant=False), "again, reentrant": dict(use_reentrant=True)}


def step(kernel, model, batch):
    """Launches of a training step as on a GPU."""
    with as_on_a_gpu(kernel), Launches(kernel) as launches:
        model(**batch).logits.sum().backward()
    return launches


@pytest.fixture(autouse=True)
def loaded(kernel):
    load("llama")


def model_of(model_type, layers, recompute=None):
    model = build(model_type, "org/packfree-kernels", **MODELS[model_type](layers)).train()
    if recompute is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recompute)
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("setting", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model_type", MODELS)
def test_more_layers_make_no_more_of_the_boundaries(kernel, model_type, recompute, setting):
    """Conversions, searches, sorts and lists of work: all that has no number with a fraction on either side."""
    few, many = (
        step(kernel, model_of(model_type, layers, RECOMPUTE[recompute]), pack(model_type, setting))
        for layers in (1, 2)
    )
    assert sum(many.counts.values()) > sum(few.counts.values())
    assert many.of_integers == few.of_integers


def test_the_lists_end_with_the_backward_pass(kernel):
    """Also where the caller keeps the batch, and the hooks the boundaries for a recompute that may come."""
    sharing = importlib.import_module(f"{kernel.__name__}._sharing")
    model, batch = model_of("llama", 1), pack("llama", "seq_idx")

    def lists():
        gc.collect()
        return sum(len(kept.made) for kept in sharing._kept.values() if kept.tokens is not None)

    step(kernel, model, batch)
    before = lists()
    with as_on_a_gpu(kernel), Launches(kernel):
        loss = model(**batch).logits.sum()
        assert lists() > before
        loss.backward()
    del loss
    assert lists() == before


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_that_a_wrapper_runs_again_shares_too(kernel, use_reentrant):
    """Nobody hands the boundaries to such a recompute, and mamba's layers are not told them."""
    made = []
    for layers in (1, 2):
        model = model_of("mamba2", layers)
        for layer in model.backbone.layers:
            layer.forward = _checkpointed(layer.forward, use_reentrant)
        model.enable_input_require_grads()
        made.append(step(kernel, model, pack("mamba2", "position_ids")).of_integers)
    assert made[1]["packing_from_positions"] == made[0]["packing_from_positions"] == 1
    assert made[1]["packing_from_offsets"] == made[0]["packing_from_offsets"] == 0


def _checkpointed(forward, use_reentrant):
    def again(*args, **kwargs):
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=use_reentrant)

    return again
