"""find_words(): which rules of a GBNF grammar may be words of llguidance's lexer without a change of meaning.

A word is much cheaper than a rule: the lexer's states are computed once, the parser's for each character. But the lexer
takes the longest word of all that are possible at a position. That is llama.cpp's meaning only if no word is the
beginning of a longer one whose next character may also follow the shorter one. What has such words is a rule instead,
and a text of several characters is a sequence of its characters.

The analysis is an approximation on the safe side: it counts repetitions as unbounded, and each word as possible at each
position.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from core.grammars.gbnf_parser import Chars, Choice, Leaf, Name, Node, Repeat, Sequence, Text, leaves_of

_LAST_CODE = 0x10FFFF
#: The most pairs of places that are looked at, and places of all words; with more, nothing but single characters are
#: words. Each pair takes about 2 us.
_MAX_PAIRS = 100_000
_MAX_PLACES = 4_000
_MAX_DEPTH = 200  # of nested parts of a word, across rules


def find_words(rules: dict[str, Node]) -> tuple[set[str], set[str]]:
    """Return (the rules that may be words, the literal texts that may not).

    rules: by name; each name that is used is there, and none begins with itself.
    """
    words, split, left = _regular(rules), set[str](), _MAX_PAIRS
    try:
        while True:
            wrong, num_pairs = _Grammar(rules, words, split).misread(left)
            if not wrong:
                return words, split
            words -= {leaf.name for leaf in wrong if isinstance(leaf, Name)}
            split |= {leaf.text for leaf in wrong if isinstance(leaf, Text)}
            left -= num_pairs
    except _TooLargeError:
        return set(), {text for rule in rules.values() for text in _texts(rule) if len(text) > 1}


class _TooLargeError(Exception):
    """The grammar has too many places or pairs of places."""


def names_of(node: Node) -> Iterator[str]:
    """Yield the names of rules used in a rule."""
    for leaf in leaves_of(node):
        if isinstance(leaf, Name):
            yield leaf.name


def _texts(node: Node) -> Iterator[str]:
    for leaf in leaves_of(node):
        if isinstance(leaf, Text):
            yield leaf.text


def _regular(rules: dict[str, Node]) -> set[str]:
    """Return the rules, except root, that are regular expressions: they use only such rules, and not themselves."""
    needs = {name: set(names_of(rule)) for name, rule in rules.items()}
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


class _Ends(NamedTuple):
    """What a part of a word begins and ends with: indices of places."""

    first: frozenset[int]
    last: frozenset[int]
    is_nullable: bool


class _Behind(NamedTuple):
    """What may follow each word and each rule, as bits, and the rules of which more is known now."""

    follow: dict[Leaf, int]
    after: dict[str, int]
    grown: set[str]


_EMPTY = _Ends(frozenset(), frozenset(), is_nullable=True)


class _Grammar:
    """A grammar whose words are automata of places: a place is one character of a word (Glushkov 1961).

    Sets of characters are bits: one for each stretch of codes between two bounds of any class or text.
    """

    def __init__(self, rules: dict[str, Node], words: set[str], split: set[str]) -> None:
        self._rules, self._words, self._split = rules, words, split
        bounds = {0, _LAST_CODE + 1}
        for rule in rules.values():
            for leaf in leaves_of(rule):
                ranges = leaf.ranges if isinstance(leaf, Chars) else ()
                bounds |= {bound for first, last in ranges for bound in (first, last + 1)}
                codes = map(ord, leaf.text) if isinstance(leaf, Text) else ()
                bounds |= {bound for code in codes for bound in (code, code + 1)}
        self._bit_of = {bound: bit for bit, bound in enumerate(sorted(bounds))}
        self._all = (1 << len(bounds) - 1) - 1
        self._chars: list[int] = []  # of each place
        self._next: list[set[int]] = []  # the places after each place
        self._ends: dict[Leaf, _Ends] = {}  # of each word
        self._rule_first: dict[str, tuple[int, bool]] = {}  # of each rule that is not a word: see _first()
        self._depth = 0
        for name, rule in rules.items():
            if name not in words:
                for word in (word for leaf in leaves_of(rule) for word in self._words_of(leaf)):
                    if word not in self._ends:
                        self._ends[word] = self._places(word)

    def misread(self, max_pairs: int) -> tuple[set[Leaf], int]:
        """Return (the words that the lexer would take instead of a shorter one, pairs of places looked at).

        A pair of places is reached by the same text in two words, or in one word in two ways.
        """
        follow = self._follow()
        owner = {place: word for word in self._ends for place in self._of(word)}
        last = {place for ends in self._ends.values() for place in ends.last}
        starts = [place for ends in self._ends.values() for place in ends.first]
        if len(starts) ** 2 > max_pairs:
            raise _TooLargeError
        waiting = [(one, other) for one in starts for other in starts if self._chars[one] & self._chars[other]]
        seen, found = set(waiting), set[Leaf]()
        while waiting:
            one, other = waiting.pop()
            nexts = self._next[other]
            if one in last and any(self._chars[place] & follow[owner[one]] for place in nexts):
                found.add(owner[other])
            for pair in ((left, right) for left in self._next[one] for right in nexts):
                if pair not in seen and self._chars[pair[0]] & self._chars[pair[1]]:
                    seen.add(pair)
                    waiting.append(pair)
            if len(seen) > max_pairs:
                raise _TooLargeError
        return found, len(seen)

    def _words_of(self, leaf: Leaf) -> Iterable[Leaf]:
        """Return the words that a leaf of a rule stands for."""
        if isinstance(leaf, Name):
            return (leaf,) if leaf.name in self._words else ()
        if isinstance(leaf, Text) and leaf.text in self._split:
            return map(Text, leaf.text)
        return (leaf,) if leaf != Text("") else ()

    def _of(self, word: Leaf) -> set[int]:
        """Return all places of a word."""
        found, waiting = set(self._ends[word].first), list(self._ends[word].first)
        while waiting:
            new = self._next[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def _places(self, node: Node) -> _Ends:
        """Add the places of a word or of a part of one."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _TooLargeError
        try:
            return self._places_of(node)
        finally:
            self._depth -= 1

    def _places_of(self, node: Node) -> _Ends:
        match node:
            case Name(name):
                return self._places(self._rules[name])
            case Text(text):
                return self._row([self._place(self._bits(((ord(one), ord(one)),))) for one in text])
            case Chars(ranges, is_negated):
                bits = self._bits(ranges)
                return self._place(self._all & ~bits if is_negated else bits)
            case Repeat(_, _, 0):
                return _EMPTY
            case Repeat(one, low, high):
                inner = self._places(one)
                if high != 1:
                    self._link(inner.last, inner.first)
                return inner._replace(is_nullable=inner.is_nullable or low == 0)
            case Sequence(nodes):
                return self._row(list(map(self._places, nodes)))
            case Choice(nodes):
                ways = list(map(self._places, nodes))
                first = frozenset[int]().union(*(one.first for one in ways))
                last = frozenset[int]().union(*(one.last for one in ways))
                return _Ends(first, last, any(one.is_nullable for one in ways))

    def _place(self, bits: int) -> _Ends:
        if len(self._chars) == _MAX_PLACES:
            raise _TooLargeError
        self._chars.append(bits)
        self._next.append(set())
        alone = frozenset({len(self._chars) - 1})
        return _Ends(alone, alone, is_nullable=False)

    def _row(self, parts: list[_Ends]) -> _Ends:
        row = _EMPTY
        for part in parts:
            self._link(row.last, part.first)
            row = _Ends(
                row.first | part.first if row.is_nullable else row.first,
                row.last | part.last if part.is_nullable else part.last,
                row.is_nullable and part.is_nullable,
            )
        return row

    def _link(self, left: frozenset[int], right: frozenset[int]) -> None:
        for place in left:
            self._next[place] |= right

    def _bits(self, ranges: Iterable[tuple[int, int]]) -> int:
        bits = 0
        for first, last in ranges:
            bits |= (1 << self._bit_of[last + 1]) - (1 << self._bit_of[first])
        return bits

    # What may follow each word: the first characters of what the parser may read after it.

    def _follow(self) -> dict[Leaf, int]:
        """Return the characters that may follow each word, as bits."""
        parsed = [name for name in self._rules if name not in self._words]
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        for name in parsed:
            for used in set(names_of(self._rules[name])):
                users[used].append(name)
        waiting = set(parsed)
        while waiting:  # for the first characters of the rules that they use
            name = waiting.pop()
            found = self._first(self._rules[name])
            if found != self._rule_first.get(name, (0, False)):
                self._rule_first[name] = found
                waiting.update(users[name])
        follow: dict[Leaf, int] = dict.fromkeys(self._ends, 0)
        after = dict.fromkeys(parsed, 0)  # rule -> what may follow it
        waiting = set(parsed)
        while waiting:
            grown: set[str] = set()
            name = waiting.pop()
            self._note(self._rules[name], after[name], _Behind(follow, after, grown))
            waiting |= grown
        return follow

    def _first(self, node: Node) -> tuple[int, bool]:
        """Return (the first characters of a part of a rule, whether the empty text matches it)."""
        match node:
            case Name(name) if name not in self._words:
                return self._rule_first.get(name, (0, False))
            case Repeat(_, _, 0):
                return 0, True
            case Repeat(one, low, _):
                first, is_nullable = self._first(one)
                return first, is_nullable or low == 0
            case Sequence(nodes):
                bits = 0
                for one in nodes:
                    first, is_nullable = self._first(one)
                    bits |= first
                    if not is_nullable:
                        return bits, False
                return bits, True
            case Choice(nodes):
                ways = list(map(self._first, nodes))
                return _union(first for first, _ in ways), any(is_nullable for _, is_nullable in ways)
            case Text(text) if text in self._split:
                return self._bits(((ord(text[0]), ord(text[0])),)), False
            case Text(""):
                return 0, True
            case _:
                ends = self._ends[node]
                return _union(self._chars[place] for place in ends.first), ends.is_nullable

    def _note(self, node: Node, behind: int, noted: "_Behind") -> None:
        """Note what may follow each word of a part of a rule. behind: what may follow the part."""
        match node:
            case Name(name) if name not in self._words:
                if behind & ~noted.after[name]:
                    noted.after[name] |= behind
                    noted.grown.add(name)
            case Repeat(_, _, 0):
                pass
            case Repeat(one, _, high):
                self._note(one, behind | (self._first(one)[0] if high != 1 else 0), noted)
            case Sequence(nodes):
                for one in reversed(nodes):
                    self._note(one, behind, noted)
                    first, is_nullable = self._first(one)
                    behind = first | (behind if is_nullable else 0)
            case Choice(nodes):
                for one in nodes:
                    self._note(one, behind, noted)
            case _:
                words = list(self._words_of(node))
                for word, following in pairwise(words):
                    noted.follow[word] |= self._first(following)[0]
                if words:
                    noted.follow[words[-1]] |= behind


def _union(sets: Iterable[int]) -> int:
    bits = 0
    for one in sets:
        bits |= one
    return bits
