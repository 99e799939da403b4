"""Elementwise C kernels: a soft cap on logits, and the gate of attention's output (c/layers/)."""

import ctypes

from kernels.arrays import Floats
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.mixer_structs import OutputGateArguments
from kernels.cpu.structs import SoftCapArguments
from kernels.elements import Numbers


def cap_logits(library: CpuLibrary, logits: Floats, cap: float) -> None:
    """Replace each number of logits [n, vocab], float32 and contiguous, by cap * tanh(number / cap)."""
    assert logits.flags.c_contiguous, logits.strides
    run = library.function("soft_cap", ctypes.POINTER(SoftCapArguments))
    run(SoftCapArguments(logits.ctypes.data, *logits.shape, cap))


def open_gates(library: CpuLibrary, mixed: Numbers, gates: Numbers) -> None:
    """Multiply mixed [T, width] by the sigmoid of gates [T, width], or [T, heads], in place.

    Both are of one dtype and contiguous."""
    assert mixed.shape[1] % gates.shape[1] == 0, (mixed.shape, gates.shape)
    assert mixed.flags.c_contiguous, mixed.strides
    assert gates.flags.c_contiguous, gates.strides
    group = mixed.shape[1] // gates.shape[1]
    run = library.function("output_gate", ctypes.POINTER(OutputGateArguments))
    run(OutputGateArguments(mixed.ctypes.data, gates.ctypes.data, *mixed.shape, ELEMENT_NUMBERS[mixed.dtype], group))
