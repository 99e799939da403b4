"""CpuGatedActivation: f(gate) * up by the C kernel (kernels/cpu/activation.h)."""

import ctypes

import torch

from kernels.cpu_library import ELEMENT_TYPES, CpuLibrary

#: enum in activation.h, by transformers' names.
FUNCTIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


class ActivationArguments(ctypes.Structure):
    """struct Activation."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width")),
        *((name, ctypes.c_int32) for name in ("dtype", "function")),
    )


class CpuGatedActivation:
    """float32 inside, rounded once."""

    def __init__(self, library: CpuLibrary, function: str) -> None:
        self._function = FUNCTIONS[function]
        self._run = library.function("activation", ctypes.POINTER(ActivationArguments))

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] contiguous -> [T, I], the same dtype."""
        assert gate_up.is_contiguous(), gate_up.stride()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=gate_up.dtype)
        dtype = ELEMENT_TYPES[gate_up.dtype]
        self._run(ActivationArguments(gate_up.data_ptr(), out.data_ptr(), num_rows, width, dtype, self._function))
        return out
