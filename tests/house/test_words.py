"""The pages are written with the words that CONTRIBUTING.md names, not with those that it replaces."""

import re

import pytest

from tests.house.source import ROOT
from tests.wrap_pages import pages

pytestmark = pytest.mark.checkout

#: Pages that still have some of the words.
NOT_YET = {f"docs/{name}.md" for name in ("contract", "http", "operations", "protocol", "replay", "scale_out")}
_WORDS = re.compile(r"\b(?:anew|alike|besides?|foretell?s?|foretold|meanwhile|nobody|somebody|to\s+be\s+had)\b", re.I)


def archaic(text: str) -> list[str]:
    """Return the words of a text that have a plainer one. Code is left out."""
    return [" ".join(word.split()) for word in _WORDS.findall(re.sub(r"`[^`\n]*`", "", text))]


def test_pages_have_plain_words() -> None:
    """Tests' records and the page that names the words are left out."""
    named = [page for page in pages() if page.parts[0] != "tests" and str(page) not in {*NOT_YET, "CONTRIBUTING.md"}]
    assert len(named) > 40
    found = {str(page): archaic((ROOT / page).read_text()) for page in named}
    assert {page: words for page, words in found.items() if words} == {}


def test_an_archaic_word_is_found() -> None:
    assert archaic("Nobody begins anew, beside\nwhat is to be\nhad.") == ["Nobody", "anew", "beside", "to be had"]
    assert archaic("The new side of a bedside table.") == []
