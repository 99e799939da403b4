"""Philox4x32-10 against the known answers of Random123 and of NumPy's own generator's definition."""

import numpy as np

from kernels.gumbel import philox4x32


def test_known_answers():
    key = np.array([0, 2**64 - 1, 0x299F31D0_A4093822], np.uint64)
    counter = np.array(
        [[0] * 4, [2**32 - 1] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]],
        np.uint32,
    )
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    result = philox4x32(key, counter)
    assert result.dtype == np.uint32
    assert result.tolist() == expected
