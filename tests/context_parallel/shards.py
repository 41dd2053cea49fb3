"""What runs on the ranks: an op on shards, compared with the same op on the whole pack."""

import random

import torch
import torch.distributed as dist

from tests.harness.kernel import load_kernel
from tests.harness.ops import EXACT, flash_attn_varlen
from tests.harness.ops.flash_attn_varlen import Case
from tests.harness.packings import Pack
from tests.harness.properties import cotangents, run_with_gradients

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def random_pack(seed, ranks):
    """Samples (some empty, many of one token), padding now and then, and a cut at any tokens, empty shards too."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 1, 2, 3, 5, 9, 20, 40]) for _ in range(draw.randint(1, 6))]
    pack = Pack(f"seed {seed}", tuple(lengths), draw.choice([0, 0, 0, 3]))
    marks = sorted(draw.randint(0, pack.tokens) for _ in range(ranks - 1))
    return pack, [stop - start for start, stop in zip([0, *marks], [*marks, pack.tokens])]


def shard(op, tensors, context):
    """This rank's part of ``tensors``: its tokens, and the states of samples that begin (inputs) or end here."""
    begin = sum(context.lengths[: context.rank])
    first, last = states_of(context)
    parts = {}
    for name, value in tensors.items():
        if op.kind(name) == "tokens":
            value = value.narrow(op.token_axis[op.base(name)], begin, context.tokens)
        elif op.kind(name) == "states":
            lower, count = first if "initial" in name else last
            value = value.narrow(0, lower, count)
        parts[name] = value
    return parts


def states_of(context):
    """The first sample and the number of those that begin on this rank, and of those that end here."""
    cut, before = context.cut, range(context.rank)
    parts = [len(cut.local_offsets(rank)) - 1 for rank in before]
    begun = sum(parts) - sum(cut.entering(rank) is not None for rank in before)
    ended = sum(parts) - sum(cut.leaving(rank) is not None for rank in before)
    return (begun, context.begins), (ended, context.ends)


def compare(group, name, case, pack, lengths, dtype, repeat=False):
    """Outputs, states and gradients of the shards are those of the whole pack, to the bit in samples that are not cut.

    ``repeat``: and all of them are the same bits a second time.
    """
    compare_op(group, EXACT[name][case](), f"{name} case {case}", pack, lengths, dtype, repeat)


def compare_op(group, op, title, pack, lengths, dtype, repeat=False, attention="keys", rounded=()):
    """``rounded``: results that are sums over ranks, in which samples that are not cut have other bits too."""
    kernel = load_kernel()
    torch.manual_seed(0)
    whole = op.make(pack, dtype)
    expected = run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), whole)
    weights = cotangents(op.run(whole, **op.boundaries(pack)))
    context = kernel.ContextParallel(group, pack.cu_seqlens, lengths, attention)
    given = {"cp_context": context}
    if "q" in whole and "beta" not in whole:  # attention
        given["cu_seqlens_q"] = context.cu_seqlens
    inputs, local = shard(op, whole, context), shard(op, weights, context)

    def run():
        return run_with_gradients(lambda leaves: op.run(leaves, **given), inputs, local)

    got = run()
    if repeat:
        again = run()
        for key in got:
            assert torch.equal(got[key], again[key]), key
    for key in got:
        if op.kind(key) == "parameter":
            dist.all_reduce(got[key], group=group)
    wanted = shard(op, expected, context)
    assert got.keys() == wanted.keys()
    for key in got:
        if op.kind(key) == "tokens" and key not in rounded:
            mine, alone = (uncut(op, key, value, context) for value in (got[key], wanted[key]))
            assert torch.equal(mine, alone), f"{title}, {key}: samples that are not cut have other bits"
    limit = TOLERANCE[dtype]
    for key, want in wanted.items():
        scale = max(1.0, float(expected[key].nan_to_num(0, 0, 0).abs().max())) if expected[key].numel() else 1.0
        assert got[key].shape == want.shape, (key, got[key].shape, want.shape)
        torch.testing.assert_close(
            got[key], want, rtol=0, atol=limit * scale, equal_nan=True,
            msg=lambda text, key=key: f"{title}, {pack.lengths} cut {lengths}, {key}: {text}",
        )  # fmt: skip


def uncut(op, key, tensor, context):
    """The part of this rank's ``tensor`` that belongs to samples that no cut touches: their tokens lie together."""
    offsets = context.offsets
    begin = offsets[1] if context.entering is not None else 0
    end = offsets[-2] if context.leaving is not None else offsets[-1]
    return tensor.narrow(op.token_axis[op.base(key)], begin, max(end - begin, 0))


def many(group, name, seeds, dtype):
    """Random packs, each with another of the op's cases."""
    ranks = dist.get_world_size(group)
    for seed in seeds:
        pack, lengths = random_pack(seed, ranks)
        compare(group, name, seed % len(EXACT[name]), pack, lengths, dtype, repeat=seed % 5 == 0)
    return len(seeds)


# Query heads and key heads a rank, or key heads of several ranks: heads that R ranks can share.
SHARED = [
    lambda ranks: Case("a key head each", heads=(2 * ranks, ranks)),
    lambda ranks: Case("one key head for all", heads=(ranks, 1), dims=(16, 8), sinks=True, window=(4, 0)),
    lambda ranks: Case("two key heads each, both ways", heads=(4 * ranks, 2 * ranks), causal=False, softcap=5.0),
    lambda ranks: Case("a key head of two ranks", heads=(ranks, max(ranks // 2, 1) if ranks != 3 else 3)),
]


def by_heads(group, seeds):
    """Attention by heads on random packs and cuts."""
    ranks = dist.get_world_size(group)
    for seed in seeds:
        pack, lengths = random_pack(seed, ranks)
        case = SHARED[seed % len(SHARED)](ranks)
        op = flash_attn_varlen.op_under_test(case)
        rounded = ("dk", "dv") if case.heads[1] % ranks else ()  # a key head's queries are on several ranks
        compare_op(group, op, f"{case}", pack, lengths, torch.float64, seed % 5 == 0, "heads", rounded)


def refused_heads(group):
    """The error of each call that cannot be shared out by heads."""
    kernel = load_kernel()
    context = kernel.ContextParallel(group, [0, 8], attention="heads")
    q, ranges = torch.randn(context.tokens, 4, 8), torch.zeros(context.tokens, 2, dtype=torch.int32)
    cases = {
        "queries": (torch.randn(context.tokens, 6, 8), torch.randn(context.tokens, 3, 8), {}),
        "keys": (torch.randn(context.tokens, 12, 8), torch.randn(context.tokens, 3, 8), {}),
        "dropout": (q, q, dict(dropout_p=0.5)),
        "ranges": (q, q, dict(visible_keys=ranges)),
    }
    found = {}
    for why, (q, k, settings) in cases.items():
        try:
            kernel.flash_attn_varlen_func(q, k, k, context.cu_seqlens, cp_context=context, **settings)
        except Exception as error:
            found[why] = str(error)
    return found
