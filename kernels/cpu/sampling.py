"""CpuSampler: draws tokens from rows of logits with the C kernel (kernels/cpu/c/sampling/sampling.h)."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arrays import Floats, Int32s
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import SamplingArguments
from kernels.cpu.token_masks import CpuTokenMasks
from kernels.memory.aligned import ALIGNMENT, aligned_empty

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "choice")
#: Used for the index of a largest logit that is unknown.
UNKNOWN = -2
_TYPES = (np.float32, np.int64, np.float32, np.float32, np.uint64, np.int64, np.int64)


class CpuSampler:
    """Draws tokens like core/sampling/sampler.py does with NumPy.

    The weights of the two differ in their last bits. So a token may differ if a draw falls within about 1e-7 of the
    border between two tokens. Each is deterministic by itself.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self.token_masks = CpuTokenMasks(library)
        self._run = library.function("sample", ctypes.POINTER(SamplingArguments))
        self._scratch_bytes = library.function("sampling_scratch_bytes", ctypes.c_int64, result=ctypes.c_int64)
        self._num_threads = library.function("pool_num_threads", result=ctypes.c_int)
        self._arguments = SamplingArguments()
        self._columns: list[NDArray[Any]] = []  # of _COLUMNS, each as long as _tokens
        self._tokens = np.zeros(0, np.int32)
        self._room: tuple[int, ...] = ()  # vocabulary size and number of threads for which the scratch was allocated
        self._logits: Floats | None = None  # the arguments point to these

    def __call__(self, logits: Floats, columns: tuple[NDArray[Any], ...], largest: Int32s | None = None) -> Int32s:
        """Return a sampled token id [S] for each row; -1 if a row's largest logit / temperature is not finite.

        logits are [S, V] float32, contiguous. The columns [S] are temperature, top_k, top_p, min_p, seed, position and
        choice. `largest` [S] is largest() of these logits, if it is known, or UNKNOWN for some.
        """
        num_rows = self._point_to(logits)
        if (room := (self._arguments.vocab_size, self._num_threads())) != self._room:
            num_bytes = self._scratch_bytes(room[0]) * room[1] + ALIGNMENT
            self._scratch = aligned_empty((num_bytes,), np.dtype(np.uint8))
            self._arguments.scratch = self._scratch.ctypes.data
            self._room = room
        for buffer, column in zip(self._columns, columns, strict=True):
            buffer[:num_rows] = column
        self._arguments.temperature = self._columns[0].ctypes.data
        self._arguments.largest = None if largest is None else largest.ctypes.data
        self._run(self._arguments)
        return self._tokens[:num_rows].copy()

    def largest(self, logits: Floats) -> Int32s:
        """Return the index [S] of each row's largest logit, the first on a tie; -1 if that logit is not finite."""
        num_rows = self._point_to(logits)
        self._arguments.temperature = self._arguments.largest = None
        self._run(self._arguments)
        return self._tokens[:num_rows].copy()

    def _point_to(self, logits: Floats) -> int:
        """Point the arguments to these logits, and return the number of rows. A repeated array is not read again."""
        arguments = self._arguments
        if logits is not self._logits:
            assert logits.flags.c_contiguous, logits.strides
            arguments.num_rows, arguments.vocab_size = logits.shape
            arguments.logits, self._logits = logits.ctypes.data, logits
        num_rows: int = arguments.num_rows
        if num_rows > len(self._tokens):
            self._grow(1 << (num_rows - 1).bit_length())
        return num_rows

    def _grow(self, num_rows: int) -> None:
        self._tokens = np.zeros(num_rows, np.int32)
        self._columns = [np.zeros(num_rows, to) for to in _TYPES]
        for name, buffer in zip((*_COLUMNS, "tokens"), (*self._columns, self._tokens), strict=True):
            setattr(self._arguments, name, buffer.ctypes.data)
