"""SharedFile: arrays in a memory file that two processes map: one computes with them, the other copies blocks of them.

While SharedFile.arrays() is in use, host_zeros() makes its arrays there.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

from kernels.arrays import Ints
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_zeros

_HEAD_BYTES = mmap.PAGESIZE  # before the first array: a count


class SharedArray(NamedTuple):
    """The place of an array of num_items items of item_bytes each, from `begin` on in the file."""

    begin: int
    num_items: int
    item_bytes: int


class SharedFile:
    """A memory file as the process that makes arrays in it sees it. fd: of make_file(); it is not closed here."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = _HEAD_BYTES
        self._begins: list[tuple[int, int, int]] = []  # address, bytes and place in the file of each mapping
        self._count = count_in(fd)

    def zeros(self, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return an array of zeros, for which memory is taken when it is written. Errors: MemoryError."""
        num_bytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        begin = self._end
        try:
            os.ftruncate(self._fd, begin + num_bytes)
            memory = np.frombuffer(mmap.mmap(self._fd, num_bytes, offset=begin), np.uint8)
        except OSError as error:
            raise MemoryError(str(error)) from error
        self._end += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begins.append((memory.ctypes.data, num_bytes, begin))
        return memory[: num_bytes if 0 not in shape else 0].view(dtype).reshape(shape)

    def place_of(self, array: Numbers) -> SharedArray:
        """Return where a contiguous array is, which was made here or is a part of one that was."""
        assert array.flags.c_contiguous, "an array in parts"
        address = array.ctypes.data
        offset, begin = next(
            (address - first, begin) for first, size, begin in self._begins if first <= address < first + size
        )
        return SharedArray(begin + offset, len(array), array.nbytes // len(array))

    @contextmanager
    def arrays(self) -> Iterator[None]:
        """Let host_zeros() make its arrays in this file."""
        token = _file.set(self)
        try:
            yield
        finally:
            _file.reset(token)

    def count(self) -> None:
        """Count one more: what the other process waits for has happened."""
        self._count[0] += 1


def make_file() -> int:
    """Return the descriptor of a new memory file. Errors: OSError."""
    fd = os.memfd_create("engine-core-blocks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _HEAD_BYTES)
    return fd


def count_in(fd: int) -> Ints:
    """Return a view of a file's count, int64 [1]."""
    return np.frombuffer(mmap.mmap(fd, _HEAD_BYTES), np.int64)[:1]


def arrays_of(fd: int, places: list[SharedArray]) -> list[Numbers]:
    """Return views of arrays in a file as bytes, uint8 [num_items, item_bytes] each."""
    if not places:
        return []
    whole = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    return [whole[begin : begin + count * item_bytes].reshape(count, item_bytes) for begin, count, item_bytes in places]


_file: ContextVar[SharedFile | None] = ContextVar("file", default=None)


def host_zeros(shape: tuple[int, ...], dtype: Dtype) -> Numbers:
    """Return a contiguous array of zeros, for blocks or states, at a multiple of 64 bytes.

    Errors: MemoryError.
    """
    file = _file.get()
    return aligned_zeros(shape, dtype) if file is None else file.zeros(shape, dtype)
