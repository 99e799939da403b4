"""Pieces: the parts of a structural tag's grammar, between its tree and its text.

A Text is regular and becomes one terminal; adjacent regular pieces become one. A Hole is a separate grammar. So
llguidance's lexer, which takes the longest word, has to find few word ends.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TypeAlias

from core.grammars.grammar_notation import quoted
from ipc.errors import InvalidRequestError

#: The most characters in a terminal's definition.
_MAX_PATTERN_CHARS = 1 << 18
#: Terminals used by others: any text, and any non-empty text.
_COMMON = ("ANY: /(?s:.*)/", "SOME: /(?s:.+)/")


@dataclass(frozen=True, eq=False)
class Text:
    """A regular language, as factors of an expression of Lark terminals. Each position has its own object."""

    pattern: str
    literal: str | None = None  # if it is a single text
    #: The number of the free text that it is a part of. Closed parts end with a mark, each with a different one, at the
    #: end of the first mark; the part that is not closed has no mark. So no word of a closed part starts a word of
    #: another part.
    free: int = 0
    is_closed: bool = False  # no word of it is the start of a longer one
    is_nullable: bool | None = False  # whether the empty text is a word; None = unknown

    def __post_init__(self) -> None:
        if len(self.pattern) > _MAX_PATTERN_CHARS:
            raise InvalidRequestError("structural_tag: the formats that are regular expressions are too large together")


@dataclass(frozen=True, eq=False)
class Hole:
    """JSON."""

    rule: str
    may_be_number: bool  # whether only the next character shows where it ends


@dataclass(frozen=True, eq=False)
class Row:
    """Several pieces, one after the other."""

    pieces: tuple["Piece", ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """One of several pieces."""

    pieces: tuple["Piece", ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A piece, `low` to `high` times; None = unlimited."""

    piece: "Piece"
    low: int
    high: int | None


Leaf: TypeAlias = Text | Hole
Piece: TypeAlias = Text | Hole | Row | Choice | Loop


class Terminals:
    """The terminals that patterns refer to by name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # definition -> name
        self._wider: dict[str, str] = {}  # definition -> one that matches more words

    def name(self, definition: str, wider: str | None = None) -> str:
        """Return the name of a terminal with this definition. wider: one that matches more words and is cheaper."""
        self._wider[definition] = wider or definition
        return self._names.setdefault(definition, f"P{len(self._names)}")

    def lines(self) -> list[str]:
        """Return the definitions in Lark's notation."""
        return [*_COMMON, *(f"{name}: {definition}" for definition, name in self._names.items())]

    def wider_lines(self) -> list[str]:
        """Return the wider definitions. They match every word of the terminals."""
        return [*_COMMON, *(f"{name}: {self._wider[definition]}" for definition, name in self._names.items())]

    def choice(self, pieces: Many[Piece]) -> Piece:
        """Return one of the pieces. They are merged if all are regular."""
        if len(pieces) == 1:
            return pieces[0]
        texts = [piece for piece in pieces if isinstance(piece, Text)]
        if len(texts) < len(pieces):
            return Choice(tuple(pieces))
        nullable = {text.is_nullable for text in texts}
        known = True if True in nullable else None if None in nullable else False
        return Text(self.name(" | ".join(text.pattern for text in texts)), is_nullable=known)

    def loop(self, piece: Piece, low: int, high: int | None) -> Piece:
        """Return the piece `low` to `high` times."""
        if (low, high) == (1, 1):
            return piece
        if high == 0:
            return literal("")
        if not isinstance(piece, Text):
            return Loop(piece, low, high)
        nullable = True if low == 0 else piece.is_nullable
        return Text(f"{self.name(piece.pattern)}{times(low, high)}", is_nullable=nullable)


def literal(text: str) -> Text:
    """Return the piece for this text."""
    return Text(quoted(text), text, is_closed=True, is_nullable=not text)


def row(pieces: Many[Piece]) -> Piece:
    """Return the pieces one after the other. Adjacent regular pieces are merged."""
    made: list[Piece] = []
    for piece in pieces:
        for one in piece.pieces if isinstance(piece, Row) else (piece,):
            last = made[-1] if made else None
            if isinstance(one, Text) and isinstance(last, Text):
                made[-1] = _joined(last, one)
            else:
                made.append(one)
    return made[0] if len(made) == 1 else Row(tuple(made))


def times(low: int, high: int | None) -> str:
    """Return Lark's suffix for a repetition."""
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _joined(left: Text, right: Text) -> Text:
    if left.literal == "" or right.literal == "":
        return right if left.literal == "" else left
    if left.literal is not None and right.literal is not None:
        return literal(left.literal + right.literal)
    known = {left.is_nullable, right.is_nullable}
    return Text(
        f"{left.pattern} {right.pattern}",
        free=left.free if left.is_closed else 0,
        is_closed=left.is_closed and right.is_closed,
        is_nullable=False if False in known else None if None in known else True,
    )
