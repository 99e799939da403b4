"""CpuSampler: tokens drawn from rows of logits by the C kernel (kernels/cpu/sampling.h)."""

import ctypes

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
    """Draws as core/sampler.py does from torch's operations. The weights of the two differ in their last bits, so a token
    may differ where a draw falls between two tokens within about 1e-7; each by itself is deterministic."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.function("sample", ctypes.POINTER(SamplingArguments))
        self._scratch_bytes = library.function("sampling_scratch_bytes", ctypes.c_int64, result=ctypes.c_int64)
        self._num_threads = library.function("pool_num_threads", result=ctypes.c_int)
        self._scratch = Scratch()

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.uint64],
        position: NDArray[np.int64],
        choice: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """logits [S, V] float32 contiguous, columns [S] -> token ids [S]; -1 where a row's largest logit over its
        temperature is no finite number."""
        assert logits.is_contiguous(), logits.stride()
        num_rows, vocab_size = logits.shape
        tokens = np.empty(num_rows, np.int32)
        given = (temperature, top_k, top_p, min_p, seed, position, choice)
        columns = [np.ascontiguousarray(column, to) for column, to in zip(given, _TYPES, strict=True)]
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
