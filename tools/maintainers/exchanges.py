"""What ranks send where a row is cut over them: writes the tables of docs/exchanges.md.

    .venv/bin/python -m tools.maintainers.exchanges

tests/context_parallel/test_exchanges.py compares the formulas below with bytes counted in runs of 2 and 4 processes,
and for more ranks with the transfers that the package plans.
"""

from pathlib import Path
from typing import Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "exchanges.md"
BEGIN, END = "<!-- written by tools/maintainers/exchanges.py -->\n", "<!-- end -->\n"
TOKENS = 2**20


class Sent(NamedTuple):
    """What the busiest rank sends in one layer's forward; backward sends as much.

    Attributes:
        bytes: in all.
        largest: the largest message.
        depth: messages that wait for one another.
    """

    bytes: int
    largest: int
    depth: int


# ---- this package: one sample over all ranks, t tokens on each ----


def halo(rank: int, ranks: int, width: int, channels: int, size: int = 2) -> Sent:
    """The convolution: the last W - 1 tokens to the next rank (t of at least that many)."""
    message = (width - 1) * channels * size
    return Sent(message if rank < ranks - 1 else 0, message, 1)


def scan(rank: int, ranks: int, M: int, C: int, size: int = 4) -> Sent:
    """A recurrence whose map has M and C numbers: one to the rank at distance 1, 2, 4, ..."""
    distances = [2**step for step in range((ranks - 1).bit_length())]
    message = (M + C) * size
    return Sent(message * sum(rank + distance < ranks for distance in distances), message, len(distances))


def keys(rank: int, ranks: int, t: int, key_heads: int, K: int, V: int, size: int = 2) -> Sent:
    """Causal attention by keys: this rank's to every later rank."""
    message = t * key_heads * (K + V) * size
    return Sent(message * (ranks - 1 - rank), message, 1)


def heads(ranks: int, t: int, query_heads: int, key_heads: int, K: int, V: int, size: int = 2) -> Sent:
    """Attention by heads: to every rank its heads of these tokens, then to every rank its tokens of these heads."""
    there = t * (query_heads // ranks * K + max(key_heads // ranks, 1) * (K + V)) * size
    home = t * (query_heads // ranks) * V * size
    return Sent((ranks - 1) * (there + home), max(there, home), 2)


# ---- peers, as their papers and sources describe them ----


def ring(ranks: int, t: int, key_heads: int, K: int, V: int, size: int = 2) -> Sent:
    """Ring attention: keys and values of every rank go round (Megatron's and torch's context parallel send as much)."""
    message = t * key_heads * (K + V) * size
    return Sent((ranks - 1) * message, message, ranks - 1)


def gathered_states(ranks: int, M: int, C: int, size: int = 4) -> Sent:
    """flash-linear-attention's context parallel: every rank gets the map of every other, by a ring."""
    message = (M + C) * size
    return Sent((ranks - 1) * message, message, ranks - 1)


def mixer_by_heads(ranks: int, t: int, into: int, out: int, size: int = 2) -> Sent:
    """Megatron's Mamba: a mixer's inputs and outputs by all-to-all over its heads."""
    there, home = t * into // ranks * size, t * out // ranks * size
    return Sent((ranks - 1) * (there + home), max(there, home), 2)


# ---- the tables ----

# Sizes as Llama 3 8B, Qwen3-Next, Kimi-Linear, Bamba 9B and Falcon-Mamba 7B have them.
ATTENTION = dict(query_heads=32, key_heads=8, K=128, V=128)
STATES = {
    "gated delta rule, 32 heads of 128 x 128": (32 * 128 * 128, 32 * 128 * 128),
    "KDA, 32 heads of 128 x 128": (32 * 128 * 128, 32 * 128 * 128),
    "Mamba-2, 128 heads of 64 x 128": (128, 128 * 64 * 128),
    "Mamba-1, 8,192 channels of 16": (8192 * 16, 8192 * 16),
}
# Numbers a token that go in and out of the same mixers, and how many shares these have.
MIXERS = {
    "gated delta rule, 32 heads of 128 x 128": (2 * 16 * 128 + 32 * 128 + 2 * 32, 32 * 128, 32),
    "KDA, 32 heads of 128 x 128": (4 * 32 * 128 + 32, 32 * 128, 32),
    "Mamba-2, 128 heads of 64 x 128": (2 * 8192 + 2 * 128 + 128, 8192, 128),
    "Mamba-1, 8,192 channels of 16": (2 * 8192 + 2 * 16, 8192, 8192),
}


def rows(ranks: int) -> Dict[str, Dict[str, Sent]]:
    """Layer -> what carries it -> what the busiest rank sends."""
    t = TOKENS // ranks
    head = dict(key_heads=ATTENTION["key_heads"], K=128, V=128)
    attention = {"by keys (this package)": keys(0, ranks, t, **head)}
    if ATTENTION["query_heads"] % ranks == 0:
        attention["by heads (this package, Ulysses)"] = heads(ranks, t, **ATTENTION)
    attention["ring (also torch's and Megatron's)"] = ring(ranks, t, **head)
    table = {"attention, 32 query heads and 8 key heads of 128": attention}
    for layer, (M, C) in STATES.items():
        table[layer] = {
            "by states (this package)": scan(0, ranks, M, C),
            "all states to all (fla)": gathered_states(ranks, M, C),
        }
        into, out, shares = MIXERS[layer]
        if shares % ranks == 0:
            table[layer]["by heads or channels (Megatron's Mamba)"] = mixer_by_heads(ranks, t, into, out)
    table["convolution, 4 tokens wide, 8,192 channels"] = {"halo (this package, fla)": halo(0, ranks, 4, 8192)}
    return table


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError(count)


def tables() -> str:
    lines: List[str] = []
    for ranks in (8, 1024):
        lines += [f"### {ranks:,} ranks, {TOKENS // ranks:,} tokens each", ""]
        lines += ["| layer | carried | sent by the busiest rank | largest message | messages in a row |"]
        lines += ["|---|---|---|---|---|"]
        for layer, ways in rows(ranks).items():
            for way, sent in ways.items():
                lines.append(f"| {layer} | {way} | {_size(sent.bytes)} | {_size(sent.largest)} | {sent.depth} |")
        lines.append("")
    return "\n".join(lines)


def written(page: str) -> str:
    """``page`` with the tables between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + tables() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
