"""Models on CUDA tensors that have no values: a packed forward and its backward never wait for one.

A value that Python asked for (``.item()``, ``if tensor``, ``nonzero``) would be a synchronisation on a GPU and is an
error here. What the kernels themselves compute is tested elsewhere.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.fake_cuda import cuda_is_served, fake, fake_cuda
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
