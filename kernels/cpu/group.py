"""The buffers by which the ranks of a group exchange what they compute (c/threads/group.h): shared, or by streams."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.arrays import Ints
from kernels.cpu.structs import GroupArguments, GroupStreams, Place
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty

STATE_BYTES = 4096  # enum in group.h
#: Bytes of the file from one buffer to the next. The file is sparse: only what is written takes memory.
_APART = 1 << 38


class SharedMemory:
    """Named buffers in a memory file that several processes have opened, each under the same name for all.

    fd: of a file that make_shared_file() has made; it is not closed here.
    """

    _NAMES = ("embedded", "attended", "gated", "added", "logits", "largest", "asked")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._state = np.frombuffer(mmap.mmap(fd, STATE_BYTES), np.uint8)

    streams = 0  # there are none

    @property
    def state(self) -> int:
        """Return the address of the state of group_wait()."""
        return int(self._state.ctypes.data)

    def __contains__(self, name: str) -> bool:
        """Return whether the ranks share the buffer with this name."""
        return name in self._NAMES

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return the buffer, at least as large as before. Its content stays; it begins on a page."""
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        assert num_bytes <= _APART, f"{name}: {num_bytes} bytes, and there is room for {_APART}"
        memory = mmap.mmap(self._fd, num_bytes, offset=(1 + self._NAMES.index(name)) * _APART)
        return np.frombuffer(memory, np.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def make_shared_file() -> int:
    """Return the descriptor of a new memory file for the ranks of a group. It takes memory as its pages are written."""
    fd = os.memfd_create("engine-core-group", os.MFD_CLOEXEC)
    os.ftruncate(fd, (1 + len(SharedMemory._NAMES)) * _APART)
    return fd


class SeparateMemory:
    """The buffers of a rank whose group is on several machines; what others compute comes by streams.

    fds: a connected stream socket to each other rank, -1 to itself; they are not closed here.
    """

    state = 0  # there is none

    def __init__(self, rank: int, fds: Sequence[int]) -> None:
        self._fds = np.array(fds, np.int32)
        self._streams = GroupStreams(self._fds.ctypes.data, None, 0, rank, len(fds))

    @property
    def streams(self) -> int:
        """Return the address of the C struct."""
        return ctypes.addressof(self._streams)

    def __contains__(self, name: str) -> bool:
        """Return whether the buffer with this name is not this process's alone."""
        return False

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return new memory."""
        return aligned_empty(shape, dtype)


class DecoderGroup(NamedTuple):
    """The group that a decoder belongs to. Places are the first columns of all ranks, and the number of all columns."""

    memory: SharedMemory | SeparateMemory
    rank: int
    size: int
    own_attended: int  # columns of the rank's heads
    attended: Ints
    hidden: Ints
    gated: Ints
    vocabulary: Ints

    @property
    def arguments(self) -> GroupArguments:
        """Return the C struct."""
        places = [
            Place(one[self.rank], one[-1], one.ctypes.data)
            for one in (self.attended, self.hidden, self.gated, self.vocabulary)
        ]
        words = int(self.vocabulary[self.rank + 1] - self.vocabulary[self.rank])
        return GroupArguments(self.memory.state, self.memory.streams, self.rank, self.size, *places, words)
