"""A pack cut over ranks at any tokens gives what one process gives: outputs, states and every gradient."""

import pytest
import torch

from tests.context_parallel import layers, shards
from tests.harness.packings import Pack

OPS = [
    "causal_conv1d_fn",
    "selective_scan_fn",
    "mamba_chunk_scan_combined",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "flash_attn_varlen_func",
]


@pytest.mark.parametrize("count", (1, 2, 3, 4))
@pytest.mark.parametrize("name", OPS)
def test_random_packs_and_cuts(ranks, name, count):
    seeds = range(100 * count, 100 * count + (2 if count == 1 else 10))
    ranks.run(shards.many, name, seeds, torch.float64, ranks=count)


@pytest.mark.parametrize("name", OPS)
def test_fp32(ranks, name):
    ranks.run(shards.many, name, range(6), torch.float32)


CUTS = {
    "a sample over all ranks": ((17,), [4, 5, 3, 5]),
    "one token a rank": ((4,), [1, 1, 1, 1]),
    "empty shards in a sample": ((9, 3), [4, 0, 0, 8]),
    "empty shards at the ends": ((9, 3), [0, 7, 5, 0]),
    "two samples meet inside a shard": ((7, 8), [3, 6, 4, 2]),
    "cut between samples": ((5, 5, 5, 5), [5, 5, 5, 5]),
    "samples of one token": ((1,) * 8, [3, 1, 0, 4]),
    "nothing at all": ((0,), [0, 0, 0, 0]),
    "empty samples at the cut": ((4, 0, 0, 4, 0), [4, 0, 2, 2]),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", OPS)
def test_cuts(ranks, name, cut):
    samples, lengths = CUTS[cut]
    ranks.run(shards.compare, name, 0, Pack(cut, samples), lengths, torch.float64, True)


STACKS = [
    ((30, 12), [11, 3, 17, 11]),
    ((5, 40, 1, 3), [0, 30, 2, 17]),
    ((4, 4, 4, 4), [4, 4, 4, 4]),
    ((9,), [2, 0, 7, 0]),
]


@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("samples, lengths", STACKS)
def test_layers_on_top_of_one_another(ranks, samples, lengths, checkpointed):
    """Calls beside one another, whose backward passes come in the same order on ranks with different roles."""
    ranks.run(layers.compare, samples, lengths, checkpointed)


def test_states_are_not_rounded_under_autocast(ranks):
    ranks.run(layers.states_under_autocast)


@pytest.mark.parametrize("count", (1, 2, 3, 4))
def test_attention_by_heads(ranks, count):
    ranks.run(shards.by_heads, range(100 * count, 100 * count + 8), ranks=count)


def test_attention_by_heads_is_refused(ranks):
    expected = {
        "queries": "q must have a multiple of 4 heads, one share for each rank, or a ContextParallel with attention",
        "keys": "k must have a number of heads that 4 ranks can share, or a ContextParallel with attention=",
        "dropout": "dropout_p must be 0 with cp_context",
        "ranges": "visible_keys must be None where attention is shared out by heads",
    }
    for found in ranks.run(shards.refused_heads):
        for why, text in expected.items():
            assert text in found[why], (why, found)
