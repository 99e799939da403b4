"""quantize: packs a matrix of GGUF blocks for the C kernels in stored form (kernels/cpu/c/products/quantized.h)."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.arrays import UInt8s
from kernels.cpu.dequantize import cpu_dequantize, type_number
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.packed_weights import INT8, QUANTIZED, PackedWeights
from kernels.cpu.structs import BlockArguments, QuantizeArguments, QuantizedPartArguments
from kernels.dequantize import BLOCK_SIZES, FLOAT_CODES, PLAIN_TYPES
from kernels.elements import BFLOAT16, FLOAT32
from kernels.rounding import ceil_div

_PLAIN_PART = 64  # enum in quantized.h
_PANEL_COLUMNS = 32  # enum in gemm.h


#: Bits of a weight in a panel, of types for which it is not the file's, because scales are bytes there.
_BITS = {"Q3_K": 3.5625, "Q4_K": 4.625, "Q5_K": 5.625, "IQ4_XS": 4.3125, "TQ1_0": 2.0625}


def bits_in_memory(type_name: str) -> float:
    """Return the bits of a weight of this quantized type in a quantized PackedWeights. Errors: KeyError."""
    if type_name.startswith(("IQ1", "IQ2", "IQ3")):
        return 4.5625
    weights, num_bytes = BLOCK_SIZES[type_name]
    return _BITS.get(type_name, num_bytes * 8 / weights)


class BlockRows(NamedTuple):
    """Rows of a matrix that are all stored as one type of kernels.dequantize."""

    type_name: str
    data: UInt8s  # uint8 [rows, bytes per row], contiguous

    @property
    def depth(self) -> int:
        """Return the number of weights in a row."""
        weights, num_bytes = BLOCK_SIZES[self.type_name]
        row_bytes: int = self.data.shape[1]
        return row_bytes // num_bytes * weights


def quantize(
    library: CpuLibrary, parts: Sequence[BlockRows], *, is_gated: bool = False, in_8_bits: bool = False
) -> PackedWeights | None:
    """Pack the rows of all parts, one after the other, in stored form. is_gated: see PackedMatrix.

    Products with the result have the same bits as those with the dequantized matrix. in_8_bits: it is for products in
    8 bits, which have bits of their own, with any scales. None: most of the matrix would have to be dequantized,
    because its types are not quantized or mix within panels, or because its scales are not normal numbers. Errors:
    ValueError for rows of different depths, or that do not consist of whole blocks.
    """
    for part in parts:
        if part.data.shape[1] % BLOCK_SIZES[part.type_name][1] or part.depth != parts[0].depth:
            raise ValueError(
                f"rows of {part.data.shape[1]} bytes {part.type_name} are no rows of {parts[0].depth} numbers"
            )
    assert not in_8_bits or not any(part.type_name in FLOAT_CODES for part in parts), "in_q8_0() has changed these"
    if all(part.type_name in PLAIN_TYPES for part in parts):
        return None
    num_columns, depth = sum(len(part.data) for part in parts), parts[0].depth
    rows = (QuantizedPartArguments * len(parts))(*(_part_arguments(library, part) for part in parts))
    must_be_whole = np.zeros(ceil_div(num_columns, _PANEL_COLUMNS), np.uint8)
    arguments = QuantizeArguments(
        parts=ctypes.addressof(rows),
        must_be_whole=must_be_whole.ctypes.data,
        num_parts=len(parts),
        num_columns=num_columns,
        depth=depth,
        is_gated=is_gated,
        in_8_bits=in_8_bits,
    )
    pointer = ctypes.POINTER(QuantizeArguments)
    num_bytes = library.function("quantize_bytes", pointer, result=ctypes.c_int64)
    write = library.function("gemm_quantize", pointer, result=ctypes.c_int64)
    while wanted := num_bytes(arguments):
        packed = library.memory.allocate(wanted)
        arguments.packed = packed.ctypes.data
        if not write(arguments):  # otherwise some panels need more bytes
            has_whole_panels = (packed[: 16 * len(must_be_whole)].view("<i4")[2::4] < 0).any()
            packing = INT8 if in_8_bits else QUANTIZED
            return PackedWeights(
                packed, num_columns, depth, BFLOAT16, packing, is_gated, has_whole_panels=bool(has_whole_panels)
            )
    return None


def in_q8_0(library: CpuLibrary, part: BlockRows) -> BlockRows | None:
    """Return the rows as Q8_0: ones with integers as codes unchanged, others with the bits of llama.cpp's quantization.

    None: the depth is not a multiple of 32, or a scale would not be a finite float16.
    """
    if part.type_name in FLOAT_CODES:
        numbers = cpu_dequantize(library, part.data.reshape(-1), part.type_name, FLOAT32)
        part = BlockRows("F32", numbers.reshape(len(part.data), -1).view(np.uint8))
    plain = PLAIN_TYPES.get(part.type_name)
    if plain is None:
        return part
    weights, num_bytes = BLOCK_SIZES["Q8_0"]
    if part.depth % weights:
        return None
    blocks = np.empty((len(part.data), part.depth // weights * num_bytes), np.uint8)
    arguments = BlockArguments(
        numbers=part.data.ctypes.data,
        blocks=blocks.ctypes.data,
        num_blocks=blocks.size // num_bytes,
        dtype=ELEMENT_NUMBERS[plain],
    )
    num_failed = library.function("make_blocks", ctypes.POINTER(BlockArguments), result=ctypes.c_int64)(arguments)
    return None if num_failed else BlockRows("Q8_0", blocks)


def _part_arguments(library: CpuLibrary, part: BlockRows) -> QuantizedPartArguments:
    plain = PLAIN_TYPES.get(part.type_name)
    return QuantizedPartArguments(
        rows=part.data.ctypes.data,
        num_rows=part.data.shape[0],
        row_bytes=part.data.shape[1],
        type=type_number(library, part.type_name) if plain is None else _PLAIN_PART + ELEMENT_NUMBERS[plain],
    )
