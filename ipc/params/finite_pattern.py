"""texts_of(): the texts that a regular expression matches, if these are few."""

from collections.abc import Iterable

_SIGNS = frozenset("^$.*+?()[]{}|\\")
_MAX_DEPTH = 20  # of groups


class _ManyError(Exception):
    """There are too many texts, or the expression has parts that are not supported here."""


def texts_of(pattern: str, most: int) -> list[str] | None:
    """Return the texts of a pattern that is anchored at both ends; None if they may be more than `most`.

    It may have characters, classes, groups, alternatives and question marks: `^(a|b[12])c?$`.
    """
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        return None
    reader = _Reader(pattern[1:-1], most)
    try:
        if not reader.is_one_alternative():
            return None
        found = reader.alternatives(0)
    except (_ManyError, IndexError):
        return None
    return found if reader.is_at_end() else None


class _Reader:
    def __init__(self, text: str, most: int) -> None:
        self._text, self._most, self._at = text, most, 0

    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def is_one_alternative(self) -> bool:
        """Return whether the anchors apply to all alternatives: in `^a|b$` each applies to one."""
        depth, at, in_class = 0, 0, False
        while at < len(self._text):
            one = self._text[at]
            if in_class:
                in_class = one != "]"
            else:
                in_class = one == "["
                depth += (one == "(") - (one == ")")
                if one == "|" and depth == 0:
                    return False
            at += 2 if one == "\\" else 1
        return True

    def alternatives(self, depth: int) -> list[str]:
        if depth > _MAX_DEPTH:
            raise _ManyError
        found = self._sequence(depth)
        while self._next() == "|":
            self._at += 1
            found = self._few([*found, *self._sequence(depth)])
        return found

    def _sequence(self, depth: int) -> list[str]:
        found = [""]
        while self._next() not in ("", "|", ")"):
            item = self._item(depth)
            if self._next() == "?":
                self._at += 1
                item = self._few(["", *item])
            if len(found) * len(item) > self._most:
                raise _ManyError
            found = self._few(begin + end for begin in found for end in item)
        return found

    def _item(self, depth: int) -> list[str]:
        one = self._next()
        if one == "[":
            return self._class()
        if one != "(":
            return [self._character()]
        self._at += 3 if self._text.startswith("(?:", self._at) else 1
        found = self.alternatives(depth + 1)
        if self._next() != ")":
            raise _ManyError
        self._at += 1
        return found

    def _class(self) -> list[str]:
        self._at += 1
        found = list[str]()
        while self._next() != "]":
            first = last = self._character(in_class=True)
            if self._next() == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                last = self._character(in_class=True)
            if ord(last) - ord(first) >= self._most:
                raise _ManyError
            found = self._few([*found, *map(chr, range(ord(first), ord(last) + 1))])
        self._at += 1
        return found

    def _character(self, *, in_class: bool = False) -> str:
        one = self._text[self._at]
        self._at += 1
        if one == "\\":
            one = self._text[self._at]
            self._at += 1
            if one.isalnum():  # \\d, \\n, \\x41, \\1
                raise _ManyError
            return one
        if (one in "^[" if in_class else one in _SIGNS) or not one.isprintable():
            raise _ManyError
        return one

    def _few(self, texts: Iterable[str]) -> list[str]:
        found = list(dict.fromkeys(texts))
        if len(found) > self._most:
            raise _ManyError
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]
