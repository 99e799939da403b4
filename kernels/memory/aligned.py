"""aligned_empty: new arrays that start at a cache line, so that no vector of their rows crosses two lines."""

import math

import numpy as np

from kernels.elements import Dtype, Numbers

ALIGNMENT = 64  # bytes; a cache line, and the widest vector


def aligned_empty(shape: tuple[int, ...], dtype: Dtype) -> Numbers:
    """Return an uninitialised contiguous array at a multiple of 64 bytes. Errors: MemoryError."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)
