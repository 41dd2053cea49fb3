"""Faults of training on several ranks: heads split over ranks, and ranks whose packs are nothing alike.

Heads alone are split here, so every rank has the same boundaries; packs cut over ranks are in tests/context_parallel.
"""

import sys
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.harness.kernel import load_kernel
from tests.harness.ops import EXACT, causal_conv1d, flash_attn_varlen, gated_delta_rule, kda, mamba1_scan, mamba2_scan
from tests.harness.packings import Pack
from tests.harness.properties import cotangents, run_with_gradients
from tests.models.tiny_models import (
    LOGIT_TOLERANCE,
    SETTINGS,
    VOCABULARY,
    assert_gradients_equal,
    build,
    load,
    pack,
)

# How the harness calls each op with heads (or channels) that come in halves, and the axis on which a tensor has them;
# parameters have them on their first.
HALVES = {
    "causal_conv1d": (
        causal_conv1d.op_under_test(causal_conv1d.Case("")),
        dict(x=1, y=1, initial_states=1, final_states=1),
    ),
    "flash_attn_varlen": (
        flash_attn_varlen.op_under_test(flash_attn_varlen.Case("", sinks=True)),
        dict(q=1, k=1, v=1, out=1, lse=0),
    ),
    "gated_delta_rule": (
        gated_delta_rule.op_under_test(gated_delta_rule.Case("", key_heads=2, value_heads=4)),
        dict(q=2, k=2, v=2, g=2, beta=2, o=2, initial_state=1, final_state=1),
    ),
    "kda": (
        kda.op_under_test(kda.Case("", key_heads=2, value_heads=4, gate="softplus")),
        dict(q=2, k=2, v=2, g=2, beta=2, o=2, initial_state=1, final_state=1),
    ),
    "mamba1_scan": (
        mamba1_scan.op_under_test(mamba1_scan.Case("", channels=20, groups=2)),
        dict(u=1, delta=1, z=1, B=1, C=1, y=1, initial_states=1, last_states=1),
    ),
    "mamba2_scan": (
        mamba2_scan.op_under_test(mamba2_scan.Case("")),
        dict(x=2, dt=2, B=2, C=2, z=2, y=2, initial_states=1, final_states=1),
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_c56_halves_of_the_heads_are_the_whole(name):
    """Two ranks with two heads each give what one gives with four, gradients of parameters included."""
    op, axes = HALVES[name]
    documents = Pack("two documents", (5, 11))
    inputs, boundaries = op.make(documents, torch.float32), op.boundaries(documents)

    def run(given, weights):
        return run_with_gradients(lambda leaves: op.run(leaves, **boundaries), given, weights)

    def axis_of(tensor_name):
        return axes.get(op.base(tensor_name), 0)

    def half(tensors, rank):
        return {key: value.chunk(2, axis_of(key))[rank] for key, value in tensors.items()}

    with torch.no_grad():
        weights = cotangents(op.run(inputs, **boundaries))
    whole = run(inputs, weights)
    ranks = [run(half(inputs, rank), half(weights, rank)) for rank in (0, 1)]
    for key, value in whole.items():
        joined = torch.cat([rank[key] for rank in ranks], axis_of(key))
        torch.testing.assert_close(joined, value, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", EXACT)
def test_c58_no_tokens(name):
    """A rank without tokens gets empty outputs and parameter gradients of 0."""
    nothing = Pack("nothing", ())
    for case in EXACT[name]:
        op = case()
        inputs = op.make(nothing, torch.float32)
        results = run_with_gradients(
            lambda leaves, op=op: op.run(leaves, **op.boundaries(nothing)), inputs
        )
        for key, value in results.items():
            if op.kind(key) == "tokens":
                assert value.shape[op.token_axis[op.base(key)]] == 0, key
            elif op.kind(key) == "states":
                assert value.shape[0] == 0, key
            else:
                assert value.shape == inputs[op.base(key)].shape and bool((value == 0).all()), key


# Rank 0 packs forty tokens, rank 1 has one.
LENGTHS = [[20, 13, 7], [1]]
TOKENS = sum(map(sum, LENGTHS))
STEPS = 3


def loss_of(model, rank, step):
    """A sum over this rank's tokens, as a share of all; each step by another setting of the collator."""
    batch = pack("bamba", list(SETTINGS)[step], LENGTHS[rank], use_cache=False)
    return model(**batch).logits.square().sum() / TOKENS


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name.removeprefix("module.")] = full.clone()
    return found


def train(model, losses):
    """Plain gradient descent; the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(step).backward()
        steps.append(gradients_of(model))
        optimizer.step()
    return steps


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def one_of_two_processes(rank, folder):
    """A group of two, in which a collective that waits for a minute is a hang."""
    torch.set_num_threads(1)
    load_kernel()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(rank, folder):
    """One of two processes: the same three steps in one process, under DDP and under FSDP."""
    with one_of_two_processes(rank, folder):
        alone = load("bamba").train()
        expected = train(alone, lambda step: loss_of(alone, 0, step) + loss_of(alone, 1, step))
        for wrap in (DistributedDataParallel, sharded):
            model = wrap(load("bamba").train())
            # Both average over the ranks.
            steps = train(model, lambda step, model=model: 2 * loss_of(model, rank, step))
            for got, want in zip(steps, expected, strict=True):
                assert_gradients_equal(got, want)


def test_c58_ranks_of_unequal_packs(kernel, tmp_path):
    """Three samples beside one of a single token: no hang, and the gradients of one process with both."""
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=2)


def under_context_parallel(rank, folder):
    """One of two processes, each given a head and a tail of a row: ours refuses, what is not ours stays as it is."""
    with one_of_two_processes(rank, folder):
        models = {name: load(name).train() for name in ("llama", "bamba")}
        other = build("llama", "eager").train()
        compiled = torch.compile(load("llama", num_hidden_layers=1).train(), backend="eager", fullgraph=True)
        ids = torch.arange(32)[None] % 60
        positions = torch.arange(32)[None]
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=[ids, positions], buffer_seq_dims=[1, 1]):
            assert ids.shape == (1, 16)
            for model in (*models.values(), compiled):
                for call in (dict(position_ids=positions), {}):
                    # A graph that may not break wraps the error in one of its own.
                    kinds = (NotImplementedError, torch._dynamo.exc.Unsupported)
                    with pytest.raises(kinds, match=r"torch\\?'s context_parallel gives each rank a part"):
                        model(ids, **call)
            other(ids, position_ids=positions).logits.sum().backward()  # no attention of ours: as without us
        assert ids.shape == (1, 32)
        models["bamba"](ids, position_ids=positions).logits.sum().backward()
        for model in models.values():
            assert_served_in_one_stretch(rank, model.train())


def assert_served_in_one_stretch(rank, model):
    """Torch gives 30 tokens to two ranks as two halves: logits, and the mean of the ranks' losses over their halves."""
    ids, positions = torch.arange(30)[None] % 60, torch.cat([torch.arange(21), torch.arange(9)])[None]
    labels = torch.where(torch.arange(30)[None] % 5 == 2, -100, ids)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    whole = model(ids, position_ids=positions)
    own = slice(15 * rank, 15 * rank + 15)
    expected = model.loss_function(whole.logits[:, own], None, VOCABULARY, shift_labels=shifted[:, own])
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[ids, positions, labels], buffer_seq_dims=[1, 1, 1]):
        part = model(ids, position_ids=positions, labels=labels)
        torch.testing.assert_close(part.logits, whole.logits[:, own], rtol=0, atol=LOGIT_TOLERANCE)
        torch.testing.assert_close(part.loss, expected, rtol=1e-5, atol=1e-5)
        part.loss.backward()
        with pytest.raises(NotImplementedError, match="context_parallel inside sequence_parallel"):
            with load_kernel().sequence_parallel():
                model(ids, position_ids=positions)


def test_c91_a_row_cut_over_ranks_is_refused(kernel, tmp_path):
    """Both ranks raise before they compute or wait, where each has a head and a tail; one stretch each is served."""
    torch.multiprocessing.spawn(under_context_parallel, args=(str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("registered", ["with transformers", "as a device mesh"])
def test_c91_deepspeed_is_recognised(kernel, monkeypatch, registered):
    """DeepSpeed keeps its sequence-parallel group in one of two modules; these stand in for them."""
    groups, state = ModuleType("deepspeed.utils.groups"), ModuleType("parallel_state_sp")
    ranks = 2
    state._SEQUENCE_PARALLEL_GROUP = object() if registered == "with transformers" else None
    state.get_sequence_parallel_world_size = lambda: ranks
    groups.dist = SimpleNamespace(is_initialized=lambda: registered == "as a device mesh")
    groups._get_sequence_parallel_world_size = lambda: ranks
    model = load("lfm2").train()
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.sequence_parallel.parallel_state_sp", state)
    torch._dynamo.reset()
    for forward in (model, torch.compile(model, backend="eager")):
        with pytest.raises(NotImplementedError, match=r"Lfm2ForCausalLM .*DeepSpeed's sequence parallelism"):
            forward(**pack("lfm2"))
    ranks = 1
    model(**pack("lfm2"))


def test_c91_attention_of_other_tokens_than_the_models_is_refused(kernel, monkeypatch):
    """Whoever gathers or cuts queries between a model and our attention leaves boundaries that do not fit."""
    model = load("llama").train()
    name = model.config._attn_implementation
    ours = ALL_ATTENTION_FUNCTIONS[name]

    def gathered(module, query, key, value, *args, **kwargs):
        return ours(module, *(torch.cat([tensor, tensor], 2) for tensor in (query, key, value)), *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, gathered)
    for setting in SETTINGS:
        with pytest.raises(ValueError, match="boundaries of LlamaForCausalLM cut 1 x 35 tokens"):
            model(**pack("llama", setting))
