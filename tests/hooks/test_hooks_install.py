"""Putting the hooks in place, taking them out, and what they refuse."""

import fnmatch
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
import transformers.modeling_flash_attention_utils as flash_utils
import transformers.modeling_utils as modeling_utils
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama
from transformers.models.mamba2 import modeling_mamba2

from tests.conftest import ROOT
from tests.models.tiny_models import (
    EAGER_ONLY,
    MODELS,
    NAME,
    REFUSED,
    SETTINGS,
    alone,
    assert_logits_equal,
    build,
    config,
    load,
    pack,
)


@pytest.fixture(autouse=True)
def hooks_in_place(kernel):
    """Tests that take the hooks off put them back; none may leave them off."""
    assert kernel.hooks_status().installed
    yield
    assert kernel.hooks_status().installed


def snapshot():
    """Every object that the hooks may replace."""
    base = modeling_utils.PreTrainedModel
    return {
        "base __init__": base.__init__,
        "base post_init": base.post_init,
        "base checkpointing": base._set_gradient_checkpointing,
        "llama forward": modeling_llama.LlamaModel.forward,
        "lfm2 forward": modeling_lfm2.Lfm2ForCausalLM.forward,
        "lfm2 convolution": modeling_lfm2.causal_conv1d_fn,
        "cast": flash_utils.fa_peft_integration_check,
        "attention": modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME],
    }


def test_removing_restores_every_object(kernel):
    load("llama")
    model = load("lfm2").eval()
    model.gradient_checkpointing_enable()
    hooked = snapshot()
    expected = torch.cat([build("lfm2", "eager").eval()(**sample).logits[0] for sample in alone()])
    kernel.remove_hooks()
    try:
        stock = snapshot()
        for name in hooked:
            assert stock[name] is not hooked[name], name
            assert not hasattr(stock[name], "packfree_stock") and not hasattr(stock[name], "packfree_forward"), name
        assert type(stock["lfm2 convolution"]).kernel_layer_name == "causal_conv1d_fn"
        assert not any("packfree" in name for name in vars(modeling_utils.PreTrainedModel))
        layer = model.model.layers[0]
        assert "packfree" not in type(layer._gradient_checkpointing_func).__module__
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**pack(setting="seq_idx"))
        status = kernel.remove_hooks()
        assert not status.installed and "not installed" in str(status)
    finally:
        kernel.install_hooks()
    assert modeling_lfm2.causal_conv1d_fn.packfree_stock is stock["lfm2 convolution"]
    with torch.no_grad():
        assert_logits_equal(model(**pack(setting="seq_idx")).logits[0], expected)


def test_installing_twice_changes_nothing(kernel):
    load("lfm2")
    before = snapshot()
    assert kernel.install_hooks().installed
    load("lfm2")
    after = snapshot()
    assert all(before[name] is after[name] for name in before)


def test_a_wrapper_on_top_survives_removal(kernel, monkeypatch):
    """Someone else's patch over ours stays and reaches the stock forward through ours."""
    load("lfm2")
    ours = modeling_lfm2.Lfm2ForCausalLM.forward
    calls = []

    def outer(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    model = build("lfm2", "eager").eval()
    monkeypatch.setattr(modeling_lfm2.Lfm2ForCausalLM, "forward", outer)
    kernel.remove_hooks()
    try:
        assert modeling_lfm2.Lfm2ForCausalLM.forward is outer
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**pack(setting="seq_idx"))
        assert calls
    finally:
        monkeypatch.undo()
        modeling_lfm2.Lfm2ForCausalLM.forward = ours.__wrapped__
        kernel.install_hooks()


def test_a_second_build_does_not_stack(kernel, tmp_path):
    """Another build in the same process leaves the hooks to the first, and gets them once they are free."""
    package = tmp_path / "other_packfree_build"
    package.mkdir()
    source = Path(kernel.__file__).parent
    shutil.copytree(source / "hooks", package / "hooks")
    shutil.copytree(source / "context_parallel", package / "context_parallel")
    for name in ("packing.py", "_checks.py", "_devices.py", "_dtypes.py", "_sharing.py"):
        shutil.copy(source / name, package / name)
    (package / "causal_conv1d").mkdir()
    (package / "causal_conv1d" / "api.py").write_text("WIDTHS = range(2, 9)\nACTIVATIONS = ()\n")
    (package / "flash_attn_varlen").mkdir()
    (package / "flash_attn_varlen" / "api.py").write_text("flash_attn_func = flash_attn_varlen_func = None\n")
    (package / "_ops.py").write_text(
        "ops = None\ndef add_op_namespace_prefix(name): return 'other_packfree_build::' + name\n"
    )
    (package / "__init__.py").write_text(
        "def causal_conv1d_fn(*args, **kwargs): raise AssertionError\nchunk_gated_delta_rule = causal_conv1d_fn\n"
    )
    spec = importlib.util.spec_from_file_location("other_packfree_build", package / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_packfree_build"] = module
    spec.loader.exec_module(module)
    other = importlib.import_module("other_packfree_build.hooks")
    load("lfm2")
    before = snapshot()
    status = other.install_hooks()
    assert not status.installed and kernel.__name__ in status.reason
    other.remove_hooks()
    assert all(before[name] is value for name, value in snapshot().items())
    kernel.remove_hooks()
    try:
        assert other.install_hooks().installed
        assert not kernel.install_hooks().installed
    finally:
        other.remove_hooks()
        kernel.install_hooks()


def test_status_prints(kernel):
    load("qwen3_5_text")
    status = kernel.hooks_status()
    assert status.installed and status.transformers == transformers.__version__
    assert NAME in status.attention
    assert any("qwen3_5" in module for module in status.functions["chunk_gated_delta_rule"])
    assert status.variant == Path(kernel.__file__).parent.name
    text = str(status)
    for word in ("installed", "chunk_gated_delta_rule", "minimax", NAME, status.variant):
        assert word in text


# ---- import order ----


def run_python(code, **environment):
    """Run ``code`` in a fresh interpreter that has the kernel in LOCAL_KERNELS as this one does."""
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_kernel_first_then_transformers():
    """The kernel does not import transformers; once a model class is, the hooks are in place."""
    output = run_python(
        """
        import sys
        import kernels
        kernel = kernels.get_kernel("org/packfree-kernels", version=1, trust_remote_code=True)
        assert "transformers" not in sys.modules
        status = kernel.hooks_status()
        assert not status.installed and "waiting" in status.reason, status
        import torch
        from tests.models.tiny_models import alone, load, pack
        assert kernel.hooks_status().installed
        model = load("lfm2").eval()
        with torch.no_grad():
            packed = model(**pack()).logits[0]
            single = torch.cat([model(**sample).logits[0] for sample in alone()])
        print(float((packed - single).abs().max()))
        """
    )
    assert float(output) < 1e-4


def test_model_file_that_brings_transformers_in():
    """Where a model's own file is what first imports transformers' base class, its functions are replaced too."""
    output = run_python(
        """
        import kernels
        kernel = kernels.get_kernel("org/packfree-kernels", version=1, trust_remote_code=True)
        from transformers import Lfm2Config, Lfm2ForCausalLM
        Lfm2ForCausalLM(Lfm2Config(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8))
        print(kernel.hooks_status().functions)
        """
    )
    assert "modeling_lfm2" in output


def test_switched_off_by_the_environment():
    output = run_python(
        """
        import kernels
        from tests.models.tiny_models import load, pack
        try:
            load("lfm2")(**pack(setting="seq_idx"))
        except ValueError as error:
            print(error)
        kernel = kernels.get_kernel("org/packfree-kernels", version=1, trust_remote_code=True)
        print(kernel.hooks_status().reason)
        """,
        PACKFREE_HOOKS="0",
    )
    assert "can't keep packed sequences apart" in output and "PACKFREE_HOOKS=0" in output


# ---- fused mixers ----


@pytest.mark.parametrize(
    "module, attribute, model_type",
    [
        (modeling_mamba2, "mamba2_split_conv1d_scan_combined", "mamba2"),
        (modeling_falcon_mamba, "mamba_inner_fn", "falcon_mamba"),
    ],
)
def test_fused_mixer_falls_through_on_a_pack(module, attribute, model_type, monkeypatch):
    """mamba-ssm's fused mixer, where it is installed, computes another norm; a call without a pack still gets it."""
    calls = []

    def fused(*args, **kwargs):
        calls.append(1)
        return None

    model = load(model_type).train()
    hooked = getattr(module, attribute)
    monkeypatch.setattr(hooked.packfree_stock, "forward", fused)
    model(**alone()[2])
    assert len(calls) == model.config.num_hidden_layers
    calls.clear()
    for setting in SETTINGS:
        model(**pack(model_type, setting))
    assert not calls


# ---- refusals ----


def test_positional_activation_c55(kernel):
    """C55: transformers' fourth parameter is the activation, causal-conv1d's the labels; neither is mistaken."""
    load("lfm2")
    hooked = modeling_lfm2.causal_conv1d_fn
    x, weight = torch.randn(1, 4, 6), torch.randn(4, 3)
    torch.testing.assert_close(hooked(x, weight, None, "silu"), hooked.packfree_stock(x, weight, None, "silu"))
    nothing = dict(seq_idx=None, cu_seqlens=None, cu_seq_lens_q=None)
    torch.testing.assert_close(hooked(x, weight, None, **nothing), hooked.packfree_stock(x, weight, None))
    with pytest.raises(TypeError, match="causal_conv1d_fn: arguments after bias"):
        hooked(x, weight, None, "silu", cu_seqlens=torch.tensor([0, 2, 6]))


@pytest.mark.parametrize(
    "model_type, function",
    [("bamba", "mamba_chunk_scan_combined"), ("kimi_linear", "chunk_kda"), ("mamba", "selective_scan_fn")],
)
def test_function_that_is_not_served_refuses_a_pack(model_type, function, kernel, monkeypatch):
    """A build without the function, as one for another platform may be: an error that names function and model."""
    kernel.remove_hooks()
    monkeypatch.delattr(kernel, function)
    try:
        kernel.install_hooks()
        model = load(model_type).eval()
        stock = build(model_type, "eager").eval()
        with torch.no_grad():
            assert_logits_equal(model(**alone()[2]).logits, stock(**alone()[2]).logits)
        for training in (True, False):
            model.train(training)
            for setting in SETTINGS:
                with pytest.raises(NotImplementedError, match=f"{function}: {type(model).__name__}"):
                    model(**pack(model_type, setting), use_cache=False)
        assert any(model_type in module for module in kernel.hooks_status().not_served[function])
    finally:
        monkeypatch.undo()
        kernel.remove_hooks()
        kernel.install_hooks()
    with torch.no_grad():
        load(model_type).eval()(**pack(model_type))


@pytest.mark.parametrize("model_type", REFUSED)
def test_model_that_leaks_elsewhere_is_refused(model_type, kernel):
    """At loading by the string, and at the first pack where it was loaded under transformers' own attention."""
    reason = re.escape(reason_of(model_type, kernel))
    with pytest.raises(ValueError, match=f"model type '{model_type.removesuffix('_text')}.*{reason}.*eager.*padded"):
        load(model_type)
    model = build(model_type, "eager")
    with torch.no_grad():
        assert model(**alone()[2]).logits.isfinite().all()
    message = f"{type(model).__name__} .model type '{model_type}'.*{reason}.*DataCollatorWithPadding"
    for setting in SETTINGS:
        with pytest.raises(ValueError, match=message):
            model(**pack(setting=setting))


def test_types_that_leak_in_one_release_are_refused_there(kernel, monkeypatch):
    internals = importlib.import_module(f"{kernel.__name__}.hooks.internals")
    monkeypatch.setattr(internals, "version", lambda: "5.23.0")
    assert {"lfm3", "inkling2*", "rwkv"} <= set(internals.leaking_models())
    monkeypatch.setattr(internals, "version", lambda: "5.24.1")
    assert "lfm3" not in internals.leaking_models() and "rwkv" in internals.leaking_models()


@pytest.mark.parametrize("model_type", EAGER_ONLY)
def test_attention_with_a_learned_bias_is_refused(model_type, kernel):
    reason = re.escape(reason_of(model_type, kernel))
    with pytest.raises(ValueError, match=f"model type '{model_type}'.*{reason}.*eager"):
        load(model_type)


def reason_of(model_type, kernel):
    """What hooks_status() says against a model type, whose entry may end in a star."""
    refused = kernel.hooks_status().refused_models
    return next(why for name, why in refused.items() if fnmatch.fnmatchcase(model_type, name))


def test_convolution_that_is_too_wide_is_refused():
    """Our function takes up to 8 tokens; the error says what to do, and the model runs unpacked as ever."""
    model = load("lfm2", conv_L_cache=9)
    stock = build("lfm2", "eager", conv_L_cache=9)
    with torch.no_grad():
        assert_logits_equal(model(**alone()[2]).logits, stock(**alone()[2]).logits)
    for setting in SETTINGS:
        with pytest.raises(ValueError, match="causal_conv1d_fn: Lfm2ForCausalLM.* 9 .*DataCollatorWithPadding"):
            model(**pack(setting=setting))


def test_attention_that_a_flash_kernel_cannot_express_is_refused():
    with allow_all_hub_kernels(), pytest.raises(ValueError, match='BloomForCausalLM.*attn_implementation="eager"'):
        AutoModelForCausalLM.from_config(
            transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=4), attn_implementation=NAME
        )


def test_model_that_counts_positions_itself_is_refused():
    """BART's decoder takes no position_ids, so positions would run on through the pack."""
    bart = transformers.BartConfig(
        vocab_size=128, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32, encoder_layers=1,
        encoder_attention_heads=4, encoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    with allow_all_hub_kernels():
        model = AutoModelForCausalLM.from_config(bart, attn_implementation=NAME)
    with pytest.raises(ValueError, match="position_ids"):
        model(**pack(setting="cu_seq_lens"))


def test_mask_attention_needs_positions_that_show_the_samples():
    """Under eager attention only position_ids cut the row, so boundaries that they do not show are refused."""
    model = build("qwen3_5_text", "eager")
    batch = pack(setting="seq_idx")
    with pytest.raises(ValueError, match="position_ids"):
        model(**{**batch, "position_ids": torch.arange(35)[None]})
    with pytest.raises(ValueError, match="position_ids"):
        model(**{**batch, "position_ids": batch["position_ids"].expand(3, -1, -1)})


def test_model_that_builds_its_mask_without_positions_is_refused():
    model = build("granitemoehybrid", "eager")
    for setting in SETTINGS:
        with pytest.raises(ValueError, match="GraniteMoeHybridForCausalLM: attn_implementation.*position_ids.*eager"):
            model(**pack("granitemoehybrid", setting))


def test_models_that_build_their_mask_without_positions_are_known(kernel):
    """Read from the code of every modeling file that uses a hooked function: its mask's keywords hold position_ids."""
    hooked = "causal_conv1d_fn|chunk_gated_delta_rule|chunk_kda|mamba_chunk_scan_combined|selective_scan_fn"
    seen, dropping = 0, set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        if re.search(hooked, source) and "create_causal_mask(" in source:
            seen += 1
            if not re.search(r"mask_kwargs = \{[^}]*position_ids", source):
                dropping.add(path.stem.removeprefix("modeling_"))
    internals = sys.modules[f"{kernel.__name__}.hooks.internals"]
    assert seen > 10
    assert dropping == set(internals.MASK_WITHOUT_POSITIONS)


def test_configuration_table_is_complete():
    for model_type in MODELS:
        assert config(model_type).model_type == model_type
