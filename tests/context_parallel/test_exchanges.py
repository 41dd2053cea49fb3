"""How much ranks tell one another, in how many steps, and that backward comes by on every one."""

import sys

import pytest

from tests.conftest import ROOT
from tests.context_parallel import faults
from tests.context_parallel.test_shards_are_the_pack import OPS
from tests.harness.packings import Pack
from tools.maintainers import exchanges

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


def formula(name, attention, sizes, rank, ranks, tokens):
    """What the page's formulas say that ``rank`` sends in float32."""
    if name == "causal_conv1d_fn":
        return exchanges.halo(rank, ranks, sizes["weight"][1], sizes["x"][1], 4)
    if name == "selective_scan_fn":
        return exchanges.scan(rank, ranks, sizes["A"][0] * sizes["A"][1], sizes["A"][0] * sizes["A"][1])
    if name == "mamba_chunk_scan_combined":
        heads, head_dim, states = *sizes["x"][2:], sizes["B"][3]
        return exchanges.scan(rank, ranks, heads, heads * head_dim * states)
    if name == "flash_attn_varlen_func":
        (_, heads, K), (_, key_heads, V) = sizes["q"], sizes["v"]
        if attention == "heads":
            return exchanges.heads(ranks, tokens, heads, key_heads, K, V, 4)
        return exchanges.keys(rank, ranks, tokens, key_heads, K, V, 4)
    heads, V, K = *sizes["v"][2:], sizes["q"][3]
    return exchanges.scan(rank, ranks, heads * K * K, heads * K * V)


@pytest.mark.parametrize("ranks_used", (2, 4))
@pytest.mark.parametrize("name, attention", [*((name, "keys") for name in OPS), ("flash_attn_varlen_func", "heads")])
def test_what_is_sent_is_what_the_page_says(ranks, name, attention, ranks_used):
    """Bytes of every rank and messages in a row, forward; backward the other way around."""
    sizes = ranks.run(faults.shapes, name, ranks=1)[0]
    tokens = 8
    counted = ranks.run(faults.traffic, name, tokens, attention, ranks=ranks_used)
    expected = [formula(name, attention, sizes, rank, ranks_used, tokens) for rank in range(ranks_used)]
    lse = 0
    if attention == "heads":  # the harness asks for the log-sum-exp too, which goes home by itself
        lse = (ranks_used - 1) * tokens * (sizes["q"][1] // ranks_used) * 4
    for rank, sent in enumerate(counted):
        back = expected[rank if attention == "heads" else ranks_used - 1 - rank]
        assert sent["forward"][0] == expected[rank].bytes + lse, rank
        assert sent["backward"][0] == back.bytes + lse, rank
    assert max(sent["forward"][1] for sent in counted) == expected[0].depth + (attention == "heads")


@pytest.mark.parametrize("count", (3, 8, 100, 256))
def test_formulas_are_what_is_planned_for_more_ranks(kernel, count):
    """The transfers of one sample over many ranks, as the package plans them; a scan step by step."""
    cut = sys.modules[f"{kernel.__name__}.context_parallel.cut"]
    chains = cut.Cut([0, 8 * count], [8] * count).chains
    halo = [[3] + [3] * (count - 2) + [0]]
    for offered, wanted, said in (
        (halo, 3, lambda rank: exchanges.halo(rank, count, 4, 1, 1)),
        ([chains[0].lengths], 2**31, lambda rank: exchanges.keys(rank, count, 8, 1, 1, 0, 1)),
    ):
        sent = [0] * count
        for transfer in cut.rows_before(chains, offered, wanted):
            sent[transfer.source] += transfer.stop - transfer.start
        assert sent == [said(rank).bytes for rank in range(count)]
    distance, depth, messages = 1, 0, [0] * count
    while distance < count:
        for rank in range(count - distance):
            messages[rank] += 1
        distance, depth = 2 * distance, depth + 1
    assert messages == [exchanges.scan(rank, count, 1, 0, 1).bytes for rank in range(count)]
    assert depth == exchanges.scan(0, count, 1, 0).depth


def test_the_page_holds_the_tables():
    page = (ROOT / "docs" / "exchanges.md").read_text()
    assert exchanges.written(page) == page, "run python -m tools.maintainers.exchanges"
