"""Tiny random models, one line of configuration each, and what tests of whole models do with them.

``MODELS`` maps a transformers model type to the smallest interesting form of its configuration: every layer kind,
grouped key/value heads where it allows them, a window shorter than the longest test sample. Parameters are redrawn
so that each of them matters: with transformers' own initialisation many paths are near zero and an error would hide.
"""

from typing import Any, Dict, List, Optional

import torch
import transformers.modeling_utils  # noqa: F401  the hooks wait for this module
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    DataCollatorWithFlattening,
    PreTrainedConfig,
)
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NAME = "org/packfree-kernels"

# One sample shorter than the convolution, one longer than every window, one of a single token, neighbours of each.
LENGTHS = [5, 9, 17, 3, 1]

# The collator's settings: position_ids only; with cu_seq_lens_q/k and max_length_q/k; with seq_idx as well.
SETTINGS = {
    "position_ids": {},
    "cu_seq_lens": dict(return_flash_attn_kwargs=True),
    "seq_idx": dict(return_flash_attn_kwargs=True, return_seq_idx=True),
}

# Two float32 computations of the same numbers in another order. A leak is 1e-1 and more on these models; rounding is
# 1e-6 (seen: 6e-6 at most, the delta rule). Gradients are measured against the parameter's own largest entry; the floor
# is for gradients that are zero in exact arithmetic, such as a key bias under softmax.
LOGIT_TOLERANCE = 5e-5
GRADIENT_TOLERANCE = 1e-4
GRADIENT_FLOOR = 1e-6


VOCABULARY = 128

_DECODER: Dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_ENCODER = {name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
_DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_STATE_SPACE = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16)
_MAMBA = dict(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8, pad_token_id=0)
_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
_HYBRID_LAYERS = ["linear_attention", "full_attention"]
# Two places that use one attention block.
_SHARED_BLOCK = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2)
_CONVOLUTION_LAYERS = ["conv", "full_attention"]

MODELS: Dict[str, Dict[str, Any]] = {
    "llama": dict(_DECODER),
    "mistral": dict(_DECODER, sliding_window=6),
    "gemma2": dict(_DECODER, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(
        _DECODER,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    ),
    "gpt2": dict(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "deepseek_v3": dict(
        {**_DECODER, "num_key_value_heads": 4},
        **_LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "xlm-roberta": dict(
        _ENCODER, max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=1
    ),
    "modernbert": dict(_ENCODER, local_attention=6, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_5_text": dict(_DECODER, **_DELTA, head_dim=8, layer_types=_HYBRID_LAYERS),
    "qwen3_5_moe_text": dict(
        {name: value for name, value in _DECODER.items() if name != "intermediate_size"},
        **_DELTA,
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        head_dim=8,
        layer_types=_HYBRID_LAYERS,
    ),
    "qwen3_next": dict(
        _DECODER, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16, head_dim=8, layer_types=_HYBRID_LAYERS
    ),
    "olmo_hybrid": dict(_DECODER, **{**_DELTA, "linear_num_key_heads": 4}, layer_types=_HYBRID_LAYERS),
    "lfm2": dict(_DECODER, layer_types=_CONVOLUTION_LAYERS),
    "lfm2_moe": dict(_DECODER, **_EXPERTS, num_dense_layers=1, layer_types=_CONVOLUTION_LAYERS),
    "bamba": dict(_DECODER, **_STATE_SPACE, attn_layer_indices=[1]),
    "falcon_h1": dict(_DECODER, **_STATE_SPACE, mamba_d_ssm=64),
    "granitemoehybrid": dict(
        _DECODER,
        **_STATE_SPACE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=_HYBRID_LAYERS,
    ),
    "nemotron_h": dict(
        {name: value for name, value in _DECODER.items() if name != "num_hidden_layers"},
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        layers_block_type=["linear_attention", "full_attention", "moe"],
    ),
    "zamba2": dict(
        {**_DECODER, "num_key_value_heads": 4, **_SHARED_BLOCK},
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=16,
    ),
    "mamba2": dict(_MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    "mamba": dict(_MAMBA),
    "falcon_mamba": dict(_MAMBA),
    "jamba": dict(
        _DECODER, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8
    ),
    "zamba": dict(
        {**_DECODER, "num_key_value_heads": 4, **_SHARED_BLOCK},
        mamba_d_state=8,
        n_mamba_heads=2,
    ),
    "kimi_linear": dict(
        {**_DECODER, "num_key_value_heads": 4},
        **_LATENT,
        head_dim=8,
        moe_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=_HYBRID_LAYERS,
    ),
    "bailing_hybrid": dict(
        {**_DECODER, "num_key_value_heads": 4},
        **_LATENT,
        head_dim=8,
        moe_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        layer_types=_HYBRID_LAYERS,
    ),
}

_DECODER_OF_EXPERTS = {name: value for name, value in _DECODER.items() if name != "intermediate_size"}
_INKLING = dict(
    head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    sliding_window_size=6,
    d_rel=4,
    rel_extent=16,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    layer_types=["hybrid_sliding", "hybrid"],
    mlp_layer_types=["dense", "sparse"],
)
# Attention that scores every token with the tokens of the whole row.
_INDEXED_LAYERS = ["linear_attention", "indexed_attention"]

# Types whose packs cannot be kept apart by the functions that are replaced.
REFUSED: Dict[str, Dict[str, Any]] = {
    "recurrent_gemma": dict(_DECODER, num_hidden_layers=3, head_dim=8, lru_width=32),
    "minimax": dict(_DECODER, num_local_experts=4, block_size=4, layer_types=_HYBRID_LAYERS),
    "rwkv": dict(
        vocab_size=VOCABULARY, hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2
    ),
    "xlstm": dict(vocab_size=VOCABULARY, hidden_size=64, num_blocks=2, num_heads=2, qk_dim_factor=1.0, chunk_size=16),
    "zaya": dict(_DECODER, head_dim=8, num_experts=4, moe_intermediate_size=16),
    "glm5_next": dict(
        text_config=dict(
            {**_DECODER, "num_key_value_heads": 4},
            model_type="glm5_next_text",
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=0,
            qk_nope_head_dim=8,
            v_head_dim=8,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            linear_head_dim=8,
            linear_num_heads=4,
            index_topk=32,
            index_kpool=1,
            index_head_dim=8,
            index_n_heads=2,
            layer_types=_INDEXED_LAYERS,
            mlp_layer_types=["dense", "sparse"],
        ),
        vision_config=dict(
            depth=1,
            hidden_size=32,
            num_heads=2,
            intermediate_size=32,
            out_hidden_size=32,
            projection_intermediate_size=32,
        ),
    ),
    "qwen4_exp_text": dict(
        _DECODER_OF_EXPERTS,
        **_DELTA,
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        head_dim=8,
        layer_types=_INDEXED_LAYERS,
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=64,
        indexer_compress_ratio=4,
    ),
}

# Types whose packs are kept apart, but only under transformers' own attention: ours has no learned position bias.
EAGER_ONLY: Dict[str, Dict[str, Any]] = {"inkling_text": dict(_DECODER, **_INKLING)}

# What transformers 5.24 added to the three; 5.23 has two of them, whose convolutions cannot be told yet.
if "lfm3" in CONFIG_MAPPING and "lara_mini" not in CONFIG_MAPPING:
    _CONVOLUTIONS = ["conv", "full_attention", "sliding_attention"]
    REFUSED["lfm3"] = dict(_DECODER, num_hidden_layers=3, head_dim=8, sliding_window=6, layer_types=_CONVOLUTIONS)
    REFUSED["inkling2_text"] = dict(
        _DECODER_OF_EXPERTS, **_INKLING, unpadded_vocab_size=VOCABULARY, n_layers_per_attn_res_block=1
    )
elif "lfm3" in CONFIG_MAPPING:
    _THREE_LAYERS = dict(num_hidden_layers=3, head_dim=8, sliding_window=6)
    MODELS["lfm3"] = dict(_DECODER, **_THREE_LAYERS, layer_types=["conv", "full_attention", "sliding_attention"])
    MODELS["lara_mini"] = dict(
        _DECODER_OF_EXPERTS,
        **_DELTA,
        **_EXPERTS,
        **_THREE_LAYERS,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "sliding_attention", "full_attention"],
    )
    _INKLING2 = dict(_DECODER_OF_EXPERTS, **_INKLING, unpadded_vocab_size=VOCABULARY, n_layers_per_attn_res_block=1)
    EAGER_ONLY["inkling2_text"] = _INKLING2
    EAGER_ONLY["inkling2_loop_text"] = dict(
        _INKLING2,
        num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=4,
    )

ENCODERS = ("xlm-roberta", "modernbert", "esm")


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of ``model_type`` with ``changes``; ``changes`` alone for a type without one."""
    known = {**MODELS, **REFUSED, **EAGER_ONLY}
    return CONFIG_MAPPING[model_type](**{**known.get(model_type, {}), **changes})


def redraw(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw the parameters of ``model`` again, so that each of them moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(draw.abs().log())
            elif name.endswith(("conv1d.weight", "conv.weight")):
                parameter.copy_(0.5 * draw)
            elif parameter.dim() >= 2:
                parameter.copy_(0.15 * draw)
            else:
                parameter.add_(0.1 * draw)
    return model


def build(model_type: str, attention: Optional[str] = None, **changes: Any) -> torch.nn.Module:
    """A float32 model with redrawn parameters; the same numbers for the same arguments, whatever ``attention`` is."""
    auto = AutoModelForMaskedLM if model_type in ENCODERS else AutoModelForCausalLM
    if model_type == "glm5_next":
        auto = AutoModelForImageTextToText  # has no class for text alone
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config(model_type, **changes), attn_implementation=attention)
    return redraw(model)


def samples(lengths: List[int], seed: int = 1) -> List[Dict[str, List[int]]]:
    """One feature dictionary a sample, as a data set yields them; ids avoid the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]


def assert_logits_equal(got, expected):
    assert got.shape == expected.shape
    difference = (got - expected).abs().max().item()
    assert difference <= LOGIT_TOLERANCE * max(1.0, expected.abs().max().item()), f"logits differ by {difference:.1e}"


def assert_gradients_equal(got, expected):
    assert got.keys() == expected.keys()
    overall = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = (got[name] - gradient).abs().max().item()
        allowed = GRADIENT_TOLERANCE * gradient.abs().max().item() + GRADIENT_FLOOR * overall
        assert difference <= allowed, f"gradient of {name} differs by {difference:.1e}, allowed {allowed:.1e}"


def load(model_type, **changes):
    """The model as a user loads it, by the one string."""
    with allow_all_hub_kernels():
        return build(model_type, NAME, **changes)


def first_position(model_type):
    return 2 if model_type == "xlm-roberta" else 0


def pack(model_type="llama", setting="position_ids", lengths=LENGTHS, **extra):
    """One packed batch of the flattening collator, without labels."""
    collator = DataCollatorWithFlattening(position_ids_start=first_position(model_type), **SETTINGS[setting])
    batch = collator(samples(lengths), return_tensors="pt")
    del batch["labels"]
    return {**batch, **extra}


def run(model, batches):
    """Logits ``[tokens, V]`` and parameter gradients of a loss that is a sum over tokens."""
    model.zero_grad()
    logits = []
    for batch in batches:
        logits.append(model(**batch).logits[0])
        logits[-1].square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat([part.detach() for part in logits]), gradients


def alone(lengths=LENGTHS):
    return [dict(input_ids=torch.tensor([sample["input_ids"]])) for sample in samples(lengths)]


def check_packed_equals_alone(model_type, reference, attention=NAME, lengths=LENGTHS, **changes):
    """One row of the matrix of models: raises AssertionError where a packed run differs from ``reference``.

    Training without checkpointing, with non-reentrant and with reentrant checkpointing, then evaluation; each of them
    with every setting of the collator. ``reference`` is what :func:`run` returns for stock transformers on the samples
    alone. Returns the model.
    """
    logits, gradients = reference
    with allow_all_hub_kernels():
        model = build(model_type, attention, **changes).train()
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            assert model.is_gradient_checkpointing
        for setting in SETTINGS:
            packed_logits, packed_gradients = run(model, [pack(model_type, setting, lengths)])
            assert_logits_equal(packed_logits, logits)
            assert_gradients_equal(packed_gradients, gradients)
    model.eval()
    for setting in SETTINGS:
        with torch.no_grad():
            assert_logits_equal(model(**pack(model_type, setting, lengths)).logits[0], logits)
    return model


def left_padded(lengths):
    """A batch of prompts that end together, as generation wants them."""
    rows = [sample["input_ids"] for sample in samples(lengths)]
    longest = max(lengths)
    return dict(
        input_ids=torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        attention_mask=torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    )


def check_generation(model_type):
    """Greedy generation through the one string equals stock eager: one prompt, and a left-padded batch."""
    model, stock = load(model_type).eval(), build(model_type, "eager").eval()
    for prompt in (dict(input_ids=torch.tensor([samples([6])[0]["input_ids"]])), left_padded([3, 6])):
        arguments = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
        got, expected = model.generate(**prompt, **arguments), stock.generate(**prompt, **arguments)
        assert torch.equal(got.sequences, expected.sequences), "tokens differ"
        for ours, theirs in zip(got.logits, expected.logits):
            assert_logits_equal(ours, theirs)
