"""The buffers through which the ranks of a group exchange results (c/threads/group.h): shared, or over streams."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.arrays import Ints
from kernels.cpu.structs import GroupArguments, GroupStreams, Place, Ranks
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty

STATE_BYTES = 4096  # enum in group.h
#: Bytes in the file between the starts of two buffers. The file is sparse: only written pages take memory.
_APART = 1 << 38


class SharedMemory:
    """Named buffers in a memory file that several processes have opened, with the same names in all of them.

    fd: of a file created by make_shared_file(); it is not closed here.
    """

    _NAMES = (
        *("embedded", "attended", "recurred", "gated", "expert_gated", "shared_gated", "added"),
        *("logits", "largest", "asked", "tail_picked"),
    )

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._state = np.frombuffer(mmap.mmap(fd, STATE_BYTES), np.uint8)

    streams = 0  # there are none

    @property
    def state(self) -> int:
        """Return the address of the state for group_wait()."""
        return int(self._state.ctypes.data)

    def __contains__(self, name: str) -> bool:
        """Return whether the ranks share the buffer with this name."""
        return name in self._NAMES

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return the buffer, at least as large as before. Its content is kept. It starts at a page boundary."""
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        assert num_bytes <= _APART, f"{name}: {num_bytes} bytes, but there is only room for {_APART}"
        memory = mmap.mmap(self._fd, num_bytes, offset=(1 + self._NAMES.index(name)) * _APART)
        return np.frombuffer(memory, np.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def make_shared_file() -> int:
    """Return the descriptor of a new memory file for the ranks of a group. It uses memory only for written pages."""
    fd = os.memfd_create("engine-core-group", os.MFD_CLOEXEC)
    os.ftruncate(fd, (1 + len(SharedMemory._NAMES)) * _APART)
    return fd


class SeparateMemory:
    """The buffers of a rank whose group is on several machines. The others' results arrive over streams.

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
        """Return whether the buffer with this name is exchanged with other ranks."""
        return False

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return new memory."""
        return aligned_empty(shape, dtype)


class RecurrencePlaces(NamedTuple):
    """How ranks share the results of recurrences, as in DecoderGroup."""

    num_turns: int  # parts of a row
    norm_size: int  # numbers that have one norm, which is common to ranks; 0: norms are of heads


class DecoderGroup(NamedTuple):
    """The group that a decoder belongs to.

    Places are the first columns of all ranks, and the total number of columns. Those of layers are by layer.
    """

    memory: SharedMemory | SeparateMemory
    rank: int
    size: int
    own_attended: int  # the most columns of a layer's attention that the rank needs
    attended: Sequence[Ints]  # of heads; of a recurrence, of a part of a row
    hidden: Ints
    gated: Sequence[Ints]
    vocabulary: Ints
    expert_gated: Ints  # of each routed expert
    shared_gated: Ints  # of the shared expert
    recurrences: RecurrencePlaces | None = None

    def place(self, bounds: Ints) -> Place:
        """Return the C struct of places, which points into them."""
        return Place(bounds[self.rank], bounds[-1], bounds.ctypes.data)

    @property
    def arguments(self) -> GroupArguments:
        """Return the C struct."""
        recurrences = self.recurrences
        places = map(self.place, (self.hidden, self.vocabulary, self.expert_gated, self.shared_gated))
        words = int(self.vocabulary[self.rank + 1] - self.vocabulary[self.rank])
        ranks = Ranks(self.memory.state, self.memory.streams, self.rank, self.size)
        arguments = GroupArguments(ranks, *places, words)
        if recurrences is not None:
            arguments.num_turns, arguments.norm_size = recurrences.num_turns, recurrences.norm_size
        return arguments
