"""GramHash: the slots of n-grams in tables of positions, for several lengths n at once."""

import numpy as np

from ipc.arrays import Int32s, Ints, UInt64s

_GOLDEN = 0x9E3779B97F4A7C15


class GramHash:
    """A hash of (key, n tokens) for each length n. A key keeps the n-grams of one text apart from those of others."""

    def __init__(self, lengths: tuple[int, ...], num_slots: int) -> None:
        """lengths: of the n-grams, the longest first. num_slots: wanted of a table; it gets a power of two."""
        self.lengths: Ints = np.array(lengths)  # [N]
        self.lanes: Ints = np.arange(len(lengths))  # [N] row of each length in a table
        self.back: Ints = np.arange(lengths[0])  # tokens before the last one
        self.is_beyond = self.back >= self.lengths[:, None]  # [N, back] of an n-gram: not a part of it
        num_bits = max(1, (num_slots - 1).bit_length())
        self.num_slots = 1 << num_bits
        self._shift = np.uint64(64 - num_bits)
        self._factors = _odd_numbers(lengths[0] + 1)

    def slots(self, keys: Ints, tails: Int32s) -> Ints:
        """Return the slots [M, N] of the n-grams at the ends of tails [M, back], their last tokens first."""
        sums = ((tails + 1).astype(np.uint64) * self._factors[1:]).cumsum(1)[:, self.lengths - 1]
        sums += (keys.astype(np.uint64) * self._factors[0])[:, None]
        slots: Ints = ((sums * np.uint64(_GOLDEN)) >> self._shift).astype(np.int64)
        return slots


def _odd_numbers(count: int) -> UInt64s:
    """Return different odd 64-bit numbers: powers of the golden ratio's."""
    numbers = [_GOLDEN]
    while len(numbers) < count:
        numbers.append(numbers[-1] * _GOLDEN % 2**64)
    return np.array(numbers, np.uint64)
