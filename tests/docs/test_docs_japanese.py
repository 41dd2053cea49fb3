"""The Japanese guide is the English one in Japanese: the same code, headings, rows and pieces of messages."""

import re

from tests.docs import pages
from tests.docs.pages import GUIDE, GUIDE_JA


def test_the_japanese_guide_is_in_step():
    english, japanese = GUIDE.read_text(), GUIDE_JA.read_text()
    for block, other in zip(pages.blocks(english), pages.blocks(japanese), strict=True):
        assert (block.language, block.code) == (other.language, other.code)
    levels = [[heading.level for heading in pages.headings(text)] for text in (english, japanese)]
    assert levels[0] == levels[1]
    assert pages.explained(english) == pages.explained(japanese)
    for count in (lambda text: text.count("\n|"), lambda text: text.count("\n- ")):
        assert count(pages.without_blocks(english)) == count(pages.without_blocks(japanese))
    outside = [{target for target in pages.links(text) if not target.startswith("#")} for text in (english, japanese)]
    assert {re.sub("#.*", "", target) for target in outside[0]} == {re.sub("#.*", "", target) for target in outside[1]}


def test_the_japanese_guide_is_japanese():
    """No paragraph, row or item was left in English."""
    text = re.sub(r"`[^`\n]*`", "", pages.without_blocks(GUIDE_JA.read_text()))
    for line in text.splitlines():
        words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\([^)]*\)", "", line))
        assert len(words) < 12 or re.search(r"[ぁ-ん]", line), line
