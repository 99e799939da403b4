"""Philox4x32-10, a counter-based random generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a function of (key, counter) alone, so a request's random stream does not depend on the rest of its batch.
Key = the request's 64-bit seed; counter = (output position, choice, purpose, lane).
No two uses of random numbers share a purpose.
"""

import numpy as np

from kernels.arrays import UInt32s, UInt64s

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
