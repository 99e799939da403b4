"""lark_of_gbnf(): translates a grammar from GBNF, llama.cpp's notation, to Lark's, which llguidance reads.

The result has llama.cpp's meaning: a class or the dot is one Unicode character, including line ends, and no regular
expression syntax has a special meaning. What llama.cpp refuses is refused too: rules that start with themselves.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, NoReturn, TypeAlias, Union

from core.grammars.grammar_notation import quoted
from ipc.errors import InvalidRequestError

# parse_gbnf(): parses a grammar in GBNF like llama.cpp's parser, into a tree for each rule.


_MAX_DEPTH = 100  # nested brackets
_MAX_REPETITIONS = 1 << 20
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {one: one for one in '"\\[]-'}
_LENGTHS = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits in an escape


class Text(NamedTuple):
    """A literal text."""

    text: str


class Chars(NamedTuple):
    """One character: in these ranges, both ends included, or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool


class Name(NamedTuple):
    """A reference to the rule of this name."""

    name: str


class Repeat(NamedTuple):
    """`node`, `low` to `high` times; None = unlimited."""

    node: "Node"
    low: int
    high: int | None


class Sequence(NamedTuple):
    """A sequence of nodes: the text of each follows that of the one before."""

    nodes: "tuple[Node, ...]"


class Choice(NamedTuple):
    """Alternatives: the text is that of one of the nodes."""

    nodes: "tuple[Node, ...]"


Node: TypeAlias = Union[Text, Chars, Name, Repeat, Sequence, Choice]  # noqa: UP007 - "|" takes no names in quotes


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


def lark_of_gbnf(text: str) -> str:
    """Return the grammar, whose first rule is `start`. Errors: InvalidRequestError."""
    rules = parse_gbnf(text)
    if "root" not in rules:
        raise InvalidRequestError("grammar is not GBNF: Rule 'root' not found")
    for rule in rules.values():
        for name in _names(rule):
            if name not in rules:
                raise InvalidRequestError(f"grammar is not GBNF: Rule {name!r} not found")
    _refuse_left_recursion(rules)
    names = _lark_names(rules, _words(rules))
    ordered = sorted(rules, key=lambda name: name != "root")
    return "".join(f"{names[name]}: {_written(rules[name], names)}\n" for name in ordered)


def _names(node: Node) -> Iterator[str]:
    """Yield the names of rules used in a rule."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Repeat):
        yield from _names(node.node)
    elif isinstance(node, (Sequence, Choice)):
        for one in node.nodes:
            yield from _names(one)


def _words(rules: dict[str, Node]) -> set[str]:
    """Return the rules, except root, that are regular expressions, that is, use only such rules and not themselves.

    They become words of llguidance's lexer, which is cheaper than its parser.
    """
    needs = {name: set(_names(rule)) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in needs.items():
        for other in others:
            users[other].append(name)
    found, ready = set[str](), deque(name for name, others in needs.items() if not others)
    while ready:
        if (word := ready.popleft()) == "root":
            continue
        found.add(word)
        for user in users[word]:
            needs[user].discard(word)
            if not needs[user]:
                ready.append(user)
    return found


def _refuse_left_recursion(rules: dict[str, Node]) -> None:
    """Raise InvalidRequestError if a rule starts with itself, like llama.cpp."""
    empty = _empty_rules(rules)
    begins = {name: set(_begins(rule, empty)) for name, rule in rules.items()}
    try:
        TopologicalSorter(begins).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise InvalidRequestError(
            f"grammar is not GBNF: a rule must not begin with itself (left recursion): {circle}"
        ) from None


def _empty_rules(rules: dict[str, Node]) -> set[str]:
    """Return the rules that the empty text matches."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for other in _names(rule):
            users[other].add(name)
    found, waiting = set[str](), deque(rules)
    while waiting:
        name = waiting.popleft()
        if name not in found and _is_empty(rules[name], found):
            found.add(name)
            waiting.extend(users[name])
    return found


def _is_empty(node: Node, empty: set[str]) -> bool:
    match node:
        case Text(text):
            return not text
        case Chars():
            return False
        case Name(name):
            return name in empty
        case Repeat(one, low, _):
            return low == 0 or _is_empty(one, empty)
        case Sequence(nodes):
            return all(_is_empty(one, empty) for one in nodes)
        case Choice(nodes):
            return any(_is_empty(one, empty) for one in nodes)


def _begins(node: Node, empty: set[str]) -> Iterator[str]:
    """Yield the rules that a rule may start with."""
    match node:
        case Text() | Chars():
            return
        case Name(name):
            yield name
        case Repeat(one, _, _):
            yield from _begins(one, empty)
        case Sequence(nodes):
            for one in nodes:
                yield from _begins(one, empty)
                if not _is_empty(one, empty):
                    return
        case Choice(nodes):
            for one in nodes:
                yield from _begins(one, empty)


def _lark_names(rules: dict[str, Node], words: set[str]) -> dict[str, str]:
    """Return a name in Lark's notation for each rule. Words are in capitals, and no two names are equal."""
    found, taken = {"root": "start"}, {"start"}
    for name in rules:
        plain = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
        stem = plain if re.match(r"[a-z_]*[a-z]", plain) else f"rule_{plain}"
        wanted, number = stem, 1
        while wanted in taken:
            number += 1
            wanted = f"{stem}_{number}"
        if name != "root":
            taken.add(wanted)
            found[name] = wanted.upper() if name in words else wanted
    return found


def _written(node: Node, names: dict[str, str]) -> str:
    match node:
        case Text(text):
            return quoted(text)
        case Chars(ranges, is_negated):
            return _class(ranges, is_negated)
        case Name(name):
            return names[name]
        case Repeat(_, _, 0):
            return quoted("")
        case Repeat(one, low, high):
            inner = _written(one, names)
            inner = f"({inner})" if isinstance(one, (Sequence, Repeat)) else inner
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
            return inner + (sign or f"{{{low},{'' if high is None else high}}}")
        case Sequence(nodes):
            return " ".join(_written(one, names) for one in nodes) or quoted("")
        case Choice(nodes):
            return "(" + " | ".join(_written(one, names) for one in nodes) + ")"


def _class(ranges: tuple[tuple[int, int], ...], is_negated: bool) -> str:
    """Return a class as a regular expression in which each character is written as its number."""
    if not ranges:
        return "/(?s:.)/"
    parts = (f"\\x{{{first:x}}}" + (f"-\\x{{{last:x}}}" if last > first else "") for first, last in ranges)
    return f"/[{'^' * is_negated}{''.join(parts)}]/"
