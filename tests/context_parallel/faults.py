"""What runs on the ranks where something is wrong, or is measured."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.context_parallel import shards
from tests.harness.kernel import load_kernel
from tests.harness.ops import EXACT
from tests.harness.packings import Pack


def build(group, offsets_of, lengths_of):
    """A context from what each rank believes."""
    rank = dist.get_rank(group)
    load_kernel().ContextParallel(group, offsets_of[rank], lengths_of[rank])


def survives(group, pack):
    """The group still works: nobody left a message behind."""
    shards.compare(group, "causal_conv1d_fn", 0, pack, [pack.tokens - 3, 1, 1, 1], torch.float64)


def one_fails(group, name, seconds):
    """Rank 1 never makes its call."""
    own = dist.new_group(list(range(4)), timeout=timedelta(seconds=seconds))
    pack = Pack("one sample", (12,))
    op = EXACT[name][0]()
    context = load_kernel().ContextParallel(own, pack.cu_seqlens)
    if context.rank == 1:
        raise RuntimeError("this rank fails")
    inputs = shards.shard(op, op.make(pack, torch.float32), context)
    given = {"cu_seqlens_q": context.cu_seqlens} if name == "flash_attn_varlen_func" else {}
    op.run(inputs, **given, cp_context=context)


def only_gradient_of(group, name, pack, lengths):
    """Whatever the one tensor is that needs a gradient, backward comes by on every rank."""
    kernel = load_kernel()
    op = EXACT[name][0]()
    torch.manual_seed(0)
    whole = op.make(pack, torch.float64)
    context = kernel.ContextParallel(group, pack.cu_seqlens, lengths)
    given = {"cu_seqlens_q": context.cu_seqlens} if name == "flash_attn_varlen_func" else {}
    wanted = shards.shard(op, shards.run_with_gradients(lambda x: op.run(x, **op.boundaries(pack)), whole), context)
    weights = shards.shard(op, shards.cotangents(op.run(whole, **op.boundaries(pack))), context)
    for leaf in whole:
        inputs = {name: value.clone() for name, value in shards.shard(op, whole, context).items()}
        inputs[leaf].requires_grad_()
        outputs = op.run(inputs, **given, cp_context=context)
        loss = sum((outputs[key] * weights[key]).sum() for key in outputs)
        gradient = torch.zeros_like(inputs[leaf])
        if loss.requires_grad:
            loss.backward()
            gradient = inputs[leaf].grad if inputs[leaf].grad is not None else gradient
        if op.kind(leaf) == "parameter":
            dist.all_reduce(gradient, group=group)
        torch.testing.assert_close(gradient, wanted[f"d{leaf}"], rtol=0, atol=1e-8)


@dataclass
class Foreign:
    """A context as flash-linear-attention's callers have it: a rank's own boundaries in an equal cut."""

    group: Any
    cu_seqlens: torch.Tensor
    is_first_rank: bool
    is_last_rank: bool
    cu_seqlens_cpu: Any = None
    pre_num_ranks: int = 0
    conv1d_kernel_size: int = 4


def foreign(group, name, samples):
    """That object instead of ours gives the same bits; the second call asks nobody for boundaries."""
    kernel = load_kernel()
    pack = Pack("foreign", samples)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    share = pack.tokens // ranks
    begin, end = rank * share, (rank + 1) * share
    inside = [begin, *(o for o in pack.offsets if begin < o < end), end]
    theirs = Foreign(
        group, torch.tensor(inside) - begin, begin in pack.offsets, end in pack.offsets, pre_num_ranks=rank
    )
    ours = kernel.ContextParallel(group, pack.cu_seqlens)
    assert ours.cu_seqlens.tolist() == theirs.cu_seqlens.tolist()
    op = EXACT[name][1]()
    torch.manual_seed(0)
    inputs = shards.shard(op, op.make(pack, torch.float32), ours)
    results = [
        shards.run_with_gradients(lambda leaves, c=context: op.run(leaves, cp_context=c), inputs)
        for context in (ours, theirs, theirs)
    ]
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(value, other[key]), key


def traffic(group, name, tokens, attention="keys"):
    """Of one sample over all ranks, forward and backward: bytes that this rank sends, and steps it waits for."""
    ranks = dist.get_world_size(group)
    pack = Pack("one sample", (tokens * ranks,))
    op = EXACT[name][0]()
    context = load_kernel().ContextParallel(group, pack.cu_seqlens, attention=attention)
    torch.manual_seed(0)
    inputs = shards.shard(op, op.make(pack, torch.float32), context)
    given = {"cu_seqlens_q": context.cu_seqlens} if name == "flash_attn_varlen_func" else {}
    counted, post = [], dist.batch_isend_irecv

    def counting(steps):
        counted.append(sum(s.tensor.numel() * s.tensor.element_size() for s in steps if s.op is dist.isend))
        return post(steps)

    dist.batch_isend_irecv = counting
    try:
        leaves = {
            key: value.clone().requires_grad_(value.is_floating_point()) for key, value in inputs.items()
        }
        outputs = op.run(leaves, **given, cp_context=context)
        forward = list(counted)
        counted.clear()
        sum(value.sum() for value in outputs.values()).backward()
    finally:
        dist.batch_isend_irecv = post
    return {"forward": (sum(forward), len(forward)), "backward": (sum(counted), len(counted))}


def shapes(group, name):
    """The shapes of the inputs that :func:`traffic` uses."""
    op = EXACT[name][0]()
    return {key: tuple(value.shape) for key, value in op.make(Pack("one sample", (8,)), torch.float32).items()}


def wrong_calls(group):
    """Each refusal comes before any message, on this rank alone."""
    kernel = load_kernel()
    context = kernel.ContextParallel(group, [0, 2, 8])
    x, weight = torch.randn(1, 2, context.tokens), torch.randn(2, 4)
    call = kernel.causal_conv1d_fn
    found = {}

    def refused(why, x, **given):
        try:
            call(x, weight, **given)
            found[why] = "no error"
        except Exception as error:
            found[why] = f"{type(error).__name__}: {error}"

    refused("no context", x, cp_context=object())
    refused("rows", x.expand(2, -1, -1), cp_context=context)
    refused("tokens", torch.randn(1, 2, context.tokens + 1), cp_context=context)
    refused("labels", x, cp_context=context, seq_idx=torch.zeros(1, context.tokens, dtype=torch.int32))
    refused("offsets", x, cp_context=context, cu_seqlens=[0, context.tokens - 1, context.tokens])
    refused("states", x, cp_context=context, initial_states=torch.zeros(context.begins + 1, 2, 3))
    refused("group", x, cp_context=Foreign(None, torch.tensor([0, 2]), True, True))
    q = torch.randn(context.tokens, 2, 4)
    call = lambda q, _, **given: kernel.flash_attn_varlen_func(q, q, q, context.cu_seqlens, **given)  # noqa: E731
    refused("dropout", q, cp_context=context, dropout_p=0.1)
    return found
