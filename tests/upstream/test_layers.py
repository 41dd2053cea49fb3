"""The layers under transformers' names: a kernel mapping reaches this package's functions, on the CPU as well."""

import inspect
from pathlib import Path

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, use_kernel_mapping
from transformers.modeling_utils import PreTrainedModel

from tests.models.tiny_models import (
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    load,
    pack,
    run,
    samples,
)

TRAINING = {
    "qwen3_5_text": {"causal_conv1d_fn", "chunk_gated_delta_rule"},
    "kimi_linear": {"causal_conv1d_fn", "chunk_kda"},
    "mamba2": {"causal_conv1d_fn", "mamba_chunk_scan_combined"},
    "mamba": {"causal_conv1d_fn", "selective_scan_fn"},
}
DECODING = {
    "qwen3_5_text": {"causal_conv1d_update", "fused_recurrent_gated_delta_rule"},
    "kimi_linear": {"causal_conv1d_update", "fused_recurrent_kda"},
    "mamba2": {"causal_conv1d_update", "selective_state_update"},
    "mamba": {"causal_conv1d_update", "selective_state_update"},
}


@pytest.fixture
def calls(kernel, monkeypatch):
    """Name of each public function that a layer calls, in order."""
    called = []

    def counted(name, function):
        def call(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return call

    for name in set(kernel.layers.__all__) - {"mamba_inner_fn", "mamba_split_conv1d_scan_combined"}:
        monkeypatch.setattr(kernel.layers, f"_{name}", counted(name, getattr(kernel, name)))
    return called


@pytest.fixture
def mapped(kernel):
    """Map every layer of the package and kernelize a model; transformers' functions get their own forward back."""
    touched = []

    def apply(model: PreTrainedModel, mode: Mode) -> PreTrainedModel:
        for module in model.modules():
            touched.extend(getattr(module, "_kernel_funcs", {}).values())
        folder = Path(kernel.__file__).parent.parent
        with use_kernel_mapping({}, inherit_mapping=False):
            register_kernel_mapping(
                {name: {"cpu": LocalLayerRepository(folder, layer_name=name)} for name in kernel.layers.__all__}
            )
            return kernelize(model, mode=mode, device="cpu")

    yield apply
    for function in touched:
        vars(function).pop("forward", None)


def test_layers_are_pure(kernel):
    """Nothing but forward: the rules by which kernels puts a layer's forward into another module."""
    assert "layers" in kernel.__all__
    for name in kernel.layers.__all__:
        layer = getattr(kernel.layers, name)
        assert issubclass(layer, torch.nn.Module) and layer.__init__ is torch.nn.Module.__init__
        own = {member for member in vars(layer) if not member.startswith("__")}
        assert own - {"has_backward", "can_torch_compile"} == {"forward"}, name
        assert inspect.getdoc(layer) and hasattr(kernel, name)


@pytest.mark.parametrize("model_type", TRAINING)
def test_mapping_serves_training(model_type, kernel, mapped, calls):
    """Batches without a pack run through the layers; logits and gradients stay those of stock transformers."""
    batch = dict(input_ids=torch.tensor([sample["input_ids"] for sample in samples([9, 9])]))
    expected = run(build(model_type, "eager").train(), [batch])
    assert not calls
    model = mapped(build(model_type, "eager").train(), Mode.TRAINING)
    got = run(model, [batch])
    assert set(calls) == TRAINING[model_type]
    assert_logits_equal(got[0], expected[0])
    assert_gradients_equal(got[1], expected[1])


@pytest.mark.parametrize("model_type", TRAINING)
def test_mapping_serves_generation(model_type, kernel, mapped, calls):
    prompt = dict(input_ids=torch.tensor([samples([6])[0]["input_ids"]]))
    arguments = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = build(model_type, "eager").eval().generate(**prompt, **arguments)
    assert not calls
    model = mapped(build(model_type, "eager").eval(), Mode.INFERENCE)
    got = model.generate(**prompt, **arguments)
    assert set(calls) == TRAINING[model_type] | DECODING[model_type]
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits):
        assert_logits_equal(ours, theirs)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "bamba", "kimi_linear"])
def test_mapping_keeps_packs_apart_without_hooks(model_type, kernel, mapped, calls):
    """Boundary keywords that a model hands on are enough for the layers."""
    expected = run(build(model_type, "eager").train(), alone())
    kernel.remove_hooks()
    try:
        model = mapped(build(model_type, "eager").train(), Mode.TRAINING)
        for setting in ("cu_seq_lens", "seq_idx"):
            calls.clear()
            got = run(model, [pack(model_type, setting, use_cache=False)])
            assert calls
            assert_logits_equal(got[0], expected[0])
            assert_gradients_equal(got[1], expected[1])
    finally:
        kernel.install_hooks()


def test_mapping_beside_hooks(kernel, mapped):
    """Both at once: the hooks serve packed calls, with the boundaries that the layers would not be told."""
    for model_type in ("mamba", "mamba2"):
        expected = run(build(model_type, "eager").train(), alone())
        model = mapped(load(model_type).train(), Mode.TRAINING)
        got = run(model, [pack(model_type)])
        assert_logits_equal(got[0], expected[0])
        assert_gradients_equal(got[1], expected[1])
