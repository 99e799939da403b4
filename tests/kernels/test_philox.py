"""Philox4x32-10 against the known answers of Random123 and of NumPy's own generator's definition."""

import numpy as np

from kernels.philox import philox4x32, uniform


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


def test_uniform_is_the_first_two_words_of_its_counter():
    seed, position = np.array([7, 2**64 - 5], np.uint64), np.array([3, 2**31], np.int64)
    counter = np.array([[3, 1, 2, 9], [2**31, 1, 2, 9]], np.uint32)
    words = philox4x32(seed, counter).astype(object)
    expected = [((int(row[0]) << 32 | int(row[1])) >> 12) / 2**52 + 2.0**-53 for row in words]
    assert uniform(seed, position, choice=1, purpose=2, lane=9).tolist() == expected


def test_uniform_rows_are_independent_and_inside_the_open_interval():
    seed, position = np.repeat(np.arange(300, dtype=np.uint64), 300), np.tile(np.arange(300), 300)
    values = uniform(seed, position)
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 1800) ** 2 / 1800).sum() < 49 + 4 * np.sqrt(98)
    assert uniform(seed[777:778], position[777:778])[0] == values[777]
    assert len(np.unique(values)) == len(values)


def test_extremes_of_the_bits_stay_inside_the_open_interval():
    largest = (float(2**52 - 1) + 0.5) * 2.0**-52
    assert 0 < 0.5 * 2.0**-52 < largest < 1
