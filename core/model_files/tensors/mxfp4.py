"""MXFP4 (Open Compute Project 2023, "OCP Microscaling Formats"): blocks of 32 four-bit floats and a power of two.

A code's low three bits mean 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and the fourth is the sign; the block's factor is 2^(byte -
127). Twice a code's value is a five-bit integer. So rows become Q5_0 of kernels/dequantize.py with the same weights, if
half of each factor is a float16. Rows with other factors become float32.
"""

import numpy as np

from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from ipc.tables.arrays import Bools, Floats, UInt8s
from kernels.cpu.library import CpuLibrary

MXFP4 = "MXFP4"
_BLOCK = 32  # weights
_BLOCK_BYTES = 17  # in GGUF files: the exponent, then 16 bytes of codes
_BIAS = 128  # of exponents of halved factors
_LOWEST, _HIGHEST = 104, 143  # exponents of 2^-24 and 2^15, the limits of float16
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # code -> twice its value
_FIVE_BITS = (_DOUBLED + 16).astype(np.uint8)


def _of_bytes(of_code: UInt8s) -> UInt8s:
    """Return uint8 [256]: maps a byte of two codes to the byte of their four-bit counterparts."""
    both = np.arange(256)
    pairs: UInt8s = of_code[both & 15] | of_code[both >> 4] << np.uint8(4)
    return pairs


_NIBBLES = _of_bytes(_FIVE_BITS & np.uint8(15))


def mxfp4_rows(rows: UInt8s, library: CpuLibrary | None) -> StoredMatrix:
    """Return the matrix for rows uint8 [rows, bytes] in GGUF's format. library: for dequantizing the result."""
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES)
    return mxfp4_matrix(blocks[:, :, 0], blocks[:, :, 1:], library)


def in_gguf_order(codes: UInt8s) -> UInt8s:
    """Return uint8 [rows, blocks, 16] with weights i and i + 16 in a byte, from bytes of neighbours, low half first."""
    single = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), -1).reshape(*codes.shape[:2], _BLOCK)
    ordered: UInt8s = single[:, :, :16] | single[:, :, 16:] << np.uint8(4)
    return ordered


def mxfp4_matrix(exponents: UInt8s, codes: UInt8s, library: CpuLibrary | None = None) -> StoredMatrix:
    """Return the matrix of exponents [rows, blocks] and codes [rows, blocks, 16], which hold weights i and i + 16.

    Its parts are Q5_0 or F32. Both inputs are uint8, with at least one row.
    """
    is_zero: Bools = (codes & np.uint8(0x77)).max(-1) == 0
    fits: Bools = ((exponents >= _LOWEST) & (exponents <= _HIGHEST) | is_zero).min(1)
    ends = [*(np.flatnonzero(fits[1:] != fits[:-1]) + 1).tolist(), len(fits)]
    parts, begin = list[StoredPart](), 0
    for end in ends:
        rows = slice(begin, end)
        if fits[begin]:
            data = _as_q5_0(np.where(is_zero[rows], np.uint8(_BIAS), exponents[rows]), codes[rows])
            parts.append(StoredPart("Q5_0", data, exponents.shape[1] * _BLOCK, library))
        else:
            numbers = _as_floats(exponents[rows], codes[rows])
            parts.append(StoredPart("F32", numbers.view(np.uint8), numbers.shape[1]))
        begin = end
    return StoredMatrix(parts)


def _as_q5_0(exponents: UInt8s, codes: UInt8s) -> UInt8s:
    """Return the blocks of Q5_0, uint8 [rows, blocks * 22]: scale, fifth bits, the other four bits."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS).astype("<f2")
    is_high: Bools = np.concatenate((~codes >> np.uint8(3) & 1, ~codes >> np.uint8(7)), 2) > 0
    is_high |= _magnitudes(codes) == 0  # minus zero
    fifth = np.packbits(is_high, axis=2, bitorder="little")
    blocks = np.concatenate((scales[:, :, None].view(np.uint8), fifth, _NIBBLES[codes]), 2)
    return blocks.reshape(len(codes), -1)


def _magnitudes(codes: UInt8s) -> UInt8s:
    """Return the codes [rows, blocks, 32] without their signs."""
    return np.concatenate((codes & np.uint8(7), codes >> np.uint8(4) & np.uint8(7)), 2)


def _as_floats(exponents: UInt8s, codes: UInt8s) -> Floats:
    """Return the weights float32 [rows, blocks * 32]."""
    doubled = np.concatenate((_DOUBLED[codes & np.uint8(15)], _DOUBLED[codes >> np.uint8(4)]), 2)
    factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
    with np.errstate(over="ignore"):
        numbers: Floats = doubled * factors[:, :, None]
    return numbers.reshape(len(codes), -1)
