"""mamba_inner_fn: against plain torch and transformers' own mixers."""

import importlib

import pytest
import torch

from tests.harness import properties
from tests.harness.ops import mamba1_inner
from tests.harness.ops.mamba1_inner import mixer
from tests.harness.packings import Pack
from tests.harness.properties import run_with_gradients


@pytest.mark.parametrize("norms", mamba1_inner.CASES, ids=["plain", "norms"])
def test_inner_matches_reference_packed(norms):
    """C05's second half: every gradient equals the sum over the samples alone."""
    op, pack = mamba1_inner.op_under_test(norms), Pack("packed", (3, 5, 4))
    inputs = op.make(pack, torch.float32)
    ours = run_with_gradients(lambda leaves: op.run(leaves, position_ids=pack.position_ids), inputs)
    truth = run_with_gradients(
        lambda leaves: op.reference(leaves, pack.cu_seqlens), properties.cast(inputs, torch.float64)
    )
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        scale = float(truth[name].abs().max())
        torch.testing.assert_close(value.double(), truth[name], rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("norms", mamba1_inner.CASES, ids=["plain", "norms"])
def test_inner_is_zero_on_padding(norms):
    """With the projection's bias too, and whatever lies there."""
    op, pack = mamba1_inner.op_under_test(norms), Pack("padding", (3, 5), padding=4)
    inputs = op.make(pack, torch.float32)
    inputs["xz"][..., -4:] = torch.nan
    results = run_with_gradients(lambda leaves: op.run(leaves, seq_idx=pack.seq_idx), inputs)
    assert not results["out"][:, -4:].any() and not results["dxz"][..., -4:].any()
    assert all(torch.isfinite(value).all() for value in results.values())
    truth = op.reference(properties.cast(inputs, torch.float64), pack.cu_seqlens)
    torch.testing.assert_close(results["out"].double(), truth["out"], rtol=0, atol=1e-4)


def test_inner_takes_given_b_and_c(kernel):
    """B and C given are those that the projection would have made."""
    inputs = {"xz": torch.randn(1, 16, 7), **mixer(False)}
    made = kernel.mamba_inner_fn(**inputs)
    x = kernel.causal_conv1d_fn(
        inputs["xz"][:, :8], inputs["conv1d_weight"][:, 0], inputs["conv1d_bias"], activation="silu"
    )
    dt_rows, b_rows, c_rows = inputs["x_proj_weight"].split([3, 4, 4])
    for names, rows in ((("B", "C"), dt_rows), (("B",), torch.cat([dt_rows, c_rows]))):
        given = {"B": b_rows @ x, "C": c_rows @ x}
        arguments = {**inputs, "x_proj_weight": rows, **{name: given[name] for name in names}}
        torch.testing.assert_close(kernel.mamba_inner_fn(**arguments), made)


def tiny_mixer(family):
    """transformers' own mixer in training mode, its module, and its input."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"mamba": "Mamba", "falcon_mamba": "FalconMamba"}[family]
    config = getattr(module, f"{name}Config")(hidden_size=48, state_size=4, num_hidden_layers=1, vocab_size=11)
    layer = getattr(module, f"{name}Mixer")(config, layer_idx=0, initialize_mixer_weights=False).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer, module, torch.randn(2, 9, 48)


def test_inner_is_the_models_mixer(kernel, monkeypatch):
    """The call of transformers' Mamba in training, argument by argument, gives what its eager path gives."""
    layer, module, hidden = tiny_mixer("mamba")
    expected = layer(hidden)
    calls = []

    def ours(*arguments, **keywords):
        calls.append(keywords)
        return kernel.mamba_inner_fn(*arguments, **keywords)

    monkeypatch.setattr(module, "mamba_inner_fn", ours)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_scan_inside_the_models_mixer(kernel, family, monkeypatch):
    layer, module, hidden = tiny_mixer(family)
    expected = layer(hidden)
    calls = []

    def ours(*arguments, use_mambapy, use_associative_scan, **keywords):
        calls.append(keywords)
        return kernel.selective_scan_fn(*arguments, **keywords)

    monkeypatch.setattr(module, "mamba_selective_scan", ours)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


def test_inner_under_autocast(kernel):
    inputs = {"xz": torch.randn(1, 16, 7).bfloat16(), **mixer(True)}
    with torch.autocast("cpu", torch.bfloat16):
        out = kernel.mamba_inner_fn(**inputs, cu_seqlens=[0, 3, 7])
    assert out.dtype == torch.bfloat16
    truth = kernel.mamba_inner_fn(**properties.cast(inputs, torch.float64), cu_seqlens=[0, 3, 7])
    assert float((out.double() - truth).abs().max()) < 2e-2 * float(truth.abs().max())


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(xz=torch.randn(1, 15, 7)), r"xz must have shape \[B, 2 D, T\] = \(1, 16, 7\), got \(1, 15, 7\)"),
        (dict(x_proj_weight=torch.randn(10, 8)), r"x_proj_weight must have shape .* = \(11, 8\), got \(10, 8\)"),
        (dict(dt_rms_weight=torch.ones(3)), r"dt_rms_weight must have shape \[D\] = \(8,\), got \(3,\)"),
        (dict(b_rms_weight=torch.ones(3)), r"B's bias and norm must have shape \[N\] = \(4,\), got \(3,\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inner_rejects(kernel, change, text):
    with pytest.raises(ValueError, match=text):
        kernel.mamba_inner_fn(**{"xz": torch.randn(1, 16, 7), **mixer(False), **change})
