"""GgufStrings: an array of strings in a GGUF header, found without decoding them: an engine needs few of them.

A string is its length in 8 bytes and its bytes, so each one says where the next one begins. Nearly all have fewer than
256 bytes: then a length is a byte before seven zeros. Such places are found for all strings at once; that they are
lengths is proven by each pointing to the next one.
"""

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NoReturn, overload

import numpy as np

from ipc.tables.arrays import NO_INTS, Ints

_LENGTH = struct.Struct("<Q")
_LENGTH_BYTES = 8
_WINDOW = 1 << 18  # bytes that are looked through at once
#: A look that finds few strings, because the next one is long or looks like several, costs as much as any other. After
#: so many of them the rest is found one by one.
_FEW, _MOST_POOR_LOOKS = 64, 64


class GgufStrings(Sequence[str]):
    """The strings of one array. They are decoded when they are asked for."""

    def __init__(self, data: bytes, starts: Ints) -> None:
        """data: the array's bytes. starts [count]: where the lengths of its strings are. All strings are UTF-8."""
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        starts = self._starts[index]
        if isinstance(index, slice):
            return [self._decoded(start) for start in starts.tolist()]
        return self._decoded(int(starts))

    def __iter__(self) -> Iterator[str]:
        return map(self._decoded, self._starts.tolist())

    def _decoded(self, start: int) -> str:
        (length,) = _LENGTH.unpack_from(self._data, start)
        return self._data[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length].decode()


class CutStringError(ValueError):
    """A string does not end within the data. index: its number. position: where it begins."""

    def __init__(self, index: int, position: int) -> None:
        super().__init__(f"string {index} at byte {position}")
        self.index, self.position = index, position


def find_strings(data: bytes | mmap.mmap, begin: int, count: int, end: int) -> tuple[Ints, int]:
    """Return where the lengths of `count` strings are, the first one at `begin`, and where the last string ends.

    data: bytes, or a mapped file. end: where its strings must have ended. Errors: CutStringError.
    """
    starts, at, num_poor = array("q"), begin, 0

    def fail() -> NoReturn:
        raise CutStringError(len(starts), at)

    while len(starts) < count:
        if num_poor < _MOST_POOR_LOOKS:
            run = _short_ones(data[at : min(end, at + _WINDOW)])[: count - len(starts)] + at
            num_poor += len(run) < _FEW
            if len(run):
                starts.frombytes(run.astype(np.int64).tobytes())
                last = int(run[-1])
                at = last + _LENGTH_BYTES + data[last]
                continue
        length = _LENGTH.unpack_from(data, at)[0] if at + _LENGTH_BYTES <= end else end
        if at + _LENGTH_BYTES + length > end:
            fail()
        starts.append(at)
        at += _LENGTH_BYTES + length
    return np.frombuffer(starts, np.int64) if starts else NO_INTS, at


def first_not_utf8(data: bytes, starts: Ints) -> int | None:
    """Return the number of the first string that is not UTF-8; None: all are. They are as in GgufStrings."""
    texts = np.frombuffer(data, np.uint8).copy()
    for place in range(_LENGTH_BYTES):
        texts[starts + place] = ord(" ")  # so that no character begins in one string and ends in the next one
    try:
        texts.tobytes().decode()
    except UnicodeDecodeError as error:
        return int(np.searchsorted(starts, error.start, "right")) - 1
    return None


def _short_ones(data: bytes) -> Ints:
    """Return the places of strings that follow one another from the first byte on, all of under 256 bytes."""
    values = np.frombuffer(data, np.uint8)
    if len(values) < 8:
        return NO_INTS
    two = values[:-1] | values[1:]
    four = two[:-2] | two[2:]
    seven = four[:-3] | four[3:]  # zero if seven values are, from this one on
    places = np.flatnonzero(seven[1:] == 0)
    if not len(places) or places[0]:
        return NO_INTS
    ends = places + 8 + values[places]
    is_next = ends[:-1] == places[1:]
    count = len(places) if is_next.all() else int(is_next.argmin()) + 1
    return places[: count - int(ends[count - 1] > len(values))]
