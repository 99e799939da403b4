"""OutputMemory: the outputs of earlier requests, and where given tokens occur in them."""

from collections import deque
from typing import NamedTuple

import numpy as np

from core.proposers.gram_hash import GramHash
from ipc.tables.arrays import Int32s, Ints

#: The most remembered tokens: 4 bytes each, plus 16 for their output.
_MAX_TOKENS = 1 << 20
#: Expected tokens per remembered request.
_USUAL_TOKENS = 256
_SLOTS_PER_TOKEN = 2


class Matches(NamedTuple):
    """Where the last tokens of n rows occur in the memory."""

    lengths: Ints  # [n] number of equal tokens; 0: none
    counts: Ints  # [n] number of tokens that follow there
    places: Ints  # [n] position of the first of them


class OutputMemory:
    """A ring of the last outputs, and an index of their n-grams. An output is only found within its scope.

    Scopes exist because drafts from another party's text would reveal it through their speed.
    """

    def __init__(self, lengths: tuple[int, ...], max_outputs: int) -> None:
        """lengths: of the n-grams in the index, longest first.

        max_outputs: number of remembered outputs, at least 1.
        """
        size = min(max_outputs * _USUAL_TOKENS, _MAX_TOKENS)
        self._hash = GramHash(lengths, _SLOTS_PER_TOKEN * size)
        self._max_outputs, self._lengths = max_outputs, lengths
        self._tokens = np.zeros(size, np.int32)
        self._scopes = np.zeros(size, np.int64)  # per token; 0: forgotten
        self._begins, self._ends = np.zeros(size, np.int32), np.zeros(size, np.int32)  # of each token's output
        self._positions = self._hash.make_table()  # position after each n-gram
        self._outputs: deque[tuple[int, int]] = deque()  # positions (begin, end) of the outputs, oldest first
        self._end = 0  # end of the last output

    def __len__(self) -> int:
        """Return the number of outputs that are remembered."""
        return len(self._outputs)

    def add(self, scope: int, tokens: Int32s) -> None:
        """Remember an output. scope: not 0. If it is larger than the memory, its last tokens are kept."""
        tokens = tokens[-len(self._tokens) :]
        if len(tokens) < 2:
            return
        begin = self._end
        if begin + len(tokens) > len(self._tokens):
            self._forget(begin, len(self._tokens))
            begin = 0
        end = begin + len(tokens)
        self._forget(begin, end)
        self._outputs.append((begin, end))
        self._end = end
        self._tokens[begin:end], self._scopes[begin:end] = tokens, scope
        self._begins[begin:end], self._ends[begin:end] = begin, end
        places = np.arange(begin + 1, end)  # positions after each n-gram, if there is a token
        tails = self._tokens[np.maximum(places[:, None] - 1 - self._hash.back, begin)]
        fits = places[:, None] - begin >= self._hash.lengths
        index, lanes = np.nonzero(fits)
        slots = self._hash.slots(np.full(len(places), scope), tails)
        self._positions[lanes, slots[index, lanes]] = places[index]

    def find(self, scopes: Ints, tails: Int32s) -> Matches:
        """Return positions after the longest n-grams that end like tails [n, back], whose last token comes first."""
        found = self._positions[self._hash.lanes, self._hash.slots(scopes, tails)].astype(np.int64)  # [n, N]
        last = np.maximum(found - 1, 0)
        compared = np.maximum(last[:, :, None] - self._hash.back, 0)
        equal = (self._tokens[compared] == tails[:, None, :]) | self._hash.is_beyond
        is_whole = found - self._hash.lengths >= self._begins[last]
        is_going_on = found < self._ends[last]
        matches = equal.all(-1) & is_whole & is_going_on & (self._scopes[last] == scopes[:, None]) & (found > 0)
        best = matches.argmax(1)
        each = np.arange(len(tails))
        is_found, places = matches[each, best], found[each, best]
        counts = np.where(is_found, self._ends[last[each, best]] - places, 0)
        return Matches(np.where(is_found, self._hash.lengths[best], 0), counts, places)

    def find_one(self, scope: int, tail: list[int]) -> tuple[int, int, int]:
        """Return the same as find() for one row: (length, count, place)."""
        found = self._positions[self._hash.lanes, self._hash.slots_of(scope, tail)].tolist()
        for length, place in zip(self._lengths, found, strict=True):
            if place and self._scopes[place - 1] == scope:
                begin, end = int(self._begins[place - 1]), int(self._ends[place - 1])
                is_whole = place - length >= begin and place < end
                if is_whole and self._tokens[place - length : place].tolist() == tail[length - 1 :: -1]:
                    return length, end - place, place
        return 0, 0, 0

    def read(self, places: Ints, most: int) -> Int32s:
        """Return the tokens [n, most] from each of these positions on. Those after an output's end are meaningless."""
        tokens: Int32s = self._tokens[np.minimum(places[:, None] + np.arange(most), len(self._tokens) - 1)]
        return tokens

    def _forget(self, begin: int, end: int) -> None:
        """Free these positions, and outputs if there are too many."""
        while self._outputs and (len(self._outputs) >= self._max_outputs or self._is_next_within(begin, end)):
            first, last = self._outputs.popleft()
            self._scopes[first:last] = 0

    def _is_next_within(self, begin: int, end: int) -> bool:
        first, last = self._outputs[0]
        return first < end and begin < last
