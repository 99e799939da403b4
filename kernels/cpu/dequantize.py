"""cpu_dequantize: GGUF blocks to float32 or bfloat16 by the C kernel (c/blocks/dequantize.h), on all threads."""

import ctypes

import numpy as np

from kernels.arrays import UInt8s
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.structs import DequantizeArguments
from kernels.dequantize import BLOCK_SIZES
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers

#: Type numbers; enum in block_types.h.
_NAMES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ2_0", "TQ1_0"),
    *("FP8", "NF4", "BNB_FP4", "NVFP4_F32"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"),  # those with a grid
)
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


def type_number(library: CpuLibrary, type_name: str) -> int:
    """Return the number that the kernels know a type of blocks by. Errors: KeyError."""
    number = _NUMBERS[type_name]
    if number >= _NUMBERS["IQ2_XXS"]:
        library.use_grids()
    return number


def has_cpu_kernel(type_name: str, dtype: Dtype) -> bool:
    """Whether cpu_dequantize() converts this type to this dtype. Plain floats are converted by kernels/elements.py."""
    return type_name in _NUMBERS and dtype in (FLOAT32, BFLOAT16)


def cpu_dequantize(
    library: CpuLibrary, data: UInt8s, type_name: str, dtype: Dtype, out: Numbers | None = None
) -> Numbers:
    """Return the blocks' weights [n] with dtype: the same bits as rounded(dequantize(data, type_name), dtype).

    `data` is contiguous uint8 [n / weights in a block * bytes of a block]. `out` is contiguous, has n numbers of dtype
    and receives the result; None = new memory. Errors: KeyError for a type without a kernel; ValueError for a size that
    is not a whole number of blocks.
    """
    weights, block_bytes = BLOCK_SIZES[type_name]
    blocks = data.reshape(-1, block_bytes)
    if out is None:
        out = np.empty(len(blocks) * weights, dtype)
    assert (out.size, out.dtype, out.flags.c_contiguous) == (len(blocks) * weights, dtype, True), out.shape
    run = library.function("dequantize", ctypes.POINTER(DequantizeArguments))
    number = type_number(library, type_name)
    run(DequantizeArguments(blocks.ctypes.data, out.ctypes.data, len(blocks), number, ELEMENT_NUMBERS[dtype]))
    return out
