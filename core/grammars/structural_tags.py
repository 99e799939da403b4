"""structural_tag_grammar(): turns a structural tag's tree into one grammar in Lark's notation.

Free text ends where a mark first occurs: a trigger, a text of `excludes`, or an end of the innermost tag around it. The
text and the mark are one terminal, so the lexer need not guess which `<` starts the mark.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

from core.grammars.boundaries import check_boundaries
from core.grammars.grammar_notation import quoted
from core.grammars.pieces import Choice, Hole, Loop, Piece, Row, Terminals, Text, literal, row, times
from ipc.errors import UnsupportedParameterError
from ipc.params.structural_tags import (
    AnyText,
    ConstString,
    Dispatch,
    Format,
    Grammar,
    JsonSchema,
    Optional,
    Or,
    Plus,
    Regex,
    Repeat,
    Sequence,
    Star,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)

#: Returns the rule for JSON with a schema.
JsonRule = Callable[[dict[str, Any] | bool], str]

#: JSON types whose text shows where it ends.
_ENDED = frozenset(("object", "array", "string", "boolean", "null"))
#: What ends a regex in Lark's notation, or its line, unless it is escaped.
_REGEX_MARKS = re.compile(r"\\.|[/\n]", re.DOTALL)


def structural_tag_grammar(tag: Format, json_rule: JsonRule) -> str:
    """Return the grammar for this format. Errors: InvalidRequestError; UnsupportedParameterError naming an ambiguity.

    json_rule: returns the rule for JSON with a schema.
    """
    terminals = Terminals()
    piece = _Pieces(terminals, json_rule).of(tag, ())
    check_boundaries(piece, terminals)
    return _Writer().grammar(piece, terminals)


class _Pieces:
    """Builds the pieces of formats."""

    def __init__(self, terminals: Terminals, json_rule: JsonRule) -> None:
        self._json_rule = json_rule
        self._terminals = terminals
        self._choice, self._loop = terminals.choice, terminals.loop
        self._numbers = itertools.count(1)  # for free texts

    def of(self, node: Format, ends: tuple[str, ...]) -> Piece:
        """Return the piece for a format. ends: those of the innermost tag around it."""
        match node:
            case ConstString():
                return literal(node.value)
            case JsonSchema():
                return Hole(self._json_rule(node.json_schema), _may_be_number(node.json_schema))
            case AnyText():
                return self._free(_smallest([*node.excludes, *ends]), node.max_chars)
            case Regex():
                return Text(f"/(?s:{_REGEX_MARKS.sub(_escaped, node.pattern)})/", is_nullable=None)
            case Sequence():
                return row([self.of(one, ends) for one in node.elements])
            case Or():
                return self._choice([self.of(one, ends) for one in node.elements])
            case Optional() | Plus() | Star() | Repeat():
                return self._loop(self.of(node.content, ends), *_bounds(node))
            case Tag():
                return row([literal(node.begin), self._body(node)])
            case TagsWithSeparator():
                return self._separated(node)
            case TriggeredTags():
                return self._triggered(node, ends)
            case Dispatch():
                rules = [(pattern, self.of(content, ends)) for pattern, content in node.rules]
                return self._dispatched(rules, (*node.excludes,), is_loop=node.loop)
            case Grammar():
                raise UnsupportedParameterError("structural_tag: a grammar must be the only format")

    def _body(self, tag: Tag) -> Piece:
        """Return a tag without its begin text."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        return row([self.of(tag.content, tag.ends), self._choice([literal(end) for end in ends])])

    def _separated(self, node: TagsWithSeparator) -> Piece:
        tags = piece = self._choice([row([literal(tag.begin), self._body(tag)]) for tag in node.tags])
        if not node.stop_after_first:
            piece = row([tags, self._loop(row([literal(node.separator), tags]), 0, None)])
        return piece if node.at_least_one else self._loop(piece, 0, 1)

    def _triggered(self, node: TriggeredTags, ends: tuple[str, ...]) -> Piece:
        bodies = [(tag.begin, self._body(tag)) for tag in node.tags]
        first = self._choice([row([literal(begin), body]) for begin, body in bodies])
        if node.at_least_one and node.stop_after_first:
            return first
        groups: dict[str, list[Piece]] = {trigger: [] for trigger in node.triggers}
        for begin, body in bodies:
            trigger = next(filter(begin.startswith, groups))
            groups[trigger].append(row([literal(begin[len(trigger) :]), body]))
        rules = [(trigger, self._choice(group)) for trigger, group in groups.items() if group]
        unused = [trigger for trigger, group in groups.items() if not group]
        text = self._dispatched(rules, (*node.excludes, *ends, *unused), is_loop=not node.stop_after_first)
        return row([first, text]) if node.at_least_one else text

    def _dispatched(self, rules: list[tuple[str, Piece]], excludes: tuple[str, ...], *, is_loop: bool) -> Piece:
        """Return free text in which each trigger is followed by a piece. rules: (trigger, piece)."""
        marks, number = _smallest([*(trigger for trigger, _ in rules), *excludes]), next(self._numbers)
        found = [row([self._up_to(trigger, marks, number), piece]) for trigger, piece in rules]
        free = self._free(marks, None, number)
        return row([self._loop(self._choice(found), 0, None), free]) if is_loop else self._choice([*found, free])

    def _free(self, marks: list[str], max_chars: int | None, number: int = 0) -> Text:
        """Return text without these marks.

        number: of the free text whose last part it is; 0 = it has no other parts.
        """
        some = "ANY" if max_chars is None else self._terminals.name(f"/(?s:.{{0,{max_chars}}})/", wider="ANY")
        text = f"{some} & ~(ANY {self._one_of(marks)} ANY)" if marks else some
        return Text(self._terminals.name(text), free=number, is_nullable=True)

    def _up_to(self, mark: str, marks: list[str], number: int) -> Text:
        """Return the text up to the first of some marks, which is this one."""
        text = f"(ANY {quoted(mark)}) & ~(ANY {self._one_of(marks)} SOME)"
        return Text(self._terminals.name(text), free=number, is_closed=True)

    def _one_of(self, texts: list[str]) -> str:
        return self._terminals.name(" | ".join(map(quoted, texts)))


def _smallest(marks: list[str]) -> list[str]:
    """Return the marks without those that contain another one, because the text ends at the contained one first."""
    distinct = list(dict.fromkeys(marks))
    return [mark for mark in distinct if not any(other in mark for other in distinct if other != mark)]


def _bounds(node: Optional | Plus | Star | Repeat) -> tuple[int, int | None]:
    match node:
        case Optional():
            return 0, 1
        case Repeat():
            return node.min, None if node.max == -1 else node.max
        case _:
            return int(isinstance(node, Plus)), None


def _may_be_number(schema: dict[str, Any] | bool) -> bool:
    types = schema.get("type") if isinstance(schema, dict) else None
    names = [types] if isinstance(types, str) else types
    return not isinstance(names, list) or not set(map(str, names)) <= _ENDED


def _escaped(mark: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(mark.group(), mark.group())


class _Writer:
    """Writes pieces in Lark's notation."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # definition -> name
        self._written: dict[Piece, str] = {}

    def grammar(self, piece: Piece, terminals: Terminals) -> str:
        """Return the grammar for the piece."""
        start = self._symbol(piece)
        lines = [f"{name}: {definition}" for definition, name in self._names.items()]
        return "\n".join([f"start: {start}", *lines, *terminals.lines()])

    def _symbol(self, piece: Piece) -> str:
        if piece not in self._written:
            self._written[piece] = self._expression(piece)
        return self._written[piece]

    def _expression(self, piece: Piece) -> str:
        match piece:
            case Text():
                return '""' if piece.literal == "" else self._name("T", piece.pattern)
            case Hole():
                return self._name("json_", piece.rule)
            case Row():
                return self._name("row_", " ".join(map(self._symbol, piece.pieces)))
            case Choice():
                return self._name("choice_", " | ".join(map(self._symbol, piece.pieces)))
            case Loop():
                return self._name("loop_", f"{self._symbol(piece.piece)}{times(piece.low, piece.high)}")

    def _name(self, kind: str, definition: str) -> str:
        return self._names.setdefault(definition, f"{kind}{len(self._names)}")
