"""The buffers through which the ranks of a group exchange results (c/threads/group.h): shared, or over streams."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.arrays import Bools, Floats, Ints
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import GatherArguments, GroupArguments, GroupStreams, Place, Ranks
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
        *("logits", "largest", "asked", "tail_picked", "even", "odd"),
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


class HostGroup:
    """The exchanges of a rank whose operations run one by one. All ranks call the same methods in the same order."""

    def __init__(self, library: CpuLibrary, memory: SharedMemory | SeparateMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._gather_rows = library.function("group_gather_rows", ctypes.POINTER(GatherArguments))
        #: Of two exchanges that follow each other: when a rank writes to one again, all have read it.
        self._buffers = {"even": np.zeros(0, np.uint8), "odd": np.zeros(0, np.uint8)}
        self._next = "even"

    def gather(self, part: Numbers, widths: Sequence[int]) -> Numbers:
        """Return the columns of all ranks, rank after rank [T, sum(widths)]. part [T, own width]: this rank's.

        widths: of each rank's columns.
        """
        bounds = np.concatenate(([0], np.cumsum(widths)))
        shape = len(part), int(bounds[-1])
        if not math.prod(shape):
            return np.empty(shape, part.dtype)
        name, self._next = self._next, "odd" if self._next == "even" else "even"
        every = self._buffer(name, math.prod(shape) * part.itemsize).view(part.dtype).reshape(shape)
        every[:, bounds[self._rank] : bounds[self._rank + 1]] = part
        ranks = Ranks(self._memory.state, self._memory.streams, self._rank, self._size)
        place = Place(bounds[self._rank], bounds[-1], bounds.ctypes.data)
        self._gather_rows(GatherArguments(ranks, place, every.ctypes.data, len(part), part.itemsize))
        return every.copy()

    def _buffer(self, name: str, num_bytes: int) -> Numbers:
        if len(self._buffers[name]) < num_bytes:
            self._buffers[name] = self._memory.reserve(name, (1 << (num_bytes - 1).bit_length(),), np.dtype(np.uint8))
        return self._buffers[name][:num_bytes]

    def join_rows(self, rows: Floats, elsewhere: Bools) -> Floats:
        """Return rows [T, d] float32 of which each is one rank's. elsewhere [T]: which are not this one's.

        The bits are added as integers, to which all ranks but one give zeros.
        """
        width = rows.shape[1]
        rows[elsewhere] = 0.0
        words = self.gather(rows, [width] * self._size).view(np.int32).reshape(len(rows), self._size, width)
        joined: Floats = words.sum(1, dtype=np.int32).view(np.float32)
        return joined


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
