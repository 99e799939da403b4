"""Source: the text of an answer, which arrives in pieces and is read by generators.

A generator yields if it needs more text, and continues when a piece has arrived, so a reader is written as if it had
the whole text. A reader's result must depend on the text alone, never on how it was divided into pieces.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
_SPACE = re.compile(r"\s+")
#: Most characters of a call to keep until its name is known. If the name comes later, they are content.
MAX_KEPT = 4096


class NotACallError(Exception):
    """The text after a begin mark is not a call, but content."""


class Source:
    """Text with a read position. keep() marks a position to which the reader can go back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self._num_forgotten = 0
        self._kept: int | None = None
        self._most_kept = 0

    @property
    def position(self) -> int:
        """Return the number of characters of the whole text before the position."""
        return self._num_forgotten + self.at

    def add(self, piece: str) -> None:
        """Add text at the end, and drop the text that has been read."""
        begin = self.at if self._kept is None else self._kept
        self.text = self.text[begin:] + piece
        self.at -= begin
        self._num_forgotten += begin
        if self._kept is not None:
            self._kept = 0

    def keep(self, at: int, most: int) -> None:
        """Keep the text from this position, at most this many characters."""
        self._kept, self._most_kept = at, most

    def release(self) -> None:
        """Stop keeping text: the kept text is a call. Errors: NotACallError."""
        self._check()
        self._kept = None

    def give_back(self) -> str:
        """Return the text from the kept position up to here, and stop keeping."""
        assert self._kept is not None, "keep() before give_back()"
        text = self.text[self._kept : self.at]
        self._kept = None
        return text

    def back(self) -> None:
        """Go back to the kept position."""
        assert self._kept is not None, "keep() before back()"
        self.at, self._kept = self._kept, None

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end of the answer. Errors: NotACallError if too much text is kept."""
        self._check()
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read the matching part of the available text. The pattern must also match each prefix of its matches."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def collect(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest match, like run(), also across pieces."""
        parts: list[str] = []
        while (yield from self.peek()):
            part = self.run(pattern)
            if not part:
                break
            parts.append(part)
        return "".join(parts)

    def skip_space(self) -> Reading[None]:
        """Read white space."""
        yield from self.collect(_SPACE)

    def take(self, mark: str) -> Reading[bool]:
        """Read `mark` if it is next; return whether it was."""
        while True:
            there = self.text[self.at : self.at + len(mark)]
            if there == mark:
                self.at += len(mark)
                return True
            if self.is_ended or not mark.startswith(there):
                return False
            yield

    def until(self, marks: Sequence[str], show: Callable[[str], None], *, most_kept: int = 0) -> Reading[str]:
        """Read up to the first of these marks and past it; return the mark, "" at the end of the answer.

        show: called with the text before it, piece by piece. most_kept: keep the mark for give_back(), if above 0.
        """
        pattern = _pattern(marks)
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                show(self.text[self.at : found.start()])
                self.at = found.end()
                if most_kept:
                    self.keep(found.start(), most_kept)
                return found.group()
            end = len(self.text) if self.is_ended else _safe_end(self.text, self.at, marks)
            show(self.text[self.at : end])
            self.at = end
            if self.is_ended:
                return ""
            yield

    def _check(self) -> None:
        if self._kept is not None and self.at - self._kept > self._most_kept:
            self.at = self._kept + self._most_kept
            raise NotACallError


def _pattern(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))  # re keeps compiled patterns


def _safe_end(text: str, begin: int, marks: Sequence[str]) -> int:
    """Return the end of the text that cannot be part of a mark, whatever follows."""
    end = len(text)
    for mark in marks:
        at = text.find(mark[0], max(begin, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if at >= 0:
            end = min(end, at)
    return end
