"""open_gates: applies the gate of attention's output, with the C kernel (kernels/cpu/c/layers/output_gate.h)."""

import ctypes

from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.mixer_structs import OutputGateArguments
from kernels.elements import Numbers


def open_gates(library: CpuLibrary, mixed: Numbers, gates: Numbers) -> None:
    """Multiply mixed [T, width] by the sigmoid of gates [T, width], or [T, heads], in place.

    Both are of one dtype and contiguous."""
    assert mixed.shape[1] % gates.shape[1] == 0, (mixed.shape, gates.shape)
    assert mixed.flags.c_contiguous, mixed.strides
    assert gates.flags.c_contiguous, gates.strides
    group = mixed.shape[1] // gates.shape[1]
    run = library.function("output_gate", ctypes.POINTER(OutputGateArguments))
    run(OutputGateArguments(mixed.ctypes.data, gates.ctypes.data, *mixed.shape, ELEMENT_NUMBERS[mixed.dtype], group))
