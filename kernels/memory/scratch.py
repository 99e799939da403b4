"""Scratch: buffers that a kernel reuses, because fresh memory costs more than most work done in it."""

import math

from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty


class Scratch:
    """One buffer per name and dtype, grown to the largest requested size.

    A buffer's content is undefined. The same name returns the same memory again, so a buffer is for one kernel call at
    a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Dtype], Numbers] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Numbers:
        """Return a contiguous, uninitialised array of this shape."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            self._buffers[name, dtype] = buffer = aligned_empty((size,), dtype)
        return buffer[:size].reshape(shape)
