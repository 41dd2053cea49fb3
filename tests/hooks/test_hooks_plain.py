"""Calls that hold no pack run on our functions too, and are equal to transformers' torch code; one switch turns it off.

A row, a batch, batches padded on either side, prefill with a cache, decoding, and a prompt that is read in parts: every
family of models, against the same model with the switch off, which has the bits of transformers alone.
"""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from transformers import DynamicCache

from tests.models.tiny_models import (
    MODELS,
    assert_gradients_equal,
    build,
    left_padded,
    load,
    samples,
)

DELTA, KDA = "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"
# Family -> the function of its sequences and that of its decoding steps, beside the convolution's two.
FAMILIES = {
    "qwen3_5_text": ("chunk_gated_delta_rule", DELTA),
    "qwen3_next": ("chunk_gated_delta_rule", DELTA),
    "olmo_hybrid": ("chunk_gated_delta_rule", DELTA),
    "kimi_linear": ("chunk_kda", KDA),
    "bailing_hybrid": ("chunk_kda", KDA),
    "bamba": ("mamba_chunk_scan_combined", "selective_state_update"),
    "mamba2": ("mamba_chunk_scan_combined", "selective_state_update"),
    "falcon_h1": ("mamba_chunk_scan_combined", "selective_state_update"),
    "granitemoehybrid": ("mamba_chunk_scan_combined", "selective_state_update"),
    "nemotron_h": ("mamba_chunk_scan_combined", "selective_state_update"),
    "zamba2": ("mamba_chunk_scan_combined", "selective_state_update"),
    "mamba": ("selective_scan_fn", "selective_state_update"),
    "falcon_mamba": ("selective_scan_fn", "selective_state_update"),
    "jamba": ("selective_scan_fn", "selective_state_update"),
    "zamba": ("selective_scan_fn", "selective_state_update"),
    "lfm2": (),
    "lfm2_moe": (),
}
SEQUENCES = {name: ("causal_conv1d_fn", *functions[:1]) for name, functions in FAMILIES.items()}
STEPS = {name: ("causal_conv1d_update", *functions[1:]) for name, functions in FAMILIES.items()}
TOLERANCE = 1e-5
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")


@contextmanager
def left_to_transformers(kernel):
    kernel.install_hooks(plain=False)
    try:
        yield
    finally:
        kernel.install_hooks(plain=True)


@pytest.fixture
def served(kernel, monkeypatch):
    """The names of functions whose plain calls ours have served, in order; cleared by the test."""
    names = []
    table = kernel.hooks.plain.SERVED

    def recorded(name, serve):
        def record(*args, **keywords):
            result = serve(*args, **keywords)
            if result is not None:
                names.append(name)
            return result

        return record

    for name, serve in list(table.items()):
        monkeypatch.setitem(table, name, recorded(name, serve))
    kernel.remove_hooks()  # what is in place holds the table's entries
    kernel.install_hooks()
    yield names
    monkeypatch.undo()
    kernel.remove_hooks()
    kernel.install_hooks()


def assert_close(got, expected, tolerance=TOLERANCE):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    difference = (got - expected).abs().max().item()
    assert difference <= tolerance * max(1.0, expected.abs().max().item()), f"differs by {difference:.1e}"


def batches():
    """A row, a batch of whole rows, and batches padded on the left and on the right."""
    row, *_ = samples([19])
    rows = [sample["input_ids"] for sample in samples([11, 11, 11], seed=2)]
    left = left_padded([4, 13, 2])
    right = {name: value.flip(1) for name, value in left.items()}
    return {
        "a row": dict(input_ids=torch.tensor([row["input_ids"]])),
        "a batch": dict(input_ids=torch.tensor(rows)),
        "left padding": left,
        "right padding": right,
    }


def states_of(cache):
    """Every state of a cache in order: of convolutions, recurrences and attention."""
    found = []
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            found += [state for _, state in sorted(getattr(layer, name, {}).items()) if state is not None]
        found += [part for part in (getattr(layer, "keys", None), getattr(layer, "values", None)) if part is not None]
    return found


# ---- whole models ----


def trained(model, batch):
    """Logits of real tokens, and the gradient of every parameter."""
    model.zero_grad()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    logits = model(**batch, use_cache=False).logits[real]
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_training_and_evaluation(model_type, kernel, served):
    model = build(model_type, "eager")
    for form, batch in batches().items():
        for training in (True, False):
            model.train(training)
            with left_to_transformers(kernel):
                expected, gradients = trained(model, batch)
                assert not served
            logits, got = trained(model, batch)
            assert set(served) == set(SEQUENCES[model_type]), form
            served.clear()
            assert_close(logits, expected)
            assert_gradients_equal(got, gradients)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "mamba", "lfm2"])
def test_checkpointed_training(model_type, use_reentrant, kernel):
    model = build(model_type, "eager").train()
    batch = batches()["left padding"]
    with left_to_transformers(kernel):
        expected, gradients = trained(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    logits, got = trained(model, batch)
    assert_close(logits, expected)
    assert_gradients_equal(got, gradients)


GREEDY = dict(
    max_new_tokens=5, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    use_cache=True,
)  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_generation(model_type, kernel, served):
    """Tokens, logits and all states of the cache, by our attention and by transformers' own."""
    prompts = (dict(input_ids=torch.tensor([samples([9])[0]["input_ids"]])), left_padded([2, 7]))
    for model in (build(model_type, "eager").eval(), load(model_type).eval()):
        for prompt in prompts:
            with left_to_transformers(kernel):
                expected = model.generate(**prompt, **GREEDY)
                assert not served
            got = model.generate(**prompt, **GREEDY)
            assert set(served) == {*SEQUENCES[model_type], *STEPS[model_type]}
            served.clear()
            assert torch.equal(got.sequences, expected.sequences)
            for ours, theirs in zip(got.logits, expected.logits):
                assert_close(ours, theirs)
            caches = states_of(got.past_key_values), states_of(expected.past_key_values)
            assert len(caches[0]) == len(caches[1]) > 0
            for ours, theirs in zip(*caches):
                assert_close(ours, theirs)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_prompt_that_is_read_in_parts(model_type, kernel, served):
    """Several tokens beside a filled cache, twice, and then one."""
    model = build(model_type, "eager").eval()
    tokens = torch.tensor([sample["input_ids"] for sample in samples([14, 14])])

    def parts():
        cache, logits = DynamicCache(config=model.config), []
        for start, end in ((0, 6), (6, 11), (11, 13), (13, 14)):
            mask = torch.ones(2, end, dtype=torch.long)
            with torch.no_grad():
                call = dict(input_ids=tokens[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True)
                if model_type in WITHOUT_ATTENTION:
                    call["cache_params"] = call.pop("past_key_values")
                    call["attention_mask"] = mask[:, start:]
                logits.append(model(**call).logits)
        return torch.cat(logits, dim=1), states_of(cache)

    with left_to_transformers(kernel):
        expected, states = parts()
    logits, got = parts()
    assert set(served) == {*SEQUENCES[model_type], *STEPS[model_type]}
    assert_close(logits, expected)
    for ours, theirs in zip(got, states):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "mamba2", "mamba", "jamba", "lfm2"])
def test_half_precision_is_no_farther_from_float32(model_type, dtype, kernel):
    """Prefill and decoding, logits against those of the same parameters in float32: at most as far as the stock path,
    and a quarter more for the luck of rounding."""
    # A token that is sent to another expert is no rounding error, so each goes to all of them.
    configured = MODELS[model_type]
    experts = configured.get("num_local_experts", configured.get("num_experts"))
    changes = {} if experts is None else {"num_experts_per_tok": experts}
    model = build(model_type, "eager", **changes).eval().to(dtype)
    exact = copy.deepcopy(model).float()
    batch = left_padded([9, 24, 5, 17])
    real = batch["attention_mask"].bool()

    def run(model):
        with torch.no_grad():
            out = model(**batch, use_cache=True)
            cache = {"past_key_values": getattr(out, "past_key_values", None)}
            if model_type in WITHOUT_ATTENTION:
                cache = {"cache_params": out.cache_params}
            mask = torch.cat([batch["attention_mask"], torch.ones(4, 1, dtype=torch.long)], 1)
            step = dict(input_ids=torch.tensor([[5], [6], [7], [8]]), attention_mask=mask, use_cache=True, **cache)
            if model_type in WITHOUT_ATTENTION:
                step.pop("attention_mask")
            return torch.cat([out.logits[real], model(**step).logits[:, 0]]).float()

    with left_to_transformers(kernel):
        truth, stock = run(exact), run(model)
    ours = run(model)
    error, allowed = (ours - truth).square().mean().sqrt(), (stock - truth).square().mean().sqrt()
    assert error <= 1.25 * allowed, f"{error:.1e} beside {allowed:.1e}"


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "mamba", "lfm2"])
def test_compiled(model_type, kernel, served):
    """One graph without a break, for a row and for a padded batch."""
    model = build(model_type, "eager").eval()
    for batch in (batches()["a row"], batches()["left padding"]):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad(), left_to_transformers(kernel):
            expected = model(**batch, use_cache=False).logits
        with torch.no_grad():
            got = compiled(**batch, use_cache=False).logits
        assert set(served) == set(SEQUENCES[model_type])
        served.clear()
        assert_close(got, expected)


# ---- the switch ----


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "mamba", "lfm2"])
def test_switch_off_is_transformers_alone(model_type, kernel):
    """The bits of everything: logits, gradients, generated tokens and logits."""
    model = build(model_type, "eager")
    batch, prompt = batches()["left padding"], left_padded([2, 7])

    def everything():
        logits, gradients = trained(model.train(), batch)
        out = model.eval().generate(**prompt, **GREEDY)
        return [logits, *gradients.values(), out.sequences, *out.logits, *states_of(out.past_key_values)]

    kernel.remove_hooks()
    try:
        expected = everything()
    finally:
        kernel.install_hooks()
    with left_to_transformers(kernel):
        for ours, theirs in zip(everything(), expected):
            assert torch.equal(ours, theirs)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(everything(), expected))


def test_status_tells(kernel):
    load("qwen3_5_text")
    status = kernel.hooks_status()
    assert status.plain == ("cpu",) and "plain calls    served on CPU" in str(status)
    assert {"causal_conv1d_update", DELTA} <= set(status.functions)
    with left_to_transformers(kernel):
        assert kernel.hooks_status().plain == ()
        assert kernel.install_hooks().plain == ()  # again: changes nothing
        assert "plain calls    left to transformers" in str(kernel.hooks_status())
        assert kernel.install_hooks(plain="cpu,cuda").plain == ("cpu", "cuda")
    try:
        assert kernel.remove_hooks().plain == ()
    finally:
        assert kernel.install_hooks().plain == ("cpu",)


def test_wrong_words_for_the_switch(kernel):
    with pytest.raises(ValueError, match="install_hooks: plain must be 0, 1 or device types, .* got 'gpu'"):
        kernel.install_hooks(plain="gpu")
    with pytest.raises(TypeError, match="install_hooks: plain must be True, False, None or device types"):
        kernel.install_hooks(plain=1)
    assert kernel.hooks_status().plain == ("cpu",)


@pytest.mark.parametrize("said, devices", [("0", ()), ("1", ("cpu",)), ("", ("cpu",)), ("cpu, cuda", ("cpu", "cuda"))])
def test_environment_variable(said, devices, kernel, monkeypatch):
    monkeypatch.setenv("PACKFREE_PLAIN", said)
    kernel.remove_hooks()
    try:
        assert kernel.install_hooks().plain == devices
    finally:
        monkeypatch.undo()
        kernel.install_hooks(plain=True)


# ---- each function ----


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def delta_arguments(dtype, tokens, decay=()):
    q, k, v, beta = tensors(*[(2, tokens, 3, 8)] * 3, (2, tokens, 3), dtype=dtype)
    (g, state) = tensors((2, tokens, 3, *decay), (2, 3, 8, 8), seed=1)
    return (q, k, v), dict(g=-g.abs(), beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True), dict(initial_state=state)


def mamba2_arguments(dtype, tokens):
    x, dt, B, C = tensors((2, tokens, 4, 8), (2, tokens, 4), *[(2, tokens, 2, 8)] * 2, dtype=dtype)
    A, D, bias, state = tensors((4,), (4,), (4,), (2, 4, 8, 8), seed=1)
    D, bias = D.to(dtype), bias.to(dtype)
    keywords = dict(chunk_size=16, D=D, z=None, dt_bias=bias, dt_softplus=True, dt_limit=(0.0, float("inf")))
    return (x, dt, -A.abs(), B, C), keywords, dict(initial_states=state)


def mamba1_arguments(dtype, tokens):
    u, delta, B, C, z = tensors(*[(2, 16, tokens)] * 2, *[(2, 8, tokens)] * 2, (2, 16, tokens), dtype=dtype)
    A, D, bias = tensors((16, 8), (16,), (16,), seed=1)
    return (u, delta, -A.abs(), B, C), dict(D=D, z=z, delta_bias=bias, delta_softplus=True), {}


def update2_arguments(dtype, state_dtype):
    x, dt, B, C = tensors((2, 4, 8), (2, 1, 4), *[(2, 2, 8)] * 2, dtype=dtype)
    A, D, bias, state = tensors((4,), (4,), (4,), (2, 4, 8, 8), seed=1)
    D, bias = (vector.to(dtype)[:, None].expand(4, 8) for vector in (D, bias))
    dt, A = dt.transpose(1, 2).expand(-1, -1, 8), -A.abs()[:, None, None].expand(4, 8, 8)
    return (state.to(state_dtype), x, dt, A, B, C, D), dict(z=None, dt_bias=bias, dt_softplus=True)


def update1_arguments(dtype, state_dtype):
    x, dt, B, C, z = tensors(*[(2, 16)] * 2, *[(2, 8)] * 2, (2, 16), dtype=dtype)
    A, D, bias, state = tensors((16, 8), (16,), (16,), (2, 16, 8), seed=1)
    return (state.to(state_dtype), x, dt, -A.abs(), B, C, D), dict(z=z, dt_bias=bias, dt_softplus=True)


# Name -> model type whose modeling file has it under this attribute, and what makes its arguments.
SEQUENCE_CALLS = {
    "chunk_gated_delta_rule": ("qwen3_5_text", "torch_chunk_gated_delta_rule", delta_arguments),
    DELTA: ("qwen3_5_text", "torch_recurrent_gated_delta_rule", delta_arguments),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention", lambda *a: delta_arguments(*a, decay=(8,))),
    KDA: ("kimi_linear", "recurrent_kimi_delta_attention", lambda *a: delta_arguments(*a, decay=(8,))),
    "mamba_chunk_scan_combined": ("bamba", "mamba2_chunk_scan", mamba2_arguments),
    "selective_scan_fn": ("mamba", "mamba_selective_scan", mamba1_arguments),
}
FINAL = {"mamba_chunk_scan_combined": "return_final_states", "selective_scan_fn": "return_last_state"}


def hooked_function(model_type, attribute):
    return getattr(sys.modules[type(build(model_type, "eager")).__module__], attribute)


def wide(value):
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def assert_like_stock(got, stock, truth):
    """Ours has the form of the stock result, and is as near to the truth."""
    got, stock, truth = (value if isinstance(value, tuple) else (value,) for value in (got, stock, truth))
    assert len(got) == len(stock)
    for ours, theirs, exact in zip(got, stock, truth):
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if theirs.dtype == exact.dtype == torch.float32 and torch.equal(theirs, exact):
            assert_close(ours, exact)
            continue
        error, allowed = ((value.float() - exact.float()).square().mean().sqrt() for value in (ours, theirs))
        assert error <= 1.1 * allowed + 1e-6, f"{error:.1e} beside {allowed:.1e}"


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SEQUENCE_CALLS)
def test_function_over_a_sequence(name, dtype, tokens, states, kernel, served):
    model_type, attribute, make = SEQUENCE_CALLS[name]
    hooked = hooked_function(model_type, attribute)
    positional, keywords, given = make(dtype, tokens)
    final = FINAL.get(name, "output_final_state")
    keywords.update(given if states else {"initial_state": None} if name == KDA else {}, **{final: states})
    got = hooked(*positional, **keywords, num_items_in_batch=3, position_ids=torch.arange(tokens)[None])
    assert served == [name]
    stock = hooked.packfree_stock(*positional, **keywords)
    truth = hooked.packfree_stock(*map(wide, positional), **{key: wide(value) for key, value in keywords.items()})
    assert_like_stock(got, stock, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("tokens, width", [(1, 4), (3, 4), (29, 3)])
def test_convolution(dtype, activation, tokens, width, kernel, served):
    x, weight, bias, state = tensors((2, 6, tokens), (6, width), (6,), (2, 6, width), dtype=dtype)
    for attribute, arguments in (("causal_conv1d_fn", (x,)), ("causal_conv1d_update", (x, state))):
        hooked = hooked_function("bamba", attribute)
        copies = [[value.clone() for value in arguments] for _ in range(3)]
        got = hooked(*copies[0], weight, bias, activation)
        stock = hooked.packfree_stock(*copies[1], weight, bias, activation)
        truth = hooked.packfree_stock(*map(wide, copies[2]), weight.float(), bias.float(), activation)
        assert_like_stock(got, stock, truth)
        assert len(arguments) == 1 or torch.equal(copies[0][1], copies[1][1])
    assert served == ["causal_conv1d_fn", "causal_conv1d_update"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type, make", [("bamba", update2_arguments), ("mamba", update1_arguments)])
def test_state_update(model_type, make, dtype, kernel, served):
    """In place, with the state in float32 or in the dtype of the tokens."""
    attribute = f"mamba{2 if model_type == 'bamba' else ''}_selective_state_update"
    hooked = hooked_function(model_type, attribute)
    for state_dtype in {torch.float32, dtype}:
        results = []
        for function, change in ((hooked, None), (hooked.packfree_stock, None), (hooked.packfree_stock, wide)):
            positional, keywords = make(dtype, state_dtype)
            if change is not None:
                positional = tuple(map(change, positional))
                keywords = {key: change(value) for key, value in keywords.items()}
            with torch.no_grad():
                results.append((function(*positional, **keywords), positional[0]))
        assert_like_stock(*results)
    assert set(served) == {"selective_state_update"}


# ---- what ours may not do stays with the stock function ----


def conv_call():
    return tensors((2, 6, 9), (6, 4), (6,))


def is_stock(served, hooked, *arguments):
    served.clear()
    result = hooked(*arguments)
    return not served and torch.equal(result, hooked.packfree_stock(*arguments))


def test_kinds_of_tensors_and_calls_that_are_not_served(kernel, served):
    hooked = hooked_function("bamba", "causal_conv1d_fn")
    x, weight, bias = conv_call()
    assert not is_stock(served, hooked, x, weight, bias) and served
    assert is_stock(served, hooked, x.double(), weight.double(), bias.double())  # plain scalar code
    assert is_stock(served, hooked, x, torch.randn(6, 9), bias)  # wider than ours

    class Marked(torch.Tensor):
        pass

    assert is_stock(served, hooked, x.as_subclass(Marked), weight, bias)
    assert is_stock(served, hooked, x, weight.as_subclass(Marked), bias)
    served.clear()
    assert hooked(x.to("meta"), weight.to("meta"), None).is_meta and not served
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert hooked(mode.from_tensor(x), mode.from_tensor(weight), None).shape == x.shape and not served


def test_transforms_that_are_not_served(kernel, served):
    """Derivatives of every kind and batching by torch.func, where the stock function has them."""
    hooked = hooked_function("bamba", "causal_conv1d_fn")
    x, weight, bias = conv_call()
    stacked = torch.stack([x, 2 * x])
    got = torch.func.vmap(lambda x: hooked(x, weight, bias))(stacked)
    assert_close(got, torch.stack([hooked.packfree_stock(each, weight, bias) for each in stacked]))
    torch.func.grad(lambda x: hooked(x, weight, bias).sum())(x)
    _, tangent = torch.func.jvp(lambda x: hooked(x, weight, bias), (x,), (x,))
    assert tangent.shape == x.shape
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(hooked(forward_ad.make_dual(x, x), weight, bias)).tangent is not None
    assert not served


def test_exported_and_traced_programs_hold_no_function_of_ours(kernel, served):
    hooked = hooked_function("bamba", "causal_conv1d_fn")

    class Layer(torch.nn.Module):
        def forward(self, x, weight, bias):
            return hooked(x, weight, bias)

    arguments = tuple(conv_call())
    for strict in (True, False):
        program = torch.export.export(Layer(), arguments, strict=strict)
        assert "packfree" not in str(program.graph)
    traced = torch.jit.trace(Layer(), arguments, check_trace=False).graph
    # The text of a graph names the files that it comes from too, wherever they lie.
    assert not [node.kind() for node in traced.nodes() if "packfree" in node.kind()]
    assert not served


def test_gradients_through_a_decoding_step(kernel, served):
    """The stock functions have them, ours have not."""
    update = hooked_function("bamba", "causal_conv1d_update")
    x, weight, bias, state = tensors((2, 6, 1), (6, 4), (6,), (2, 6, 4))
    update(x.requires_grad_(), state, weight, bias).sum().backward()
    recurrent = hooked_function("qwen3_5_text", "torch_recurrent_gated_delta_rule")
    positional, keywords, given = delta_arguments(torch.float32, 1)
    given["initial_state"].requires_grad_()
    recurrent(*positional, **keywords, **given)[0].sum().backward()
    assert x.grad.abs().sum() > 0 and given["initial_state"].grad.abs().sum() > 0 and not served


def test_gradients_of_states_of_a_sequence(kernel, served):
    """Initial states get the stock gradients, from the outputs and from the final states."""
    for name in ("chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined"):
        model_type, attribute, make = SEQUENCE_CALLS[name]
        hooked, gradients = hooked_function(model_type, attribute), []
        for function in (hooked, hooked.packfree_stock):
            positional, keywords, given = make(torch.float32, 21)
            leaves = [value.requires_grad_() for value in (*positional, *given.values())]
            y, state = function(*positional, **keywords, **given, **{FINAL.get(name, "output_final_state"): True})
            gradients.append(torch.autograd.grad(y.square().sum() + state.square().sum(), leaves))
        for ours, theirs in zip(*gradients):
            assert_close(ours, theirs, 2e-5)
        assert served.pop() == name


def test_another_kernel_in_the_place_of_the_torch_code_serves(kernel, served, monkeypatch):
    """use_kernels=True puts a kernel of the Hub on the function, an installed package is inside of it."""
    hooked = hooked_function("bamba", "causal_conv1d_fn")
    arguments = conv_call()
    stock = hooked.packfree_stock
    monkeypatch.setattr(stock, "forward", lambda *args, **keywords: "another kernel")
    assert hooked(*arguments) == "another kernel"
    monkeypatch.undo()
    wrapped = kernel.hooks.internals._closed_over(type(stock).forward, "func")
    cell = wrapped.__closure__[wrapped.__code__.co_freevars.index("is_new_implementation")]
    try:
        cell.cell_contents = True
        hooked(*arguments)
        assert not served
    finally:
        cell.cell_contents = False


def test_the_package_leaves_plain_calls_when_the_environment_says_so(tmp_path):
    """In a process of its own, as users set it."""
    code = """
import torch, transformers.models.lfm2.modeling_lfm2 as lfm2
from tests.harness.kernel import load_kernel
kernel = load_kernel()
x, weight = torch.randn(1, 4, 6), torch.randn(4, 3)
same = torch.equal(lfm2.causal_conv1d_fn(x, weight), lfm2.causal_conv1d_fn.packfree_stock(x, weight))
print(kernel.hooks_status().plain, same, str(kernel.hooks_status()))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PACKFREE_PLAIN": "0"}, capture_output=True, text=True
    )
    assert output.stdout.startswith("() True"), output.stderr
    assert "left to transformers" in output.stdout
