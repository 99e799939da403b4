"""cap_logits: applies a soft cap to logits, with the C kernel (kernels/cpu/c/layers/soft_cap.h)."""

import ctypes

from kernels.arrays import Floats
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import SoftCapArguments


def cap_logits(library: CpuLibrary, logits: Floats, cap: float) -> None:
    """Replace each number of logits [n, vocab], float32 and contiguous, by cap * tanh(number / cap)."""
    assert logits.flags.c_contiguous, logits.strides
    run = library.function("soft_cap", ctypes.POINTER(SoftCapArguments))
    run(SoftCapArguments(logits.ctypes.data, *logits.shape, cap))
