"""CUDA tensors and models, as far as a CPU can tell: refused by name where there is no kernel, stock path in models."""

import dataclasses
import importlib

import pytest
import torch

from tests.harness.fake_cuda import fake, fake_cuda
from tests.harness.hub import cpu_variant, run
from tests.harness.ops import flash_attn_varlen
from tests.harness.packings import Pack
from tests.models.tiny_models import build, load, pack
from tests.packing.test_boundaries import FUNCTIONS

# Beginning of an op's name -> the package that its refusal names.
INSTEAD = {
    "causal_conv1d": "causal-conv1d",
    "flash_attn": "flash-attn",
    "gated_delta_rule": "flash-linear-attention",
    "kda": "flash-linear-attention",
    "mamba1_scan": "mamba-ssm on padded batches",
    "mamba2_scan": "mamba-ssm",
    "packing": "a CUDA variant of packfree-kernels",
    "selective_state_update": "mamba-ssm",
}


def arguments_of(op):
    """Something of the right type for each argument: the refusal reads none of them."""
    made = {"Tensor": torch.zeros(1), "int": 1, "bool": False, "float": 1.0, "SymInt": 1, "str": ""}
    return [made.get(str(argument.type)) for argument in op._schema.arguments]


def test_every_op_without_a_cuda_kernel_names_what_to_use(kernel):
    prefix = kernel._ops.add_op_namespace_prefix("")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = [name[len(prefix) :] for name in registered if name.startswith(prefix)]
    assert {start for start in INSTEAD for name in names if name.startswith(start)} == set(INSTEAD)
    served = importlib.import_module(f"{kernel.__name__}._devices").TRITON
    for name in set(names) - set(served):
        (instead,) = [package for start, package in INSTEAD.items() if name.startswith(start)]
        op = getattr(kernel._ops.ops, name).default
        # What the dispatcher runs for a CUDA tensor, which this machine may be unable to make.
        with pytest.raises(NotImplementedError) as error:
            op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments_of(op))
        text = str(error.value)
        assert text.startswith(f"{name}: tensors must be on the CPU, got cuda tensors") and instead in text


def test_a_rocm_build_of_torch_is_not_sent_to_a_cuda_variant(kernel, monkeypatch):
    """Its GPUs are called cuda as well, and no variant serves them."""
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    for name in ("causal_conv1d_fwd", "packing_from_offsets"):
        op = getattr(kernel._ops.ops, name).default
        with pytest.raises(NotImplementedError) as error:
            op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments_of(op))
        text = str(error.value)
        assert "use CPU tensors, because there is no ROCm variant of packfree-kernels" in text
        assert "CUDA variant" not in text and ("causal-conv1d" in text) == name.startswith("causal_conv1d")


@pytest.mark.parametrize("name", [*FUNCTIONS, "flash_attn_varlen_func"])
def test_float64_is_for_the_cpu(name):
    """Each function that tests by name says so before anything is computed, and what to use instead."""
    op = FUNCTIONS[name] if name in FUNCTIONS else flash_attn_varlen.op_under_test(flash_attn_varlen.Case(""))
    inputs = op.make(Pack("row", (10,)), torch.float64)
    with fake_cuda():
        inputs = {key: fake(value) for key, value in inputs.items()}
        cuts = {key: fake(value) for key, value in op.boundaries(Pack("row", (4, 6))).items()}
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16 on a GPU .* got float64"):
            op.run(inputs, **cuts)


def test_triton_is_needed_by_cuda_tensors_alone(tmp_path):
    """Importing and computing on the CPU do without it; what a CUDA tensor would then meet says what is missing."""
    seen = run(
        f"""
sys.modules["triton"] = None
from pathlib import Path
kernel = get_local_kernel(Path({str(cpu_variant().parent)!r}))
import importlib
devices = importlib.import_module(kernel.__name__ + "._devices")
errors = [error_of(devices.triton_implementation, name) for name in devices.TRITON]
print(json.dumps([works(kernel), errors]))
""",
        tmp_path,
    )
    assert seen[0] and seen[1]
    for text in seen[1]:
        assert text.startswith("RuntimeError: ") and "Triton, which cannot be imported" in text
        assert "pip install triton" in text


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba", "mamba"])
def test_models_on_another_device_keep_the_stock_path(kernel, monkeypatch, model_type):
    """With the CPU struck off the list of served devices, a packed call is what transformers alone makes of it."""
    load(model_type)
    functions = importlib.import_module(f"{kernel.__name__}.hooks.functions")
    model = build(model_type, "eager").eval()
    batch = pack(setting="position_ids")
    with torch.no_grad():
        served = model(**batch).logits
        monkeypatch.setattr(functions, "SUPPORTED_DEVICES", ("nowhere",))
        left_alone = model(**batch).logits
        kernel.remove_hooks()
        try:
            stock = model(**batch).logits
        finally:
            kernel.install_hooks()
    assert torch.equal(left_alone, stock)
    # Transformers' own path mixes the samples of these models, so the two paths can be told apart.
    assert not torch.allclose(served, stock, atol=1e-3)


def test_status_tells_what_serves_each_op_on_a_gpu(kernel):
    status = kernel.hooks_status()
    assert status.cuda == {}  # a CPU variant
    paths = importlib.import_module(f"{kernel.__name__}._devices").cuda_paths()
    assert paths["flash_attn_varlen_fwd"] == "PyTorch's kernel or Triton, by the call"
    assert "CUDA C++" not in paths.values() and "packing_from_labels" in paths
    text = str(dataclasses.replace(status, cuda=paths))
    assert "flash_attn_varlen_fwd: PyTorch's kernel or Triton" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if line.startswith("  CUDA")) <= 100
