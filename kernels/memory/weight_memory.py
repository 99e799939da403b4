"""WeightMemory: memory for packed weights, from the system, or from weights that are gone."""

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np

from kernels.arrays import UInt8s
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import ALIGNMENT
from kernels.memory.huge_pages import take_pages
from kernels.rounding import round_up

#: Allocations of fewer bytes than _OWN_BYTES share mappings. What the last of them leaves of a mapping is not touched,
#: apart from the rest of a huge page: few large mappings leave few rests.
_OWN_BYTES, _CHUNK_BYTES = 32 << 20, 512 << 20
#: Bytes of a huge page, which the system clears in one piece: in 0.2 to 4 ms, the latter in a virtual machine whose
#: host has to find one first.
_PIECE = 2 << 20
_ROOM_SHARE = 16


class Room:
    """Memory that arrays take one after the other."""

    def __init__(self, memory: UInt8s | None = None) -> None:
        self._rest = np.zeros(0, np.uint8) if memory is None else memory

    def take(self, num_bytes: int) -> UInt8s | None:
        """Return bytes [num_bytes], 64-byte aligned as the first one's are; None: there are not so many."""
        if num_bytes > len(self._rest):
            return None
        taken, end = self._rest[:num_bytes], round_up(num_bytes, ALIGNMENT)
        self._rest = self._rest[end:]
        return taken


class WeightMemory:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = Room()  # the rest of a mapping that arrays share
        self._is_whole = False  # it is for all data that follow, of whatever size
        self._keeps = False
        self._kept: list[mmap.mmap] = []  # of data that is gone
        self._brief: list[mmap.mmap] = []  # of arrays for a moment
        self._ahead: UInt8s | None = None  # for the next weights; its first _num_taken bytes have pages
        self._num_taken = 0

    def keep(self, keeps: bool) -> None:
        """Keep the memory of data that is gone for the next data from now on, or release it, as usual.

        Clearing new pages takes as long as packing weights into them. Until kept memory is used again, the system may
        take its pages back.
        """
        with self._lock:
            if keeps and self._keeps:
                return  # data that are being made may share a mapping
            self._end_chunk()
            self._keeps = keeps
            if not keeps:
                self._kept, self._brief, self._ahead = [], [], None

    @contextlib.contextmanager
    def together(self, num_bytes: int) -> Iterator[Room]:
        """Put the data that are made in this context into one mapping, so that later weights find it as a whole.

        num_bytes: about so many. Their pages are taken by another thread, ahead of the one that packs. Yield the
        mapping's room, for data of these weights that are made later; see allocate().
        """
        with self._lock:
            self._end_chunk()
            room = Room(self._next_mapping(num_bytes))
            self._chunk, self._is_whole = room, True
        is_over = threading.Event()

        def take() -> None:
            while not is_over.is_set() and self.take_ahead(num_bytes):
                pass

        thread = threading.Thread(target=take, name="weights-memory", daemon=True)
        thread.start()
        try:
            yield room
        finally:
            is_over.set()
            thread.join()
            with self._lock:
                self._end_chunk()
                self._ahead = None

    def take_ahead(self, num_bytes: int) -> bool:
        """Make the system assign the next piece of the memory that together() will use for num_bytes.

        Return whether there is more to take. There is none if memory of weights that are gone is kept, or after a
        piece that the system does not have: then it may take back the earlier ones.
        """
        with self._lock:
            if self._ahead is None and (not self._keeps or any(len(one) >= num_bytes for one in self._kept)):
                return False
            try:
                ahead, begin = self._next_mapping(num_bytes), self._num_taken
            except OSError:  # there is none; the update will say so
                return False
            self._num_taken = end = min(begin + _PIECE, num_bytes)
        has_more = take_pages(ahead, begin, end) and end < num_bytes
        if not has_more:
            with self._lock:
                self._ahead = None  # then it is kept like that of weights that are gone, unless they are being packed
        return has_more

    def _next_mapping(self, num_bytes: int) -> UInt8s:
        """Return the mapping for the next weights. A new one has some room, because packed sizes vary a little."""
        if self._ahead is None or len(self._ahead) < num_bytes:
            if not any(len(one) >= num_bytes for one in self._kept):
                self._kept.clear()  # the pages of smaller ones are the new one's, and are cleared faster than others
                num_bytes += num_bytes // _ROOM_SHARE
            self._ahead, self._num_taken = self._map(num_bytes, self._kept), 0
        return self._ahead

    def allocate(self, num_bytes: int, room: Room | None = None) -> UInt8s:
        """Return bytes [num_bytes] uint8 of any content, 64-byte aligned, for data that is read repeatedly.

        They are in huge pages if the system has them (33 GB/s from memory instead of 21). Small allocations share a
        mapping, which is released with the last of them. Several threads may pack weights. room: used if it has enough.
        """
        is_small = num_bytes < _OWN_BYTES
        with self._lock:
            taken = None if room is None else room.take(num_bytes)
            if taken is None and (is_small or self._is_whole):
                taken = self._chunk.take(num_bytes)
            if taken is None and is_small:
                self._chunk, self._is_whole = Room(self._map(_CHUNK_BYTES, self._kept)), False
                taken = self._chunk.take(num_bytes)
            return self._map(num_bytes, self._kept)[:num_bytes] if taken is None else taken

    def brief(self, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return an uninitialised array for numbers that are packed soon: in kept memory, if memory is kept."""
        if not self._keeps:
            return np.empty(shape, dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if not any(len(one) >= num_bytes for one in self._brief):
                self._brief.clear()  # smaller ones are of no use then
            return self._map(num_bytes, self._brief)[:num_bytes].view(dtype).reshape(shape)

    def _end_chunk(self) -> None:
        """Begin no more arrays in the present mapping: the next weights would hold that of these."""
        self._chunk, self._is_whole = Room(), False

    def _map(self, num_bytes: int, kept: list[mmap.mmap]) -> UInt8s:
        """Return a mapping of at least so many bytes: the smallest such in the list, or a new one."""
        mapping = min((one for one in kept if len(one) >= num_bytes), key=len, default=None)
        if mapping is not None:
            kept.remove(mapping)
        else:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # an operating system without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        chunk = np.frombuffer(mapping, np.uint8)
        # weakly: what the callback held would hold this object, and with it the mapping that its room is in
        take_back = partial(_take_back, weakref.ref(self), mapping, is_brief=kept is self._brief)
        weakref.finalize(chunk, take_back).atexit = False
        return chunk

    def take_back(self, mapping: mmap.mmap, is_brief: bool) -> None:
        """Take a mapping of which no array is left, in whatever thread the last one has gone."""
        kept = self._brief if is_brief else self._kept  # first: keep() may put others in their place at any time
        if self._keeps:
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_FREE)
            kept.append(mapping)


def _take_back(memory: weakref.ref[WeightMemory], mapping: mmap.mmap, *, is_brief: bool) -> None:
    if (own := memory()) is not None:
        own.take_back(mapping, is_brief)
