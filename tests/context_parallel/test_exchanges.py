"""How much ranks tell one another, in how many steps, and that backward comes by on every one."""

import pytest

from tests.context_parallel import faults
from tests.context_parallel.test_shards_are_the_pack import OPS
from tests.harness.packings import Pack

SCANS = [name for name in OPS if name not in ("causal_conv1d_fn", "flash_attn_varlen_func")]


@pytest.mark.parametrize("name", OPS)
def test_any_one_gradient_alone(ranks, name):
    """Ranks that only give, only take, or do both, for each input that may need a gradient."""
    ranks.run(faults.only_gradient_of, name, Pack("two samples", (9, 5)), [3, 3, 5, 3])


@pytest.mark.parametrize("count", (2, 4))
@pytest.mark.parametrize("name", SCANS)
def test_traffic_of_scans_does_not_grow_with_tokens(ranks, name, count):
    """One sample over 2 or 4 ranks: log2(ranks) steps each way, of one map each, however many tokens."""
    short, long = (ranks.run(faults.traffic, name, tokens, ranks=count) for tokens in (8, 64))
    assert short == long
    steps = count.bit_length() - 1
    most = max(sent for rank in short for sent, _ in rank.values())
    one_map = short[0]["forward"][0] // steps  # the first rank sends its map in every step
    assert most <= steps * one_map
    for way in ("forward", "backward"):
        assert max(number for rank in short for _, number in (rank[way],)) == steps, (way, short)
    print(f"{name}, {count} ranks: {short}")


def test_traffic_of_the_convolution_is_its_halo(ranks):
    """W - 1 tokens, in one step."""
    short, long = (ranks.run(faults.traffic, "causal_conv1d_fn", tokens) for tokens in (8, 64))
    assert short == long
    assert {number for rank in short for _, number in rank.values()} == {1}
    assert max(sent for rank in short for sent, _ in rank.values()) == 3 * 20 * 4


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda", "causal_conv1d_fn"])
@pytest.mark.parametrize("samples", [(16,), (3, 5, 8), (4, 4, 4, 4), (7, 9)])
def test_another_packages_context_is_read_by_its_names(ranks, name, samples):
    ranks.run(faults.foreign, name, samples)
