"""GramHash: the slots of n-grams in tables of positions, for several lengths n at once."""

from contextlib import suppress
from itertools import accumulate
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from operator import mul

import numpy as np

from ipc.tables.arrays import Int32s, Ints, UInt64s

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class GramHash:
    """A hash of (key, n tokens) for each length n. The key separates the n-grams of different texts."""

    def __init__(self, lengths: tuple[int, ...], num_slots: int) -> None:
        """lengths: of the n-grams, longest first. num_slots: minimum size of a table, rounded up to a power of two."""
        self.lengths: Ints = np.array(lengths)  # [N]
        self.lanes: Ints = np.arange(len(lengths))  # [N] row of each length in a table
        self.back: Ints = np.arange(lengths[0])  # tokens before the last one
        self.is_beyond = self.back >= self.lengths[:, None]  # [N, back] not a part of the n-gram
        num_bits = max(1, (num_slots - 1).bit_length())
        self.num_slots = 1 << num_bits
        self._shift = np.uint64(64 - num_bits)
        self._factors = _odd_numbers(lengths[0] + 1)
        self._key_factor, *self._token_factors = self._factors.tolist()
        self._lengths, self._num_shifted = lengths, 64 - num_bits

    def make_table(self) -> Int32s:
        """Return an empty table of positions [N, num_slots]; 0: no position.

        Its memory is allocated page by page as positions are entered. With huge pages the first prompt would wait until
        nearly all of it is cleared: 0.1 s for 84 MB.
        """
        size = 4 * len(self.lengths) * self.num_slots
        memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)  # with shared memory, lookups would allocate pages too
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(MADV_NOHUGEPAGE)
        return np.frombuffer(memory, np.int32).reshape(len(self.lengths), self.num_slots)

    def slots(self, keys: Ints, tails: Int32s) -> Ints:
        """Return the slots [M, N] of the n-grams at the ends of tails [M, back]. Tails have their last token first."""
        sums = ((tails + 1).astype(np.uint64) * self._factors[1:]).cumsum(1)[:, self.lengths - 1]
        sums += (keys.astype(np.uint64) * self._factors[0])[:, None]
        slots: Ints = ((sums * np.uint64(_GOLDEN)) >> self._shift).astype(np.int64)
        return slots

    def slots_of(self, key: int, tail: list[int]) -> list[int]:
        """Return the slots [N] of one text's n-grams; tail [back] is like a row for slots().

        It is faster for few texts.
        """
        sums = list(
            accumulate(map(mul, [token + 1 for token in tail], self._token_factors), initial=key * self._key_factor)
        )
        return [(sums[length] * _GOLDEN & _MASK) >> self._num_shifted for length in self._lengths]


def _odd_numbers(count: int) -> UInt64s:
    """Return different odd 64-bit numbers: powers of the golden ratio constant."""
    numbers = [_GOLDEN]
    while len(numbers) < count:
        numbers.append(numbers[-1] * _GOLDEN % 2**64)
    return np.array(numbers, np.uint64)
