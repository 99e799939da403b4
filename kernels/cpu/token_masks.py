"""CpuTokenMasks: applies masks of allowed tokens to logits with the C kernel (kernels/cpu/c/sampling/token_masks.h)."""

import ctypes

from kernels.arrays import Floats, Ints, UInt32s
from kernels.cpu.library import CpuLibrary

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class CpuTokenMasks:
    """Sets the logits of tokens that are not allowed to -inf. The others keep their bits."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.function("mask_logits", _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64)

    def __call__(self, logits: Floats, rows: Ints, masks: UInt32s) -> None:
        """Apply masks[i] to the row rows[i] of logits [S, V] float32, contiguous, in place.

        masks [n, words], contiguous: bit i of word w allows token 32 * w + i. Tokens beyond the last word are
        forbidden.
        """
        assert logits.flags.c_contiguous, logits.strides
        assert masks.flags.c_contiguous, masks.strides
        num_masks, num_words = masks.shape
        self._run(logits.ctypes.data, logits.shape[1], rows.ctypes.data, masks.ctypes.data, num_words, num_masks)
