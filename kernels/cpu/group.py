"""SharedMemory: the memory through which the ranks of a group exchange what they compute (kernels/cpu/group.h)."""

import math
import mmap
import os
from typing import NamedTuple

import numpy as np

from kernels.cpu.structs import GroupArguments, Place
from kernels.elements import Dtype, Numbers

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


class DecoderGroup(NamedTuple):
    """The group that a decoder belongs to. Places are (first column, columns of all ranks)."""

    memory: SharedMemory
    rank: int
    size: int
    own_attended: int  # columns of the rank's heads
    attended: tuple[int, int]
    hidden: tuple[int, int]
    gated: tuple[int, int]
    vocabulary: tuple[int, int]
    num_words: int  # of the rank's part of the vocabulary

    @property
    def arguments(self) -> GroupArguments:
        """Return the C struct."""
        places = (Place(*one) for one in (self.attended, self.hidden, self.gated, self.vocabulary))
        return GroupArguments(self.memory.state, self.rank, self.size, *places, self.num_words)
