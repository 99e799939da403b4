"""lark_of_gbnf(): translates a grammar from GBNF, llama.cpp's notation, to Lark's, which llguidance reads.

The result has llama.cpp's meaning: a class or the dot is one Unicode character, including line ends, and no regular
expression syntax has a special meaning. What llama.cpp refuses is refused too: rules that start with themselves.
"""

import re
from collections import deque
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from core.grammars.gbnf_parser import Chars, Choice, Name, Node, Repeat, Sequence, Text, parse_gbnf
from core.grammars.gbnf_words import find_words, names_of
from core.grammars.grammar_notation import quoted
from ipc.errors import InvalidRequestError


def lark_of_gbnf(text: str) -> str:
    """Return the grammar, whose first rule is `start`. Errors: InvalidRequestError."""
    rules = parse_gbnf(text)
    if "root" not in rules:
        raise InvalidRequestError("grammar is not GBNF: Rule 'root' not found")
    for rule in rules.values():
        for name in names_of(rule):
            if name not in rules:
                raise InvalidRequestError(f"grammar is not GBNF: Rule {name!r} not found")
    _refuse_left_recursion(rules)
    words, split = find_words(rules)
    names = _lark_names(rules, words)
    ordered = sorted(rules, key=lambda name: name != "root")
    return "".join(f"{names[name]}: {_written(rules[name], names, split)}\n" for name in ordered)


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
        for other in names_of(rule):
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


def _written(node: Node, names: dict[str, str], split: set[str]) -> str:
    """Return a rule in Lark's notation. split: the texts that are written as single characters."""
    match node:
        case Text(text):
            return f"({' '.join(map(quoted, text))})" if text in split else quoted(text)
        case Chars(ranges, is_negated):
            return _class(ranges, is_negated)
        case Name(name):
            return names[name]
        case Repeat(_, _, 0):
            return quoted("")
        case Repeat(one, low, high):
            inner = _written(one, names, split)
            inner = f"({inner})" if isinstance(one, (Sequence, Repeat)) else inner
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
            return inner + (sign or f"{{{low},{'' if high is None else high}}}")
        case Sequence(nodes):
            return " ".join(_written(one, names, split) for one in nodes) or quoted("")
        case Choice(nodes):
            return "(" + " | ".join(_written(one, names, split) for one in nodes) + ")"


def _class(ranges: tuple[tuple[int, int], ...], is_negated: bool) -> str:
    """Return a class as a regular expression in which each character is written as its number."""
    if not ranges:
        return "/(?s:.)/"
    parts = (f"\\x{{{first:x}}}" + (f"-\\x{{{last:x}}}" if last > first else "") for first, last in ranges)
    return f"/[{'^' * is_negated}{''.join(parts)}]/"
