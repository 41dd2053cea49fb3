"""What runs on the ranks: whole models of transformers on shards of a row, compared with one process on the row."""

import random
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.harness.kernel import load_kernel
from tests.models.tiny_models import (
    ENCODERS,
    VOCABULARY,
    assert_gradients_equal,
    assert_logits_equal,
    load,
    pack,
)

IGNORED = -100


@lru_cache(maxsize=4)
def model_of(model_type):
    """The model, which the cases of a type share."""
    return load(model_type).train()


def labelled(model_type, setting, samples):
    """A packed row; with labels as the collator makes them (a sample's first token has none, some others neither)."""
    batch = pack(model_type, setting, list(samples))
    if model_type in ENCODERS:
        return batch
    labels = batch["input_ids"].clone()
    labels[batch["position_ids"] == 0] = IGNORED
    labels[:, 3::7] = IGNORED
    return {**batch, "labels": labels}


def loss_of(output):
    """The model's own, or where it has none a sum over the tokens."""
    return output.logits.square().sum() if output.loss is None else output.loss


def gradients_of(model):
    """Of every parameter; one that a rank does not touch has zeros."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    model.zero_grad()
    return found


@lru_cache(maxsize=4)
def one_process(model_type, setting, samples):
    """Logits, loss and gradients of the whole row."""
    model = model_of(model_type)
    output = model(**labelled(model_type, setting, samples))
    loss_of(output).backward()
    return output.logits.detach()[0], loss_of(output).detach(), gradients_of(model)


def compare(group, model_type, samples, lengths, setting="position_ids", reentrant=None, change=None, attention="keys"):
    """Logits, the summed loss and the summed gradients of the shards are those of one process.

    ``change`` rewrites the shard's call, given the whole batch and the rank's first token and the one after its last.
    """
    kernel = load_kernel()
    expected, expected_loss, expected_gradients = one_process(model_type, setting, samples)
    model, batch = model_of(model_type), labelled(model_type, setting, samples)
    begin = sum(lengths[: dist.get_rank(group)])
    end = begin + lengths[dist.get_rank(group)]
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    try:
        call = kernel.shard_batch(batch, group, lengths)
        with kernel.sequence_parallel(group, attention):
            output = model(**(call if change is None else change(call, batch, begin, end)))
        loss_of(output).backward()  # outside of the block: it knows its ranks
    finally:
        model.gradient_checkpointing_disable()
    loss, gradients = loss_of(output).detach().clone(), gradients_of(model)
    for summed in (loss, *gradients.values()):
        dist.all_reduce(summed, group=group)
    assert_logits_equal(output.logits.detach()[0], expected[begin:end])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(gradients, expected_gradients)


def random_rows(group, model_type, seeds):
    """Random samples, many of one token, cut anywhere; a token or more on each rank."""
    ranks = dist.get_world_size(group)
    for seed in seeds:
        draw = random.Random(seed)
        samples = [draw.choice([1, 1, 2, 3, 5, 9, 20]) for _ in range(draw.randint(1, 6))]
        samples[0] += ranks
        marks = sorted(draw.sample(range(1, sum(samples)), ranks - 1))
        lengths = [stop - start for start, stop in zip([0, *marks], [*marks, sum(samples)])]
        compare(group, model_type, tuple(samples), lengths, draw.choice(["position_ids", "cu_seq_lens", "seq_idx"]))


# How a shard may tell its boundaries and labels; each rewrites the call that shard_batch makes.


def told_by_labels(call, batch, begin, end):
    """seq_idx alone; positions are counted."""
    del call["position_ids"]
    return {**call, "seq_idx": batch["seq_idx"][:, begin:end]}


def told_by_offsets(call, batch, begin, end):
    """Offsets of the whole row alone; positions are counted."""
    del call["position_ids"]
    return {**call, "cu_seq_lens_q": batch["cu_seq_lens_q"]}


def told_by_everything(call, batch, begin, end):
    offsets = dict(cu_seq_lens_q=batch["cu_seq_lens_q"], cu_seq_lens_k=batch["cu_seq_lens_k"])
    return {**call, **offsets, "seq_idx": batch["seq_idx"][:, begin:end], "max_length_q": batch["max_length_q"]}


def with_own_labels(call, batch, begin, end):
    """The label of the shard's last token comes from the next rank."""
    del call["shift_labels"]
    return call


def with_shifted_labels_alone(call, batch, begin, end):
    del call["labels"]
    return call


def with_a_count(call, batch, begin, end):
    return {**call, "num_items_in_batch": (batch["labels"][:, 1:] != IGNORED).sum()}


def with_a_mask_of_ones(call, batch, begin, end):
    return {**call, "attention_mask": torch.ones_like(call["input_ids"])}


CHANGES = dict(
    labels=told_by_labels, offsets=told_by_offsets, everything=told_by_everything, own_labels=with_own_labels,
    shifted_alone=with_shifted_labels_alone, count=with_a_count, mask_of_ones=with_a_mask_of_ones,
)  # fmt: skip


def told(group, model_type, how):
    compare(group, model_type, (5, 9, 17, 3, 1), [8, 14, 1, 12], "seq_idx", change=CHANGES[how])


def one_document(group, model_type):
    """A row without boundaries of any kind is one sample."""
    kernel, model = load_kernel(), model_of(model_type)
    torch.manual_seed(0)
    row = dict(input_ids=torch.randint(3, VOCABULARY, (1, 23)))
    with torch.no_grad():
        expected = model(**row).logits[0]
        with kernel.sequence_parallel(group):
            logits = model(**kernel.shard_batch(row, group)).logits[0]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [23 // ranks + (place < 23 % ranks) for place in range(ranks)]
    assert_logits_equal(logits, expected[sum(sizes[:rank]) :][: sizes[rank]])


def checkpointed_by_hand(group, model_type):
    """A wrapper that nobody told of the hooks: the recompute finds its forward, outside of the block."""
    kernel, model = load_kernel(), model_of(model_type)
    samples, lengths = (5, 9, 17, 3, 1), [8, 14, 1, 12]
    expected, expected_loss, expected_gradients = one_process(model_type, "position_ids", samples)
    layers = model.model.layers
    stock = [layer.forward for layer in layers]
    for layer, forward in zip(layers, stock):
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    try:
        with kernel.sequence_parallel(group):
            output = model(**kernel.shard_batch(labelled(model_type, "position_ids", samples), group, lengths))
        output.loss.backward()
    finally:
        for layer in layers:
            del layer.forward
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    assert_gradients_equal(gradients, expected_gradients)


# ---- what is refused ----


def refused_models(group):
    """The error of each model that cannot run on shards."""
    kernel, found = load_kernel(), {}
    from transformers import AutoModelForSequenceClassification

    from tests.models.tiny_models import NAME, allow_all_hub_kernels, build, config

    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    with allow_all_hub_kernels():
        cases = {
            "sdpa": build("llama", "sdpa"),
            "sdpa beside scans": build("bamba", "sdpa"),
            "mixes tokens": build("recurrent_gemma"),
            "a head": AutoModelForSequenceClassification.from_config(config("llama"), attn_implementation=NAME),
            "rotary tables": load("llama", rope_parameters=rope),
            "balancing loss": load("jamba", output_router_logits=True),
            "compiled": torch.compile(load("llama"), backend="eager", fullgraph=True),
        }
    for why, model in cases.items():
        call = dict(input_ids=torch.full((1, 4), 5), position_ids=torch.arange(4)[None] + 4 * dist.get_rank(group))
        found[why] = _error(kernel, group, model, call)
    return found


def refused_calls(group):
    """The error of each call that cannot be one of a shard."""
    kernel, model, rank = load_kernel(), load("llama"), dist.get_rank(group)
    ids, positions = torch.full((1, 4), 5), torch.arange(4)[None] + 4 * rank
    plain = dict(input_ids=ids, position_ids=positions)
    tokens = 4 if rank else 0
    cases = {
        "rows": dict(input_ids=ids.expand(2, 4)),
        "cache": {**plain, "use_cache": True},
        "mask": {**plain, "attention_mask": torch.tensor([[1, 1, 0, 1]])},
        "unknown": {**plain, "pixel_values": torch.zeros(1, 4)},
        "foreign": {**plain, "cu_seqlens": torch.tensor([0, 8])},
        "one rank is malformed": {**plain, "position_ids": positions.float() if rank == 1 else positions},
        "ranks tell differently": dict(input_ids=ids) if rank == 1 else plain,
        "offsets of this rank": dict(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 4])),
        "other offsets": dict(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 3 + rank, 8])),
        "positions beside offsets": dict(
            input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1]]), cu_seq_lens_q=torch.tensor([0, 4, 8])
        ),
        "no tokens": dict(input_ids=ids[:, :tokens], position_ids=positions[:, :tokens]),
        "images' positions": dict(input_ids=ids, position_ids=positions.expand(3, 1, 4)),
    }
    found = {why: _error(kernel, group, model, call) for why, call in cases.items()}
    with kernel.sequence_parallel(group):
        model(**plain)  # nobody left a message behind
    return found


def _error(kernel, group, model, call):
    try:
        with kernel.sequence_parallel(group):
            model(**call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def one_fails(group):
    """Rank 1 fails in the middle of the forward; the others get an error within the group's time-out."""
    from datetime import timedelta

    kernel, model = load_kernel(), model_of("bamba")
    own = dist.new_group(list(range(4)), timeout=timedelta(seconds=4))
    call = kernel.shard_batch(labelled("bamba", "position_ids", (20, 9)), own)
    if dist.get_rank(own) == 1:
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids"))[..., :-1]
    with kernel.sequence_parallel(own):
        model(**call)


def refused_batches(group):
    """The error of each batch that has no shards, and of the switch without a group."""
    kernel = load_kernel()
    ids = torch.full((1, 8), 5)
    cases = {
        "rows": (dict(input_ids=ids.expand(2, 8)), None),
        "no mapping": (ids, None),
        "lengths": (dict(input_ids=ids), [4, 5]),
        "kind of lengths": (dict(input_ids=ids), "44"),
        "another tensor": (dict(input_ids=ids, weights=torch.ones(3)), None),
        "disagree": (dict(input_ids=ids, cu_seq_lens_q=[0, 3, 8], seq_idx=torch.zeros_like(ids)), None),
    }
    found = {}
    for why, (batch, lengths) in cases.items():
        try:
            found[why] = str(kernel.shard_batch(batch, group, lengths))
        except Exception as error:
            found[why] = f"{type(error).__name__}: {error}"
    for why, settings in (("group", dict(group=2)), ("attention", dict(group=group, attention="states"))):
        try:
            kernel.sequence_parallel(**settings).__enter__()
        except Exception as error:
            found[why] = f"{type(error).__name__}: {error}"
    return found


def shards_of(group, batch, lengths=None):
    return load_kernel().shard_batch(batch, group, lengths)
