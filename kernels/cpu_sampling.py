"""CpuSampler: tokens drawn from rows of logits by the C kernel (kernels/cpu/sampling.h)."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu_library import CpuLibrary
from kernels.scratch import Scratch

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "choice")
_TYPES = (np.float32, np.int64, np.float32, np.float32, np.uint64, np.int64, np.int64)


class SamplingArguments(ctypes.Structure):
    """struct Sampling."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", *_COLUMNS, "tokens", "scratch")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size")),
    )


class CpuSampler:
    """Draws as core/sampler.py does by torch's operations. Weights of the two differ in their last bits, so a token may
    differ where a draw falls within about 1e-7 of the border between two tokens; each by itself is deterministic."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.function("sample", ctypes.POINTER(SamplingArguments))
        self._scratch_bytes = library.function("sampling_scratch_bytes", ctypes.c_int64, result=ctypes.c_int64)
        self._num_threads = library.function("pool_num_threads", result=ctypes.c_int)
        self._scratch = Scratch()

    def __call__(self, logits: torch.Tensor, columns: tuple[NDArray[Any], ...]) -> NDArray[np.int32]:
        """logits [S, V] float32 contiguous, columns [S]: temperature, top_k, top_p, min_p, seed, position, choice ->
        token ids [S]; -1 where a row's largest logit over its temperature is no finite number."""
        assert logits.is_contiguous(), logits.stride()
        num_rows, vocab_size = logits.shape
        tokens = np.empty(num_rows, np.int32)
        columns = tuple(np.ascontiguousarray(column, to) for column, to in zip(columns, _TYPES, strict=True))
        size = self._scratch_bytes(vocab_size) * self._num_threads() + 64
        scratch = self._scratch.get("scratch", (size,), torch.uint8)
        self._run(
            SamplingArguments(
                logits.data_ptr(),
                *(column.ctypes.data for column in columns),
                tokens.ctypes.data,
                -(-scratch.data_ptr() // 64) * 64,
                num_rows,
                vocab_size,
            )
        )
        return tokens
