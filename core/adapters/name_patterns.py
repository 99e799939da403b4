"""NamePatterns: maps names to values by regular expressions, with bounded work.

The expressions come from an adapter's file. Python's re may take years for one of a few characters, and holds the GIL
all that time. So an expression with repetitions or alternatives is matched here at all positions of the name at once,
and steps are counted. Only whether it matches is needed, so greedy and lazy are the same.
"""

import re
from collections.abc import Callable, Mapping
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Generic, TypeVar

from ipc.errors import ModelFileError

#: The most steps for all names of an adapter, some seconds. 300 modules with one pattern each take half a million.
MAX_STEPS = 5_000_000
_FLAT_SHARE = 8  # characters of a name that re compares in the time of one step

_Value = TypeVar("_Value")
_Places = frozenset[int]
_FLAT = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: lambda char: char.isdecimal(),
    op.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    op.CATEGORY_SPACE: lambda char: char.isspace(),
    op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    op.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    op.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class NamePatterns(Generic[_Value]):
    """Values by expression. The first expression that matches the whole name, or its end after a dot, counts.

    where: the file and the setting, for error texts. Errors: ModelFileError for an invalid regular expression, for one
    with references, lookaround or flags, and for more work than MAX_STEPS.
    """

    def __init__(self, values: Mapping[str, _Value], where: str) -> None:
        self._where, self._num_steps = where, 0
        self._patterns = [(self._parse(key), value) for key, value in values.items()]

    def first(self, name: str, otherwise: _Value) -> _Value:
        """Return the value of the first expression that matches a name, or `otherwise`."""
        for (flat, tree), value in self._patterns:
            if flat is not None:
                self._count(1 + len(name) // _FLAT_SHARE)
                fits = flat.fullmatch(name) is not None
            else:
                fits = len(name) in _Run(name, self._count).ends(tree, 0)
            if fits:
                return value
        return otherwise

    def _parse(self, key: str) -> tuple[re.Pattern[str] | None, Any]:
        try:
            own, whole = _parser.parse(key), rf"(.*\.)?({key})"
            if all(kind in _FLAT for kind, _ in own):
                return re.compile(whole), None
            tree = _parser.parse(whole)
            _check(tree)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelFileError(f"{self._where}: invalid regular expression: {error}") from None
        return None, tree

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise ModelFileError(
                f"{self._where}: its regular expressions need over {MAX_STEPS} steps: list the modules by name instead"
            )


def _check(tree: Any) -> None:
    """Check that a tree contains only supported operations. Errors: re.error."""
    for kind, arguments in tree:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            _check(arguments[2])
        elif kind is op.SUBPATTERN and not arguments[1] and not arguments[2]:
            _check(arguments[3])
        elif kind is op.BRANCH:
            for branch in arguments[1]:
                _check(branch)
        elif kind not in _FLAT:
            raise re.error(f"{str(kind).lower()} is not supported here")


class _Run:
    """The matching of one name: for each start, where an expression may end."""

    def __init__(self, name: str, count: Callable[[int], None]) -> None:
        self._name, self._count = name, count
        self._known: dict[tuple[int, int], _Places] = {}  # by the identity of an operation's arguments and the place

    def ends(self, tree: Any, place: int) -> _Places:
        """Return the positions where a sequence of operations that starts at this one may end."""
        key = id(tree), place
        if key not in self._known:
            places = frozenset((place,))
            for kind, arguments in tree:
                self._count(1 + len(places))
                places = frozenset(end for begin in places for end in self._step(kind, arguments, begin))
            self._known[key] = places
        return self._known[key]

    def _step(self, kind: Any, arguments: Any, place: int) -> _Places:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(arguments[0], arguments[1], arguments[2], place)
        if kind is op.SUBPATTERN:
            return self.ends(arguments[3], place)
        if kind is op.BRANCH:
            return frozenset(end for branch in arguments[1] for end in self.ends(branch, place))
        if kind is op.AT:
            return frozenset((place,)) if self._is_at(arguments, place) else frozenset()
        fits = place < len(self._name) and _has(kind, arguments, self._name[place])
        return frozenset((place + 1,)) if fits else frozenset()

    def _repeat(self, least: int, most: int, body: Any, place: int) -> _Places:
        """Return the ends of `least` to `most` repetitions. More than the name's length make no difference."""
        places, found, num_rounds = frozenset((place,)), set[int](), 0
        least, most = (min(int(number), len(self._name) + 1) for number in (least, most))
        while places:
            if num_rounds >= least:
                places -= found
                found |= places
            if num_rounds == most:
                break
            self._count(1 + len(places))
            places = frozenset(end for begin in places for end in self.ends(body, begin))
            num_rounds += 1
        return frozenset(found)

    def _is_at(self, where: Any, place: int) -> bool:
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return place == 0
        if where is op.AT_END:
            return place == len(self._name) or self._name[place:] == "\n"
        if where is op.AT_END_STRING:
            return place == len(self._name)
        is_word = _CATEGORIES[op.CATEGORY_WORD]
        around = [is_word(char) for char in self._name[max(0, place - 1) : place + 1]]
        is_boundary = around[0] != around[1] if len(around) == 2 else any(around)
        return is_boundary == (where is op.AT_BOUNDARY)


def _has(kind: Any, arguments: Any, char: str) -> bool:
    """Return whether a character is one of these."""
    if kind is op.LITERAL:
        return bool(ord(char) == arguments)
    if kind is op.NOT_LITERAL:
        return bool(ord(char) != arguments)
    if kind is op.ANY:
        return char != "\n"
    if kind is op.RANGE:
        return bool(arguments[0] <= ord(char) <= arguments[1])
    if kind is op.CATEGORY:
        return _CATEGORIES[arguments](char)
    is_negated = arguments[0][0] is op.NEGATE
    return is_negated != any(_has(kind, own, char) for kind, own in (arguments[1:] if is_negated else arguments))
