"""Which tests each process has still to run, in memory that all processes share."""

import contextlib
import ctypes
import fcntl
import mmap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import BinaryIO

_NONE = -1


class _Share(ctypes.Structure):
    """Numbers of tests; _NONE = none. `following` is taken, too: which fixtures a test ends depends on the next one."""

    _fields_ = [(name, ctypes.c_int64) for name in ("begin", "end", "running", "following")]


class Shares:
    """Each process begins with a part of the list, so that some wait while others compute. A process that has none left
    takes the second half of the largest rest. Parts are cut between two files if possible, because tests of a file
    share fixtures.

    files: of each test, in the order of the list. shared: an empty file.
    """

    def __init__(self, files: Sequence[str], num_processes: int, shared: BinaryIO) -> None:
        self._borders = [place for place in range(len(files)) if place == 0 or files[place] != files[place - 1]]
        self._file = shared
        size = ctypes.sizeof(_Share) * num_processes
        self._file.truncate(size)
        self._shares = (_Share * num_processes).from_buffer(mmap.mmap(self._file.fileno(), size))
        begin = 0
        for number, share in enumerate(self._shares):
            left = num_processes - number
            end = self._cut(begin, len(files), begin + (len(files) - begin) // left) if left > 1 else len(files)
            share.begin, share.end, share.running, share.following = begin, end, _NONE, _NONE
            begin = end

    def advance(self, number: int) -> tuple[int, int | None] | None:
        """Return the test that a process runs now, and the one that it runs next; None = all are run or taken."""
        with self._locked():
            share = self._shares[number]
            share.running = self._take(share) if share.following == _NONE else share.following
            share.following = self._take(share)
            if share.running == _NONE:
                return None
            return share.running, None if share.following == _NONE else share.following

    def running(self, number: int) -> int | None:
        """Return the test that a process runs, or ran when it died."""
        running = self._shares[number].running
        return None if running == _NONE else running

    def clear(self) -> None:
        """Leave each process with the tests that it has taken."""
        with self._locked():
            for share in self._shares:
                share.begin = share.end

    def _take(self, share: _Share) -> int:
        if share.begin == share.end:
            largest = max(self._shares, key=lambda other: other.end - other.begin)
            if largest.begin == largest.end:
                return _NONE
            cut = self._cut(largest.begin, largest.end, (largest.begin + largest.end) // 2)
            share.begin, share.end, largest.end = cut, largest.end, cut
        share.begin += 1
        return int(share.begin) - 1

    def _cut(self, begin: int, end: int, wanted: int) -> int:
        """Return a place from `begin` on and before `end`: the border of two files nearest to `wanted`, or `wanted`."""
        after = bisect_left(self._borders, wanted)
        near = [place for place in self._borders[max(0, after - 1) : after + 1] if begin <= place < end]
        return min(near, key=lambda place: abs(place - wanted), default=wanted)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the kernel ends it with the process
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
