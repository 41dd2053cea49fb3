"""Activation checkpointing by any wrapper: a recomputed layer has its own forward's boundaries, or there is an error.

transformers' own checkpointing re-enters them. Wrappers from elsewhere do not, and where a model or a wrapper drops the
keywords the recompute finds them by autograd's numbers (hooks/recompute.py). What those cannot tell is refused.
"""

import functools
import importlib
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.models.tiny_models import (
    SETTINGS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    load,
    pack,
    run,
)

LENGTHS = [5, 9, 3]

# Layers that are handed the boundary keywords, and models that drop them on the way.
HANDED = ["llama", "qwen3_5_text", "lfm2", "bamba", "kimi_linear"]
DROPPED = ["jamba", "mamba", "mamba2", "falcon_mamba"]


@pytest.fixture(autouse=True)
def recompute(kernel):
    """The module that keeps the forwards, emptied."""
    module = importlib.import_module(f"{kernel.__name__}.hooks.recompute")
    module.forget()
    yield module
    module.forget()


@pytest.fixture(scope="module")
def reference(kernel):
    """model type -> logits and gradients of stock transformers, one sample at a time, computed once."""
    return functools.lru_cache(lambda model_type: run(build(model_type, "eager").train(), alone(LENGTHS)))


def layers_of(model):
    return (model.model if hasattr(model, "model") else model.backbone).layers


class ByHand(torch.nn.Module):
    """A layer checkpointed by torch's function; what the layer is called with is checkpointed along with it."""

    def __init__(self, layer, use_reentrant):
        super().__init__()
        self.layer = layer
        self.use_reentrant = use_reentrant

    def forward(self, *args, **kwargs):
        # Reentrant checkpointing takes no keywords.
        call = functools.partial(self.layer, **kwargs)
        return checkpoint(call, *args, use_reentrant=self.use_reentrant)


class Forgetful(torch.nn.Module):
    """A layer that gets no boundary keywords, as where a model drops them; ``recompute`` None is not checkpointed."""

    def __init__(self, layer, recompute):
        super().__init__()
        self.layer = layer
        self.recompute = recompute

    def forward(self, hidden_states, **kwargs):
        dropped = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        if self.recompute is None:
            return self.layer(hidden_states, **kept)
        run_layer = lambda hidden: self.layer(hidden, **kept)  # noqa: E731
        return checkpoint(run_layer, hidden_states, use_reentrant=self.recompute)


def by_module(wrap):
    def apply(model):
        layers = layers_of(model)
        for index in range(len(layers)):
            layers[index] = wrap(layers[index])

    return apply


def by_torch(implementation):
    """What FSDP's users and accelerate (with FSDP 1) call."""

    def apply(model):
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=implementation)
        kinds = {type(layer) for layer in layers_of(model)}
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda part: type(part) in kinds)

    return apply


def by_accelerate(model):
    """What accelerate calls with FSDP 2."""
    names = sorted({type(layer).__name__ for layer in layers_of(model)})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=names,
    )  # fmt: skip
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)


def by_composable(model):
    for layer in layers_of(model):
        composable_checkpoint(layer)


def by_transformers(use_reentrant):
    def apply(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    return apply


WRAPPERS = {
    "transformers": by_transformers(False),
    "transformers, reentrant": by_transformers(True),
    "by hand": by_module(lambda layer: ByHand(layer, False)),
    "by hand, reentrant": by_module(lambda layer: ByHand(layer, True)),
    "checkpoint_wrapper": by_torch(CheckpointImpl.NO_REENTRANT),
    "checkpoint_wrapper, reentrant": by_torch(CheckpointImpl.REENTRANT),
    "accelerate": by_accelerate,
    "composable": by_composable,
    "dropping the keywords": by_module(lambda layer: Forgetful(layer, False)),
    "dropping the keywords, reentrant": by_module(lambda layer: Forgetful(layer, True)),
}


def wrapped(model_type, wrapper):
    model = load(model_type).train()
    model.enable_input_require_grads()
    plain = set(map(type, model.modules()))
    WRAPPERS[wrapper](model)
    if wrapper in ("accelerate", "checkpoint_wrapper"):
        assert set(map(type, model.modules())) - plain, "nothing was wrapped"
    return model


def named_as_before(gradients):
    """Without what the wrappers add to a parameter's name."""
    added = re.compile(r"\.(layer|_checkpoint_wrapped_module)(?=\.)")
    return {added.sub("", name): gradient for name, gradient in gradients.items()}


def check(model, batch, expected):
    logits, gradients = run(model, [batch])
    assert_logits_equal(logits, expected[0])
    assert_gradients_equal(named_as_before(gradients), expected[1])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model_type", [*HANDED, *DROPPED])
def test_recompute_is_exact(model_type, wrapper, reference):
    model = wrapped(model_type, wrapper)
    for setting in SETTINGS:
        check(model, pack(model_type, setting, LENGTHS), reference(model_type))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "bamba", "jamba"])
def test_one_sample_of_one_token(model_type, wrapper):
    """A row of one token, position_ids alone and use_cache unset: no cache that a recompute would fill again."""
    check(wrapped(model_type, wrapper), pack(lengths=[1]), run(build(model_type, "eager").train(), alone([1])))


@pytest.mark.parametrize("model_type", [*HANDED, "jamba"])
def test_model_that_drops_the_keywords(model_type, reference):
    """The context stands in for lost keywords, in the forward and in transformers' own recompute."""
    model = load(model_type).train()
    by_module(lambda layer: Forgetful(layer, None))(model)
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            by_transformers(use_reentrant)(model)
        for setting in SETTINGS:
            check(model, pack(model_type, setting, LENGTHS), reference(model_type))


# Wrappers under which jamba's and lfm2's layers know nothing in their recompute but what autograd's numbers tell.
BLIND = ["dropping the keywords", "dropping the keywords, reentrant"]


def several_forwards(model, batches):
    """Gradients of one backward pass over the sum of several forwards."""
    model.zero_grad()
    sum(model(**batch).logits.square().sum() for batch in batches).backward()
    return named_as_before({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("wrapper", BLIND)
@pytest.mark.parametrize("model_type", ["llama", "lfm2", "jamba"])
def test_several_forwards_before_their_backward(model_type, wrapper):
    """Packs of one shape that are cut differently, and an unpacked batch of that shape between and behind them."""
    unpacked = dict(input_ids=pack(lengths=LENGTHS)["input_ids"], use_cache=False)
    batches = [pack(lengths=LENGTHS), unpacked, pack(lengths=[9, 8]), pack(lengths=[17]), unpacked]
    expected = several_forwards(load(model_type).train(), batches)
    assert_gradients_equal(several_forwards(wrapped(model_type, wrapper), batches), expected)


UNKNOWN = "not known in its recompute.*gradient_checkpointing_enable"


@pytest.mark.parametrize("wrapper", BLIND)
@pytest.mark.parametrize("model_type", ["llama", "lfm2", "jamba"])
def test_forgotten_forward_is_an_error(model_type, wrapper, recompute):
    """More forwards than are kept, all before the first backward pass."""
    model = wrapped(model_type, wrapper)
    loss = model(**pack(lengths=LENGTHS)).logits.square().sum()
    later = [model(input_ids=torch.tensor([[5, 6]]), use_cache=False).logits.sum() for _ in range(recompute._MOST)]
    with pytest.raises(RuntimeError, match=UNKNOWN):
        loss.backward()
    sum(later).backward()  # these are known


@pytest.mark.parametrize("model_type", ["lfm2", "jamba"])
def test_checkpoint_inside_a_recompute_is_an_error(model_type):
    """A reentrant checkpoint in another one is made only in the recompute, where no forward of a model runs."""
    model = wrapped(model_type, "dropping the keywords, reentrant")
    by_module(lambda layer: ByHand(layer, True))(model)
    loss = model(**pack(lengths=LENGTHS)).logits.square().sum()
    with pytest.raises(RuntimeError, match=UNKNOWN):
        loss.backward()


def test_unpacked_recompute_is_never_an_error(recompute):
    """Without packs there is nothing to know, however many forwards and whatever the checkpoints are nested in."""
    model = wrapped("lfm2", "dropping the keywords, reentrant")
    by_module(lambda layer: ByHand(layer, True))(model)
    losses = [model(**alone(LENGTHS)[0], use_cache=False).logits.sum() for _ in range(recompute._MOST + 2)]
    sum(losses).backward()


def test_threads_that_number_alike_are_an_error():
    """Data parallel replicas run in threads of their own, each of which numbers its nodes from 0."""
    model = wrapped("jamba", "dropping the keywords")
    losses = []

    def forward(lengths):
        losses.append(model(**pack(lengths=lengths)).logits.square().sum())

    for lengths in (LENGTHS, [9, 8]):
        thread = threading.Thread(target=forward, args=(lengths,))
        thread.start()
        thread.join()
    with pytest.raises(RuntimeError, match=UNKNOWN):
        losses[0].backward()


def test_evaluation_between_forward_and_backward():
    """Forwards without gradients are no forwards to remember."""
    model = wrapped("jamba", "dropping the keywords, reentrant")
    batch = pack(lengths=LENGTHS)
    expected = several_forwards(load("jamba").train(), [batch])
    model.zero_grad()
    loss = model(**batch).logits.square().sum()
    with torch.no_grad():
        for _ in range(40):
            model(input_ids=batch["input_ids"], use_cache=False)
    loss.backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_gradients_equal(named_as_before(got), expected)


def test_compiled_layers():
    """Layers compiled one by one: what a trace cannot know goes back to eager mode, or is an error with fullgraph."""
    batch = pack(lengths=LENGTHS)
    expected = several_forwards(load("lfm2").train(), [batch])
    for fullgraph in (False, True):
        torch._dynamo.reset()
        model = wrapped("lfm2", "dropping the keywords")
        for layer in layers_of(model):
            layer.layer.forward = torch.compile(layer.layer.forward, backend="eager", fullgraph=fullgraph)
        if fullgraph:
            with pytest.raises(Exception, match=UNKNOWN):
                several_forwards(model, [batch])
        else:
            assert_gradients_equal(several_forwards(model, [batch]), expected)
