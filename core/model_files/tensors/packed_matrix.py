"""Packed matrices in quantized safetensors folders: turns codes and scales in several tensors into one matrix.

A weight is scale * (code - zero). core/model_files/tensors/packed_layout.py lists the tensors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.model_files.tensors.packed_codes import Codes, read_codes
from core.model_files.tensors.packed_layout import Shape
from core.models.config import Packing
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from ipc.tables.arrays import Floats, UInt8s
from kernels.dequantize import BLOCK_SIZES, E4M3, FLOAT_LEVELS
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Dtype, rounded

#: dtype in safetensors files -> dtype of the array. F8_E4M3's bits are read as uint8, BF16's as uint16.
ELEMENT_DTYPES: dict[str, Dtype] = {
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    "F32": FLOAT32,
}
_BLOCK, _WIDE_BLOCK = 32, 64  # weights per block in kernels.dequantize; with a float32 for each
_NAN_OF_E4M3 = 0x7F  # larger bytes have a sign
#: Codes that the block types can hold -> the type. Their weights are scale * code, with codes from low to high.
_BLOCK_TYPES = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))
_CHUNK = 1 << 20  # weights converted at a time


def unpack(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing, dtype: Dtype) -> StoredMatrix:
    """Return the matrix [out, in] as blocks of kernels.dequantize if they hold the same weights, else dense in dtype.

    tensors: kind -> contents, already checked by fault_of(). Blocks are possible if all weights of a block share one
    scale, which is a float16, and if the codes minus their zeros have at most 8 bits. Dense weights are computed in
    float32 and rounded once. Errors: those of read_codes().
    """
    if packing == "mxfp4":
        return StoredMatrix([_as_mxfp4(tensors["exponents"], tensors["blocks"])])
    if "weight_packed" in tensors and tensors["weight_packed"].dtype == np.uint8 and len(tensors) == 2:
        exponents = tensors["weight_scale"]
        return StoredMatrix([_as_mxfp4(exponents, tensors["weight_packed"].reshape(*exponents.shape, -1))])
    if "weight_global_scale" in tensors and (part := _as_nvfp4(tensors, shape)) is not None:
        return StoredMatrix([part])
    codes = read_codes(tensors, shape, packing)
    part = _as_blocks(codes)
    return StoredMatrix([part]) if part is not None else StoredMatrix.of(_dense(codes, dtype))


def _as_blocks(matrix: Codes) -> StoredPart | None:
    """Return the matrix as blocks of 32 weights with a float16 scale, or 64; None if that would change weights."""
    if matrix.minima is not None or matrix.unit is not None:
        return None
    if matrix.values is not None:
        return _as_wide_blocks(matrix, matrix.values)
    codes, scales = matrix.codes, matrix.scales
    groups = _groups_of_blocks(matrix, _BLOCK)
    if groups is None:
        return None
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    low, high = int(codes.min()), int(codes.max())
    name = next((name for name, least, most in _BLOCK_TYPES if least <= low and high <= most), None)
    if name is None or not np.array_equal(halves.astype(np.float32), scales):
        return None
    scale_bytes = np.ascontiguousarray(halves[:, groups]).view(np.uint8)
    parts = [scale_bytes.reshape(len(codes), -1, 2), *_code_bytes(codes.reshape(len(codes), -1, _BLOCK), name)]
    return StoredPart(name, np.concatenate(parts, axis=2).reshape(len(codes), -1), codes.shape[1])


def _groups_of_blocks(matrix: Codes, size: int) -> NDArray[np.intp] | None:
    """Return the group of each block of `size` columns; None if some block has columns of several groups."""
    if len(matrix.group_of) % size:
        return None
    blocks = matrix.group_of.reshape(-1, size)
    groups: NDArray[np.intp] = blocks[:, 0]
    return None if (blocks != blocks[:, :1]).any() else groups


def _as_wide_blocks(matrix: Codes, values: Floats) -> StoredPart | None:
    """Return a matrix whose codes stand for floats as blocks of 64 with a float32 scale: FP8 or bitsandbytes'."""
    kinds = {"FP8": E4M3, **{name: np.array(levels, np.float32) for name, levels in FLOAT_LEVELS.items()}}
    name = next((name for name, wanted in kinds.items() if np.array_equal(values, wanted, equal_nan=True)), None)
    groups = _groups_of_blocks(matrix, _WIDE_BLOCK)
    if name is None or groups is None:
        return None
    rows, columns = matrix.codes.shape
    blocks = np.empty((rows, columns // _WIDE_BLOCK, BLOCK_SIZES[name][1]), np.uint8)
    blocks[:, :, :4] = np.ascontiguousarray(matrix.scales[:, groups], "<f4").view(np.uint8).reshape(rows, -1, 4)
    codes = matrix.codes if name == "FP8" else matrix.codes[:, 0::2] << np.uint8(4) | matrix.codes[:, 1::2]
    blocks[:, :, 4:] = codes.reshape(rows, columns // _WIDE_BLOCK, -1)
    return StoredPart(name, blocks.reshape(rows, -1), columns)


def _as_nvfp4(tensors: Mapping[str, NDArray[Any]], shape: Shape) -> StoredPart | None:
    """Return compressed-tensors' NVFP4 as blocks; None if its scales have signs or NaN, or its columns do not fit."""
    (rows, columns), scales = shape, tensors["weight_scale"]
    if columns % _WIDE_BLOCK or (scales >= _NAN_OF_E4M3).any():
        return None
    blocks = np.empty((rows, columns // _WIDE_BLOCK, BLOCK_SIZES["NVFP4_F32"][1]), np.uint8)
    blocks[:, :, :4] = tensors["weight_global_scale"].view(np.uint8)
    blocks[:, :, 4:8] = scales.reshape(rows, -1, 4)
    blocks[:, :, 8:] = tensors["weight_packed"].reshape(rows, columns // _WIDE_BLOCK, -1)
    return StoredPart("NVFP4_F32", blocks.reshape(rows, -1), columns)


def _as_mxfp4(exponents: UInt8s, codes: UInt8s) -> StoredPart:
    """Return the blocks of MXFP4, which have weights i and i + 16 in a byte.

    exponents: uint8 [rows, blocks]. codes: [rows, blocks, 16], of neighbours, the first in the low half.
    """
    rows, blocks = exponents.shape
    single = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), -1).reshape(rows, blocks, _BLOCK)
    apart = single[:, :, :16] | single[:, :, 16:] << np.uint8(4)
    return StoredPart("MXFP4", np.concatenate((exponents[:, :, None], apart), 2).reshape(rows, -1), blocks * _BLOCK)


def _code_bytes(codes: NDArray[np.int16], name: str) -> list[UInt8s]:
    """Return the bytes of blocks [out, blocks, 32] after their scale, as specified in kernels/dequantize.py."""
    if name == "Q8_0":
        return [codes.astype(np.int8).view(np.uint8)]
    shifted = (codes + (8 if name == "Q4_0" else 16)).astype(np.uint8)
    low = shifted & np.uint8(15)
    nibbles: UInt8s = low[..., :16] | low[..., 16:] << np.uint8(4)
    return [nibbles] if name == "Q4_0" else [np.packbits(shifted >> 4, axis=2, bitorder="little"), nibbles]


def _dense(matrix: Codes, dtype: Dtype) -> NDArray[Any]:
    """Return the weights [out, in] in dtype."""
    weights = np.empty(matrix.codes.shape, dtype)
    step = max(1, _CHUNK // matrix.codes.shape[1])
    for begin in range(0, len(weights), step):
        rows = slice(begin, begin + step)
        weights[rows] = rounded(matrix.numbers(rows), dtype)
    return weights
