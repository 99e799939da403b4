"""check_boundaries(): refuses a structural tag whose grammar llguidance's lexer would not read as intended.

The lexer takes the longest word of all terminals that are possible at a position. That is right if no word of one
terminal is the start of a longer word whose next character could also start what follows. Otherwise a text that the
format allows would be forbidden.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from core.grammars.grammar_notation import quoted
from core.grammars.pieces import Choice, Hole, Leaf, Loop, Piece, Row, Terminals, Text
from ipc.errors import InvalidRequestError, UnsupportedParameterError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_JSON_FIRST = '-["{0123456789tfn'
_NUMBER_NEXT = "0123456789.eE+-"
#: The most positions, each a set of possible terminals, and questions to llguidance, which take about 0.5 ms each.
_MAX_PLACES = 2048
_MAX_QUESTIONS = 256
_FUEL = 200_000
_NO_TOKEN = "NoExtensionBias"  # what llguidance says about a grammar that allows no token


def check_boundaries(piece: Piece, terminals: Terminals) -> None:
    """Raise UnsupportedParameterError if a word's end is ambiguous. terminals: those that patterns refer to."""
    if not isinstance(piece, Text):  # a single terminal has no boundary inside
        _Check(piece, _Languages(terminals)).run()


class _Languages:
    """Questions about the words of terminals, answered by llguidance."""

    def __init__(self, terminals: Terminals) -> None:
        self._terminals = terminals
        self._known: dict[str, bool] = {}

    def is_nullable(self, text: Text) -> bool:
        """Return whether the empty text is a word."""
        return self.has_word(f'({text.pattern}) & ""') if text.is_nullable is None else text.is_nullable

    def begins_with(self, text: Text, chars: str) -> bool:
        """Return whether a word starts with one of these characters."""
        if text.literal is not None:
            return text.literal != "" and text.literal[0] in chars
        return self.has_word(f"({text.pattern}) & (({' | '.join(map(quoted, chars))}) ANY)")

    def has_word(self, pattern: str) -> bool:
        """Return whether a terminal has a word."""
        if pattern not in self._known:
            if len(self._known) == _MAX_QUESTIONS:
                raise InvalidRequestError("structural_tag has too many alternatives of free text at one place")
            self._known[pattern] = _has_word("\n".join(["start: Q", f"Q: {pattern}", *self._terminals.wider_lines()]))
        return self._known[pattern]


class _Check:
    """One check: which leaves may follow each leaf, and so which are possible at one position."""

    def __init__(self, piece: Piece, languages: _Languages) -> None:
        self._languages = languages
        self._follow: dict[Leaf, set[Leaf]] = {}
        self._ends: dict[Piece, _Ends] = {}
        self._start = frozenset(self.ends(piece).first)

    def run(self) -> None:
        """Check each position that a text can reach."""
        waiting, seen = [self._start], {self._start}
        while waiting:
            place = waiting.pop()
            self._check(place)
            for following in self._places_after(place):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
            if len(seen) > _MAX_PLACES:
                raise InvalidRequestError("structural_tag has too many alternatives at one place")

    def ends(self, piece: Piece) -> "_Ends":
        """Return what may come first and last in a piece."""
        if piece not in self._ends:
            self._ends[piece] = _Ends(self, piece)
        return self._ends[piece]

    def is_nullable(self, text: Text) -> bool:
        """Return whether the empty text is a word of this text."""
        return self._languages.is_nullable(text)

    def link(self, left: set[Leaf], right: set[Leaf]) -> None:
        """Record that each of `right` may follow each of `left`."""
        for one in left:
            self._follow.setdefault(one, set()).update(right)

    def _next(self, leaf: Leaf) -> set[Leaf]:
        return self._follow.get(leaf, set())

    def _places_after(self, place: frozenset[Leaf]) -> Iterator[frozenset[Leaf]]:
        """Yield what may follow a word of one of these leaves, or of two that have a word in common."""
        behind: dict[str, set[Leaf]] = {}  # by literal
        regexes = sorted((one for one in place if isinstance(one, Text)), key=lambda one: one.free, reverse=True)
        for text in regexes:
            if text.literal is not None:
                behind.setdefault(text.literal, set()).update(self._next(text))
        yield from map(frozenset, behind.values())
        regexes = [text for text in regexes if text.literal is None]
        for index, text in enumerate(regexes):
            yield frozenset(self._next(text))
            if self._share(text, list(map(quoted, behind))):
                yield from (frozenset(following | self._next(text)) for following in behind.values())
            others = [other for other in regexes[:index] if not _are_apart(text, other)]
            if self._share(text, [other.pattern for other in others]):
                yield from (frozenset(self._next(text) | self._next(other)) for other in others)
        yield frozenset().union(*(self._next(leaf) for leaf in place if isinstance(leaf, Hole)))

    def _share(self, text: Text, patterns: list[str]) -> bool:
        """Return whether a word of the text is also a word of one of these patterns."""
        return bool(patterns) and self._languages.has_word(f"({text.pattern}) & ({' | '.join(patterns)})")

    def _check(self, place: frozenset[Leaf]) -> None:
        """Check that what follows a word of one of these leaves never continues a word of another."""
        holes = [leaf for leaf in place if isinstance(leaf, Hole)]
        texts = [leaf for leaf in place if isinstance(leaf, Text)]
        for hole in holes:
            if any(self._continues(hole, one) for one in self._next(hole)):
                raise _ambiguous("JSON and what follows it, as its end does not show")
        if holes and any(self._languages.begins_with(text, _JSON_FIRST) for text in texts):
            raise _ambiguous("JSON, and a text in its place that may begin as JSON does")
        self._check_literals(sorted((text for text in texts if text.literal), key=lambda text: text.literal or ""))
        followed = [text for text in texts if self._next(text)]
        if all(text.literal is not None for text in texts) or all(
            left.is_closed and (left is right or _are_apart(left, right)) for left in followed for right in texts
        ):
            return
        longer = " | ".join(f"{text.pattern} ({self._first_chars(text)})" for text in followed)
        if self._languages.has_word(f"({' | '.join(text.pattern for text in texts)}) & (({longer}) ANY)"):
            raise _ambiguous(" or ".join(sorted(set(map(_name, texts)))[:4]))

    def _check_literals(self, texts: list[Text]) -> None:
        """texts: in alphabetical order, so that a text comes before those that start with it."""
        for index, left in enumerate(texts):
            for right in texts[index + 1 :]:
                begin, whole = left.literal or "", right.literal or ""
                if not whole.startswith(begin):
                    break
                if begin != whole and self._may_follow(left, whole[len(begin)]):
                    raise _ambiguous(f"{_name(left)}, where {_name(right)} would go on")

    def _may_follow(self, text: Text, char: str) -> bool:
        return any(
            char in _JSON_FIRST if isinstance(leaf, Hole) else self._languages.begins_with(leaf, char)
            for leaf in self._next(text)
        )

    def _continues(self, hole: Hole, following: Leaf) -> bool:
        if isinstance(following, Hole):
            return True  # llguidance allows white space between two
        return hole.may_be_number and self._languages.begins_with(following, _NUMBER_NEXT)

    def _first_chars(self, text: Text) -> str:
        """Return a pattern for the first characters of what may follow."""
        return " | ".join(dict.fromkeys(map(_first_char, self._next(text))))


class _Ends:
    """The leaves that may come first and last in a piece, and whether it may be empty."""

    def __init__(self, check: _Check, piece: Piece) -> None:
        self.first: set[Leaf] = set()
        self.last: set[Leaf] = set()
        self.is_nullable = False
        match piece:
            case Text():
                self.is_nullable = check.is_nullable(piece)
                if piece.literal != "":
                    self.first = self.last = {piece}
            case Hole():
                self.first = self.last = {piece}
            case Row():
                self._set_row([check.ends(one) for one in piece.pieces], check)
            case Choice():
                ends = [check.ends(one) for one in piece.pieces]
                self.first = set().union(*(one.first for one in ends))
                self.last = set().union(*(one.last for one in ends))
                self.is_nullable = any(one.is_nullable for one in ends)
            case Loop():
                inner = check.ends(piece.piece)
                self.first, self.last = inner.first, inner.last
                self.is_nullable = inner.is_nullable or piece.low == 0
                if piece.high != 1:
                    check.link(inner.last, inner.first)

    def _set_row(self, ends: "list[_Ends]", check: _Check) -> None:
        self.is_nullable = True
        for one in ends:
            check.link(self.last, one.first)
            if self.is_nullable:
                self.first = self.first | one.first
            self.last = self.last | one.last if one.is_nullable else one.last
            self.is_nullable = self.is_nullable and one.is_nullable


def _are_apart(left: Leaf, right: Leaf) -> bool:
    """Return whether these are different parts of one free text, and the left one ends with a mark."""
    return isinstance(left, Text) and isinstance(right, Text) and 0 < left.free == right.free and left is not right


def _first_char(leaf: Leaf) -> str:
    """Return a pattern for the first characters of a leaf."""
    if isinstance(leaf, Hole):
        return r'/[-\["{0-9tfn]/'
    return quoted(leaf.literal[0]) if leaf.literal else "/(?s:.)/"


def _name(text: Text) -> str:
    return f"the text {text.literal!r:.80}" if text.literal is not None else "free text or a regex"


def _ambiguous(what: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"structural_tag: it is ambiguous where a part ends, which this version does not support: {what}. "
        "Put a tag around a part, or a text between the parts"
    )


def _has_word(grammar: str) -> bool:
    """Return whether a grammar accepts any text."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL, verbose_errors=False)
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    why = matcher.get_error().partition("\n")[0] if matcher.is_error() else ""
    if why and not why.startswith(_NO_TOKEN):
        raise InvalidRequestError(f"the grammar of structured_outputs (structural_tag) cannot be used: {why}"[:500])
    return not why


@lru_cache(1)
def _bytes() -> "LLTokenizer":
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
