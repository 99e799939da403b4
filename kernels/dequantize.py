"""GGUF tensors as float32: plain floats, 32-weight blocks (Q8_0, Q4_0 ... Q5_1), 256-weight blocks (Q4_K ... Q6_K).

Blocks (ggml-common.h), scales and minima float16, little-endian:
    Q8_0  scale, 32 x int8                                  weight = scale * q
    Q4_0  scale, 16 bytes of two 4-bit numbers              weight = scale * (q - 8)
    Q4_1  scale, minimum, 16 such bytes                     weight = scale * q + minimum
    Q5_0  scale, 32 fifth bits, 16 such bytes               weight = scale * (q - 16)
    Q5_1  scale, minimum, 32 fifth bits, 16 such bytes      weight = scale * q + minimum
    Q4_K  scale, minimum, 8 x (6-bit s, 6-bit m), 128 such bytes            weight = scale * s * q - minimum * m
    Q5_K  scale, minimum, 8 x (6-bit s, 6-bit m), 256 fifth bits, 128 such  weight = scale * s * q - minimum * m
    Q6_K  128 bytes of two low 4 bits, 64 of four high 2 bits, 16 x int8 s, scale       weight = scale * s * (q - 32)
The two halves of a byte belong to weights 16 (in K blocks 32, in Q6_K 64) apart: the low half to the earlier one.

Products and sums are rounded one by one in float32, so results equal those of the gguf package bit for bit.
"""

from collections.abc import Callable

import numpy as np

from kernels.arrays import AnyInts, Floats, UInt8s
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, to_floats

BLOCK = 32  # weights
K_BLOCK = 256

#: Type name -> weights per block, bytes per block.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (BLOCK, 34),
    "Q4_0": (BLOCK, 18),
    "Q4_1": (BLOCK, 20),
    "Q5_0": (BLOCK, 22),
    "Q5_1": (BLOCK, 24),
    "Q4_K": (K_BLOCK, 144),
    "Q5_K": (K_BLOCK, 176),
    "Q6_K": (K_BLOCK, 210),
}

#: Bytes of blocks converted at a time, small enough that intermediate results stay in the CPU's cache.
_CHUNK_BYTES = 1 << 18


def dequantize(data: UInt8s, type_name: str) -> Floats:
    """Return float32[n] from data uint8[n / weights in a block * bytes of a block].

    `data` is contiguous and starts at a multiple of 4 bytes in memory; the F32 result shares its memory. Errors:
    KeyError for a type not in BLOCK_SIZES; ValueError for a size that is not a whole number of blocks.
    """
    weights, block_bytes = BLOCK_SIZES[type_name]
    blocks = data.reshape(-1, block_bytes)
    if type_name in PLAIN_TYPES:
        return to_floats(blocks.view(PLAIN_TYPES[type_name]).reshape(-1))
    convert = _KINDS[type_name]
    out = np.empty((len(blocks), weights), np.float32)
    step = _CHUNK_BYTES // block_bytes
    for begin in range(0, len(blocks), step):
        out[begin : begin + step] = convert(blocks[begin : begin + step])
    return out.reshape(-1)


def _q8_0(blocks: UInt8s) -> Floats:
    return _signed(blocks[:, 2:]) * _scalar(blocks, 0)


def _q4_0(blocks: UInt8s) -> Floats:
    return (_float(_nibbles(blocks[:, 2:], 16)) - np.float32(8)) * _scalar(blocks, 0)


def _q4_1(blocks: UInt8s) -> Floats:
    return _float(_nibbles(blocks[:, 4:], 16)) * _scalar(blocks, 0) + _scalar(blocks, 2)


def _q5_0(blocks: UInt8s) -> Floats:
    return (_five_bits(blocks[:, 2:]) - np.float32(16)) * _scalar(blocks, 0)


def _q5_1(blocks: UInt8s) -> Floats:
    return _five_bits(blocks[:, 4:]) * _scalar(blocks, 0) + _scalar(blocks, 2)


def _q4_k(blocks: UInt8s) -> Floats:
    return _scale_k(_float(_nibbles(blocks[:, 16:], 32)), blocks)


def _q5_k(blocks: UInt8s) -> Floats:
    """Convert Q5_K blocks. Bit i of byte j of the fifth bits belongs to weight 32 * i + j."""
    fifth = (blocks[:, None, 16:48] >> _shifts(1)) & 1
    return _scale_k(_float(_nibbles(blocks[:, 48:], 32) | fifth.reshape(-1, K_BLOCK) << 4), blocks)


def _q6_k(blocks: UInt8s) -> Floats:
    """Convert Q6_K blocks.

    Bits 2i and 2i + 1 of byte j of the high bits belong, in each half of the block, to its weight 32 * i + j.
    """
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(2)) & 3
    numbers = _float(_nibbles(blocks[:, :128], 64) | high.reshape(-1, K_BLOCK) << 4) - np.float32(32)
    scales = _signed(blocks[:, 192:208]) * _scalar(blocks, 208)
    scaled: Floats = numbers.reshape(-1, 16, 16) * scales[:, :, None]
    return scaled.reshape(-1, K_BLOCK)


def _scalar(blocks: UInt8s, offset: int) -> Floats:
    """Return float32[blocks, 1]: the float16 at this byte of each block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _shifts(width: int) -> UInt8s:
    """Return uint8[8 / width, 1]: 0, width, 2 * width, ..., which bring each part of a byte to its low end."""
    return np.arange(0, 8, width, dtype=np.uint8)[:, None]


def _float(numbers: AnyInts) -> Floats:
    return numbers.astype(np.float32)


def _signed(numbers: UInt8s) -> Floats:
    """Return the bytes, read as int8, in float32."""
    return numbers.view(np.int8).astype(np.float32)


def _nibbles(packed: UInt8s, group: int) -> UInt8s:
    """Return the half-bytes uint8[blocks, 2n], each 0 to 15, of uint8[blocks, n].

    The low halves of each group of bytes come first, then the high ones.
    """
    groups = packed.reshape(len(packed), -1, group)
    return np.stack((groups & 15, groups >> 4), axis=2).reshape(len(packed), -1)


def _five_bits(packed: UInt8s) -> Floats:
    """Return float32[blocks, 32], each 0 to 31, from 4 bytes of fifth bits, lowest bit first, and 16 of nibbles."""
    fifth = (packed[:, :4, None] >> _shifts(1).reshape(-1)) & 1
    return _float(_nibbles(packed[:, 4:], 16) | fifth.reshape(-1, BLOCK) << 4)


def _scale_k(numbers: Floats, blocks: UInt8s) -> Floats:
    """Scale and shift float32[blocks, 256] by the first 16 bytes of Q4_K and Q5_K blocks.

    12 of these bytes hold 6-bit numbers. s 0 to 3 and m 0 to 3 are in the low bits of the first 8. s and m 4 to 7 have
    their low four bits in the halves of the last 4, and their high two bits on top of the first 8.
    """
    first, last = blocks[:, 4:12], blocks[:, 12:16]
    high = (first >> 2) & 0x30
    s = _float(np.concatenate((first[:, :4] & 63, (last & 15) | high[:, :4]), 1)) * _scalar(blocks, 0)
    m = _float(np.concatenate((first[:, 4:] & 63, (last >> 4) | high[:, 4:]), 1)) * _scalar(blocks, 2)
    scaled: Floats = numbers.reshape(-1, 8, 32) * s[:, :, None] - m[:, :, None]
    return scaled.reshape(-1, K_BLOCK)


#: Types that are element types.
PLAIN_TYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_KINDS: dict[str, Callable[[UInt8s], Floats]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
