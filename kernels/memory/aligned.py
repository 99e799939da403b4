"""New arrays that start at a cache line, so that no vector of their rows crosses two lines."""

import math

import numpy as np

from kernels.arrays import UInt8s
from kernels.elements import Dtype, Numbers

ALIGNMENT = 64  # bytes; a cache line, and the widest vector


def aligned_empty(shape: tuple[int, ...], dtype: Dtype) -> Numbers:
    """Return an uninitialised contiguous array at a multiple of 64 bytes. Errors: MemoryError."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _aligned(np.empty(num_bytes + ALIGNMENT, np.uint8), num_bytes).view(dtype).reshape(shape)


def aligned_zeros(shape: tuple[int, ...], dtype: Dtype) -> Numbers:
    """Return the same, with zeros. A large array is not touched for that: a page of it costs nothing until it is
    written, because new pages of the system hold zeros. Errors: MemoryError.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _aligned(np.zeros(num_bytes + ALIGNMENT, np.uint8), num_bytes).view(dtype).reshape(shape)


def _aligned(memory: UInt8s, num_bytes: int) -> UInt8s:
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes]
