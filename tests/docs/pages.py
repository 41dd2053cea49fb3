"""The markdown files of the repository, read as far as the tests need: blocks, headings, links, tables."""

import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Set, Tuple

from tests.conftest import ROOT

GUIDE, GUIDE_JA = ROOT / "docs" / "guide.md", ROOT / "docs" / "guide.ja.md"
TEMPLATE = ROOT / "CARD.md"


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line of code (from 1 on), and the code."""

    language: str
    line: int
    code: str


class Heading(NamedTuple):
    level: int
    title: str


def all_pages() -> List[Path]:
    """Every markdown file of the repository, without what is built or installed in it."""
    folders = ("benchmarks", "docs", "examples", "kernel_src", "tests", "tools", "torch-ext")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


def blocks(text: str) -> List[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], text.count("\n", 0, match.start()) + 2, match[2]) for match in found]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> List[Heading]:
    found = re.finditer(r"^(#+) (.+)$", without_blocks(text), re.MULTILINE)
    return [Heading(len(match[1]), match[2]) for match in found]


def anchors(text: str) -> Set[str]:
    """What GitHub calls the headings of a page in links."""
    seen: Dict[str, int] = {}
    names = set()
    for heading in headings(text):
        title = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.title).lower())
        name = title.strip().replace(" ", "-")
        seen[name] = seen.get(name, -1) + 1
        names.add(name if seen[name] == 0 else f"{name}-{seen[name]}")
    return names


def links(text: str) -> List[str]:
    """Targets of links and pictures."""
    plain = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    return re.findall(r"\]\(([^)\s]+)\)", plain)


def inline_code(text: str) -> List[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def explained(text: str) -> Tuple[List[str], List[str]]:
    """The pieces of messages in the troubleshooting tables of a guide: ours, and those of other packages.

    A row's first column holds them as code; the last of the sections is that of other packages.
    """
    sections = re.split(r"^### .+$", without_blocks(text), flags=re.MULTILINE)[1:]
    found = [
        [piece for row in re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE) for piece in row[1:-1].split("`<br>`")]
        for section in sections
    ]
    return [piece for section in found[:-1] for piece in section], found[-1]
