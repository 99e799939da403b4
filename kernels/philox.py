"""Philox4x32-10, a counter-based random generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a function of (key, counter) alone, so a request's random stream does not depend on the rest of its batch.
Key = the request's 64-bit seed; counter = (output position, choice, purpose, lane).
"""

import numpy as np

from kernels.arrays import AnyInts, Doubles, UInt32s, UInt64s

#: The purposes of random numbers, so that no two uses share a number.
SAMPLE_TOKEN = 0

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: UInt64s, counter: UInt32s) -> UInt32s:
    """Compute key [R] uint64 (low word = first key word), counter [R, 4] uint32 -> [R, 4] uint32, in ten rounds."""
    k0, k1 = key & _LOW, key >> _32
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniform(
    seed: UInt64s,
    position: AnyInts,
    choice: AnyInts | int = 0,
    purpose: int = SAMPLE_TOKEN,
    lane: int = 0,
) -> Doubles:
    """Return one number in (0, 1) per row, [R] float64.

    seed [R] uint64; position [R]: index in the request's output; choice [R], or one for all.

    52 random bits of the first two words, and half a step: neither 0 nor 1 can occur, and every value is exact.
    """
    counter = np.empty((len(seed), 4), np.uint32)
    counter[:, 0] = position
    counter[:, 1] = choice
    counter[:, 2:] = purpose, lane
    words = philox4x32(seed, counter).astype(np.uint64)
    bits = ((words[:, 0] << _32) | words[:, 1]) >> np.uint64(12)
    result: Doubles = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return result
