"""Models on CUDA tensors that have no values: a packed forward and its backward never wait for one.

A value that Python asked for (``.item()``, ``if tensor``, ``nonzero``) would be a synchronisation on a GPU and is an
error here. What the kernels themselves compute is tested elsewhere.
"""

import traceback
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from tests.harness.fake_cuda import cuda_is_served, fake, fake_cuda, read_no_values
from tests.models import tiny_models
from tests.models.tiny_models import SETTINGS, load, pack

# Routing to experts, which is transformers' own, asks for values or for CUDA itself.
WITHOUT_EXPERTS = {"kimi_linear": dict(mlp_layer_types=["dense", "dense"])}

# Model type -> the ops that must have served it.
MODELS = {
    "llama": {"flash_attn_varlen"},
    "qwen3_5_text": {"flash_attn_varlen", "causal_conv1d", "gated_delta_rule"},
    "mamba": {"causal_conv1d", "mamba1_scan"},
    "mamba2": {"causal_conv1d", "mamba2_scan"},
    "bamba": {"flash_attn_varlen", "causal_conv1d", "mamba2_scan"},
    "lfm2": {"flash_attn_varlen", "causal_conv1d"},
    "kimi_linear": {"flash_attn_varlen", "causal_conv1d", "kda"},
    "gpt2": {"flash_attn_varlen"},
}


class Served(TorchDispatchMode):
    """Collects the names of this package's ops."""

    def __init__(self, prefix):
        super().__init__()
        self.prefix, self.names = prefix, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(self.prefix):
            self.names.add(func.name()[len(self.prefix) :])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", MODELS)
def test_no_value_is_read(kernel, model_type, setting):
    """The forward as on a GPU. Autograd refuses CUDA tensors in a torch without CUDA, so the backward runs on CPU
    tensors without values, which are not read either: its formulas are the same."""
    model = load(model_type, **WITHOUT_EXPERTS.get(model_type, {})).train()
    batch = pack(model_type, setting)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for device in ("cuda", "cpu"):
        with cuda_is_served(kernel), fake_cuda():
            own = {name: fake(value, device) for name, value in tensors.items()}
            with Served(kernel._ops.add_op_namespace_prefix("")) as served:
                call = {name: fake(value, device) for name, value in batch.items()}
                logits = torch.func.functional_call(model, own, (), call).logits
                assert {f"{op}_fwd" for op in MODELS[model_type]} <= served.names and logits.device.type == device
                if device == "cpu":
                    logits.sum().backward()
                    assert {f"{op}_bwd" for op in MODELS[model_type]} <= served.names
                    assert all(tensor.grad is not None for tensor in own.values() if tensor.requires_grad)


def test_a_value_that_is_read_is_caught():
    """The instrument itself."""
    with fake_cuda():
        tensor = fake(torch.arange(4))
        for read in (lambda: int(tensor[0]), lambda: bool(tensor.all()), lambda: tensor.tolist()):
            with pytest.raises(DataDependentOutputException):
                read()


# What asks for a value on a GPU, by the name of its operation.
ASKING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique_consecutive", "_unique2"}

# What transformers asks for itself: GPT-OSS's experts one after another, of which each looks up its tokens. Kernels for
# experts do not ask, and are what other models get.
OF_EXPERTS = {"gpt_oss": ("forward", "modeling_gpt_oss.py")}


class Questions(TorchDispatchMode):
    """Collects the operations that ask for a value, and the functions of transformers that asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ASKING or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            callers = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            self.asked.append((name, callers[-2].name, Path(callers[-2].filename).name))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", tiny_models.MODELS)
def test_nothing_is_asked_for(kernel, monkeypatch, model_type, setting):
    """In a whole training step on CPU tensors, where every value is at hand and a question would be answered.

    Tensors without values, as above, take the way of a traced model, which asks less.
    """
    model, batch = load(model_type).train(), pack(model_type, setting)
    read_no_values(kernel, monkeypatch)
    with Questions() as questions:
        model(**batch).logits.square().sum().backward()
    assert not [question for question in questions.asked if question[1:] != OF_EXPERTS.get(model_type)]


def test_one_question_more_is_noticed(kernel, monkeypatch):
    """transformers' own numbering of samples asks once in a forward."""
    model = load("llama").train()
    finder = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", finder.packfree_stock)
    read_no_values(kernel, monkeypatch)
    with Questions() as questions:
        model(**pack("llama"))
    assert [question[0] for question in questions.asked] == ["_local_scalar_dense"]
