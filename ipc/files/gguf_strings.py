"""GgufStrings: an array of strings in a GGUF header, found without decoding them: an engine needs few of them.

A string is its length in 8 bytes and its bytes, so each one says where the next one begins. Nearly all have fewer than
256 bytes: then a length is a byte before seven zeros. Such places are found for all strings at once; that they are
lengths is proven by each pointing to the next one.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import NoReturn, overload

import numpy as np

from ipc.errors import ModelFileError
from ipc.tables.arrays import NO_INTS, Ints

_LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 20  # bytes that are looked through at once
#: Longer strings that are passed over one by one before all that follow are: each costs a look through a window.
_MOST_LONG = 256


class GgufStrings(Sequence[str]):
    """The strings of one array. They are decoded when they are asked for. Errors: ModelFileError then."""

    def __init__(self, data: bytes, starts: Ints, source: str) -> None:
        """data: the array's bytes. starts [count]: where the lengths of its strings are. source: for errors."""
        self._data, self._starts, self._source = data, starts, source

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
        raw = self._data[start + 8 : start + 8 + length]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._source}: the string {raw!r:.80} is not UTF-8") from None


class CutStringError(ValueError):
    """A string does not end within the data. index: its number. position: where it begins."""

    def __init__(self, index: int, position: int) -> None:
        super().__init__(f"string {index} at byte {position}")
        self.index, self.position = index, position


def find_strings(data: bytes | mmap.mmap, begin: int, count: int, end: int) -> tuple[Ints, int]:
    """Return where the lengths of `count` strings are, the first one at `begin`, and where the last string ends.

    data: bytes, or a mapped file. end: where its strings must have ended. Errors: CutStringError.
    """
    parts, found, at, num_long = list[Ints](), 0, begin, 0

    def fail() -> NoReturn:
        raise CutStringError(found, at)

    while found < count:
        if num_long < _MOST_LONG and len(run := _short_ones(data[at : min(end, at + _WINDOW)])):
            run = run[: count - found] + at
            parts.append(run)
            found, last = found + len(run), int(run[-1])
            at = last + 8 + data[last]
            continue
        length = _LENGTH.unpack_from(data, at)[0] if at + 8 <= end else end
        if at + 8 + length > end:
            fail()
        parts.append(np.array([at], np.int64))
        num_long, found, at = num_long + 1, found + 1, at + 8 + length
    return np.concatenate(parts) if parts else NO_INTS, at


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
