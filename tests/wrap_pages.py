"""Wrap the Markdown pages at 118 columns: `python -m tests.wrap_pages [PAGE ...]`. A test looks for longer lines.

Only paragraphs and list items that have a longer line are wrapped anew, so that a change stays small. Tables, code,
headings and lines that no break can shorten (links) stay as they are.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import ROOT, known_files

WIDTH = 118
#: Made by programs from docstrings and declarations, one line an entry.
MADE = {Path("docs/map.md"), Path("docs/options.md"), Path("docs/known_models.md")}
_ITEM = re.compile(r"(?:[-*]|\d+\.)\s+")
#: The space before what would begin an item, a heading or a table at the start of a line.
_MARK = re.compile(r" (?=(?:[-*+>|]|#+|\d+[.)])(?: |$))")
_CODE = re.compile(r"```[^`]*$")


def pages() -> list[Path]:
    """Return the pages to wrap, relative to ROOT."""
    return [page for page in known_files("*.md") if page not in MADE]


def wrapped(text: str) -> str:
    """Return the page with its long paragraphs wrapped."""
    lines: list[str] = []
    for is_prose, block in _blocks(text.split("\n")):
        lines += _wrap(block) if is_prose and any(len(line) > WIDTH for line in block) else block
    return "\n".join(lines)


def long_lines(text: str) -> list[str]:
    """Return the lines that wrapping would change."""
    after = set(wrapped(text).split("\n"))
    return [line for line in text.split("\n") if len(line) > WIDTH and line not in after]


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield (it is prose, its lines): a paragraph, a list item, or one line of anything else."""
    block: list[str] = []
    in_code = False
    for line in lines:
        fence = bool(_CODE.match(line.lstrip()))
        has_form = in_code or fence or not line.strip() or line.startswith(("|", "#", "<"))
        in_code ^= fence
        has_form |= line.startswith("    ") and not block  # else it is the text of a list item
        if block and (has_form or _begins_item(line.lstrip(), block[0].lstrip())):
            yield True, block
            block = []
        if has_form:
            yield False, [line]
        else:
            block.append(line)
    if block:
        yield True, block


def _begins_item(line: str, first: str) -> bool:
    """Return whether a line begins a list item. A number after text does only if it is 1: "as for 16." goes on."""
    if not _ITEM.match(line):
        return False
    return not line[0].isdecimal() or line.startswith("1.") or (first[0].isdecimal() and bool(_ITEM.match(first)))


def _wrap(block: list[str]) -> list[str]:
    first = block[0]
    indent = first[: len(first) - len(first.lstrip())]
    item = _ITEM.match(first.lstrip())
    head = indent + (item[0] if item else "")
    text = " ".join(" ".join([first[len(head) :], *block[1:]]).split())
    lines = textwrap.wrap(
        _MARK.sub("\0", text),  # with the word before it
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


if __name__ == "__main__":
    for page in [Path(name) for name in sys.argv[1:]] or pages():
        before = (ROOT / page).read_text()
        after = wrapped(before)
        if after != before:
            (ROOT / page).write_text(after)
            print(page)
