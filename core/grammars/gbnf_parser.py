"""parse_gbnf(): parses a grammar in GBNF like llama.cpp's parser, into a tree for each rule."""

from collections.abc import Callable, Iterator
from typing import NoReturn, TypeAlias, Union

import msgspec

from ipc.errors import InvalidRequestError

_MAX_DEPTH = 100  # nested brackets
_MAX_REPETITIONS = 1 << 20
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {one: one for one in '"\\[]-'}
_LENGTHS = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits in an escape


class Text(msgspec.Struct, frozen=True):
    """A literal text."""

    text: str


class Chars(msgspec.Struct, frozen=True):
    """One character: in these ranges, both ends included, or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool


class Name(msgspec.Struct, frozen=True):
    """A reference to the rule of this name."""

    name: str


class Repeat(msgspec.Struct, frozen=True):
    """`node`, `low` to `high` times; None = unlimited."""

    node: "Node"
    low: int
    high: int | None


class Sequence(msgspec.Struct, frozen=True):
    """A sequence of nodes: the text of each follows that of the one before."""

    nodes: "tuple[Node, ...]"


class Choice(msgspec.Struct, frozen=True):
    """Alternatives: the text is that of one of the nodes."""

    nodes: "tuple[Node, ...]"


Leaf: TypeAlias = Name | Text | Chars
Node: TypeAlias = Union[Text, Chars, Name, Repeat, Sequence, Choice]  # noqa: UP007 - "|" takes no names in quotes


def leaves_of(node: Node) -> Iterator[Leaf]:
    """Yield the names, texts and characters of a rule, from left to right."""
    match node:
        case Repeat(one, _, _):
            yield from leaves_of(one)
        case Sequence(nodes) | Choice(nodes):
            for one in nodes:
                yield from leaves_of(one)
        case _:
            yield node


def parse_gbnf(text: str) -> dict[str, Node]:
    """Return the rules by name. If a name occurs twice, the later rule counts. Errors: InvalidRequestError."""
    return _Parser(text).rules()


class _Parser:
    """A recursive descent parser with the same functions as llama.cpp's."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._space(newlines=True)
        while self._next():
            name = self._name()
            self._space(newlines=False)
            self._expect("::=")
            self._space(newlines=True)
            found[name] = self._choice(0)
            if self._next() not in ("", "\r", "\n"):
                self._fail("expected a line's end")
            self._space(newlines=True)
        return found

    def _choice(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            self._fail(f"more than {_MAX_DEPTH} nested brackets")
        ways = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            self._space(newlines=True)
            ways.append(self._sequence(depth))
        return ways[0] if len(ways) == 1 else Choice(tuple(ways))

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        elements: dict[str, Callable[[], Node]] = {'"': self._literal, "[": self._class, ".": self._dot}
        while True:
            one = self._next()
            if one in elements:
                nodes.append(elements[one]())
            elif one == "(":
                self._at += 1
                self._space(newlines=True)
                nodes.append(self._choice(depth + 1))
                self._expect(")")
            elif _is_of_name(one):
                nodes.append(Name(self._name()))
            elif one in ("*", "+", "?", "{") and one:
                if not nodes:
                    self._fail("expected something to repeat before it")
                nodes[-1] = Repeat(nodes[-1], *self._repetition(one, depth))
            else:
                return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))
            self._space(newlines=depth > 0)

    def _repetition(self, one: str, depth: int) -> tuple[int, int | None]:
        self._at += 1
        if one != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[one]
        self._space(newlines=depth > 0)
        low = self._integer()
        high: int | None = low
        self._space(newlines=depth > 0)
        if self._next() == ",":
            self._at += 1
            self._space(newlines=depth > 0)
            high = self._integer() if self._next().isdigit() else None
            self._space(newlines=depth > 0)
        self._expect("}")
        if high is not None and high < low:
            self._fail(f"{{{low},{high}}} has a maximum below its minimum")
        return low, high

    def _literal(self) -> Node:
        self._at += 1
        text: list[str] = []
        while self._next() != '"':
            text.append(self._character())
        self._at += 1
        return Text("".join(text))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while self._next() != "]":
            first = last = ord(self._character())
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = ord(self._character())
                if last < first:
                    self._fail("a range ends before its beginning")
            ranges.append((first, last))
        self._at += 1
        return Chars(tuple(ranges), is_negated) if ranges or is_negated else Text("")

    def _dot(self) -> Node:
        self._at += 1
        return Chars((), True)

    def _character(self) -> str:
        """Return the next character of a literal or a class. Escapes are replaced."""
        one = self._next()
        if not one:
            self._fail("it ends inside a text or a class")
        self._at += 1
        if one != "\\":
            return one
        kind = self._next()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _LENGTHS.get(kind, 0)]
        if kind not in _LENGTHS or len(digits) < _LENGTHS[kind] or not _HEX.issuperset(digits):
            self._fail("an unknown escape")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail("an escape that is not a character")
        return chr(code)

    def _name(self) -> str:
        begin = self._at
        while _is_of_name(self._next()):
            self._at += 1
        if begin == self._at:
            self._fail("expected a rule's name")
        return self._text[begin : self._at]

    def _integer(self) -> int:
        begin = self._at
        while self._next().isascii() and self._next().isdigit():
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits or len(digits) > 9 or int(digits) > _MAX_REPETITIONS:
            self._fail(f"expected a number up to {_MAX_REPETITIONS}")
        return int(digits)

    def _space(self, *, newlines: bool) -> None:
        """Skip white space and comments, and line ends if `newlines` is true."""
        while one := self._next():
            if one == "#":
                while self._next() not in ("", "\r", "\n"):
                    self._at += 1
            elif one in " \t" or (newlines and one in "\r\n"):
                self._at += 1
            else:
                return

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            self._fail(f"expected {text}")
        self._at += len(text)

    def _fail(self, what: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        around = self._text[max(0, self._at - 20) : self._at], self._text[self._at : self._at + 20]
        raise InvalidRequestError(f"grammar is not GBNF: {what}, in line {line}: {around[0]!r} ^ {around[1]!r}")


def _is_of_name(one: str) -> bool:
    return one.isascii() and (one.isalnum() or one in "-_") and one != ""
