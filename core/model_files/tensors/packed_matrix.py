"""Packed matrices in quantized safetensors folders: turns codes and scales in several tensors into one matrix.

A weight is scale * (code - zero). core/model_files/tensors/packed_layout.py lists the tensors.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.model_files.tensors.packed_layout import BLOCK_ROWS, Shape, bits_of
from core.models.config import Packing
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from ipc.tables.arrays import Floats, UInt8s
from ipc.tables.rounding import ceil_div, round_up
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Dtype, rounded, to_floats

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
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each four bits of a word, starting at its low end
_WORD_BITS = 32
_BLOCK = 32  # weights per block in kernels.dequantize
#: Codes that the block types can hold -> the type. Their weights are scale * code, with codes from low to high.
_BLOCK_TYPES = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))
_CHUNK = 1 << 20  # weights converted at a time


class Codes(NamedTuple):
    """A matrix as codes: weight [o, i] is scales[o, group_of[i]] * codes[o, i]."""

    codes: NDArray[Any]  # int16 or float32 [out, in]
    scales: Floats  # float32 [out, groups]
    group_of: NDArray[np.intp]  # [in]


def unpack(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing, dtype: Dtype) -> StoredMatrix:
    """Return the matrix [out, in] as blocks of kernels.dequantize if they hold the same weights, else dense in dtype.

    tensors: kind -> contents, already checked by fault_of(). Blocks are possible if all weights of a block share one
    scale, which is a float16, and if the codes minus their zeros have at most 8 bits. Dense weights are computed in
    float32 and rounded once. Errors: ValueError for groups that do not exist.
    """
    if packing == "mxfp4":
        return StoredMatrix([_as_mxfp4(tensors["exponents"], tensors["blocks"])])
    codes = _READERS[packing](tensors, shape, packing)
    part = _as_blocks(codes)
    return StoredMatrix([part]) if part is not None else StoredMatrix.of(_dense(codes, dtype))


# --- codes --------------------------------------------------------------------------------------------------------


def _read_gptq(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    rows, columns = shape
    words = tensors["qweight"]
    bits = bits_of(len(words), columns)
    codes = _codes(words.T, bits, columns)
    zeros = _gptq_zeros(tensors["qzeros"], bits, rows, is_less_one=packing == "gptq").T
    groups = zeros.shape[1]
    group_of = _checked_groups(tensors["g_idx"], groups) if "g_idx" in tensors else _even_groups(columns, groups)
    return Codes(_less_zeros(codes, zeros, group_of), to_floats(tensors["scales"]).T, group_of)


def _gptq_zeros(words: NDArray[Any], bits: int, rows: int, *, is_less_one: bool) -> UInt8s:
    """Return the zeros uint8 [groups, rows].

    Zeros that are stored minus one were made by subtracting one from each code of a word at once, with borrows; the sum
    of words undoes that. For codes that cross words, for example of 3 bits, one is added to each.
    """
    if is_less_one and _WORD_BITS % bits == 0:
        ones = np.uint32(sum(1 << place for place in range(0, _WORD_BITS, bits)))
        words = words.view(np.uint32) + ones
    zeros = _codes(words, bits, rows)
    if is_less_one and _WORD_BITS % bits:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return zeros


def _read_awq(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    rows, columns = shape
    padded = round_up(rows, 8)
    codes, zeros = (_in_order(_codes(tensors[kind], 4, padded))[:, :rows].T for kind in ("qweight", "qzeros"))
    group_of = _even_groups(columns, zeros.shape[1])
    return Codes(_less_zeros(codes, zeros, group_of), to_floats(tensors["scales"]).T, group_of)


def _in_order(codes: UInt8s) -> UInt8s:
    """Return codes uint8 [n, columns], with the eight codes of each word in column order."""
    words = codes.reshape(len(codes), -1, 8)
    return words[:, :, np.argsort(_AWQ_ORDER)].reshape(len(codes), -1)


def _read_scaled(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    """Return the codes of compressed-tensors and of fp8."""
    rows, columns = shape
    scales, group_of = _spread(
        to_floats(tensors["weight_scale" if "weight_scale" in tensors else "weight_scale_inv"]), shape
    )
    if "weight_g_idx" in tensors:
        group_of = _checked_groups(tensors["weight_g_idx"], scales.shape[1])
    if "weight_packed" in tensors:
        bits = bits_of(tensors["weight_packed"].shape[1], columns)
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
        if "weight_zero_point" in tensors:
            zeros = _codes(tensors["weight_zero_point"].T, bits, rows).T
        return Codes(_less_zeros(_codes(tensors["weight_packed"], bits, columns), zeros, group_of), scales, group_of)
    if tensors["weight"].dtype == np.uint8:
        return Codes(_E4M3[tensors["weight"]], scales, group_of)
    codes = tensors["weight"].astype(np.int16)
    if "weight_zero_point" in tensors:
        codes -= tensors["weight_zero_point"].astype(np.int16).reshape(-1, 1)
    return Codes(codes, scales, group_of)


def _spread(scales: Floats, shape: Shape) -> tuple[Floats, NDArray[np.intp]]:
    """Return the scales as float32 [out, groups], and the group of each column.

    There may be one scale for all weights, one per row, [out, groups], or one for each block of some rows and columns.
    """
    rows, columns = shape
    if scales.ndim < 2 or scales.shape in ((1, 1), (rows, 1)):
        return np.broadcast_to(scales.reshape(-1, 1), (rows, 1)), np.zeros(columns, np.intp)
    if len(scales) == rows:
        return scales, _even_groups(columns, scales.shape[1])
    size = next(size for size in BLOCK_ROWS if scales.shape == (ceil_div(rows, size), ceil_div(columns, size)))
    return np.repeat(scales, size, axis=0)[:rows], np.arange(columns) // size


def _e4m3_values() -> Floats:
    """Return float32 [256]: the value of each byte of F8_E4M3 (4 bits of exponent, 3 of fraction)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


_E4M3 = _e4m3_values()


def _even_groups(columns: int, groups: int) -> NDArray[np.intp]:
    """Return the group of each column for groups of equal length."""
    return np.arange(columns) // (columns // groups)


def _checked_groups(group_of: NDArray[Any], groups: int) -> NDArray[np.intp]:
    """Return g_idx as indices. Errors: ValueError for an index that is not a group."""
    if group_of.size and not (group_of.min() >= 0 and group_of.max() < groups):
        raise ValueError(f"g_idx has groups from {group_of.min()} to {group_of.max()}; there are {groups}")
    return group_of.astype(np.intp)


def _codes(words: NDArray[Any], bits: int, count: int) -> UInt8s:
    """Return the codes uint8 [n, count] in int32 words [n, words], packed without gaps from their low ends."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits:
        places = np.unpackbits(octets, axis=1, bitorder="little")[:, : count * bits].reshape(len(octets), count, bits)
        return np.packbits(places, axis=2, bitorder="little")[:, :, 0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((octets[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(octets), -1)[:, :count]


def _less_zeros(codes: UInt8s, zeros: UInt8s, group_of: NDArray[np.intp]) -> NDArray[np.int16]:
    """Return int16 [out, in]: the codes minus their groups' zeros uint8 [out, groups]."""
    return codes.astype(np.int16) - zeros.astype(np.int16)[:, group_of]


_READERS = {
    "gptq": _read_gptq,
    "gptq_v2": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_scaled,
    "fp8": _read_scaled,
}


# --- weights ------------------------------------------------------------------------------------------------------


def _as_blocks(matrix: Codes) -> StoredPart | None:
    """Return the matrix as blocks of 32 weights with one float16 scale each; None if that would change weights."""
    codes, scales, group_of = matrix
    columns = codes.shape[1]
    if codes.dtype != np.int16 or columns % _BLOCK:
        return None
    blocks = group_of.reshape(-1, _BLOCK)
    if (blocks != blocks[:, :1]).any():
        return None
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    low, high = int(codes.min()), int(codes.max())
    name = next((name for name, least, most in _BLOCK_TYPES if least <= low and high <= most), None)
    if name is None or not np.array_equal(halves.astype(np.float32), scales):
        return None
    scale_bytes = np.ascontiguousarray(halves[:, blocks[:, 0]]).view(np.uint8)
    parts = [scale_bytes.reshape(len(codes), -1, 2), *_code_bytes(codes.reshape(len(codes), -1, _BLOCK), name)]
    return StoredPart(name, np.concatenate(parts, axis=2).reshape(len(codes), -1), columns)


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
    codes, scales, group_of = matrix
    weights = np.empty(codes.shape, dtype)
    step = max(1, _CHUNK // codes.shape[1])
    for begin in range(0, len(codes), step):
        rows = slice(begin, begin + step)
        weights[rows] = rounded(codes[rows].astype(np.float32) * scales[rows][:, group_of], dtype)
    return weights
