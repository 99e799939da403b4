"""cpu_dequantize: GGUF blocks to float32 or bfloat16 by the C kernel (kernels/cpu/dequantize.h), on all threads."""

import ctypes

import torch

from kernels.cpu.library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu.structs import DequantizeArguments
from kernels.torch.dequantize import BLOCK_SIZES

#: Type numbers; enum in dequantize.h.
_TYPES = {name: index for index, name in enumerate(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"))}


def has_cpu_kernel(type_name: str, dtype: torch.dtype) -> bool:
    """Whether cpu_dequantize() converts this type to this dtype. Plain floats are converted by torch instead."""
    return type_name in _TYPES and dtype in (torch.float32, torch.bfloat16)


def cpu_dequantize(
    library: CpuLibrary, data: torch.Tensor, type_name: str, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the blocks' weights [n] of dtype: the bits of dequantize(data, type_name).to(dtype).

    `data` is contiguous uint8 [n / weights in a block * bytes of a block]. `out` is contiguous, has n numbers of dtype
    and receives the result; None = new memory. Errors: KeyError for a type without a kernel; RuntimeError for a size
    that is not a whole number of blocks.
    """
    weights, block_bytes = BLOCK_SIZES[type_name]
    blocks = data.view(-1, block_bytes)
    if out is None:
        out = torch.empty(len(blocks) * weights, dtype=dtype)
    assert (out.numel(), out.dtype, out.is_contiguous()) == (len(blocks) * weights, dtype, True), out.shape
    run = library.function("dequantize", ctypes.POINTER(DequantizeArguments))
    run(DequantizeArguments(blocks.data_ptr(), out.data_ptr(), len(blocks), _TYPES[type_name], ELEMENT_TYPES[dtype]))
    return out
