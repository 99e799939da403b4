"""GGUF tensors as float32: plain floats, and blocks of 32, 64 or 256 weights.

Blocks (ggml-common.h), in the order of their bytes; scales and minima are float16, little-endian:
    Q8_0    scale, 32 x int8                                  weight = scale * q
    Q4_0    scale, 16 bytes of two 4-bit numbers              weight = scale * (q - 8)
    Q4_1    scale, minimum, 16 such bytes                     weight = scale * q + minimum
    Q5_0    scale, 32 fifth bits, 16 such bytes               weight = scale * (q - 16)
    Q5_1    scale, minimum, 32 fifth bits, 16 such bytes      weight = scale * q + minimum
    Q2_K    16 x (4-bit s, 4-bit m), 64 bytes of four 2-bit numbers, scale, minimum
                                                              weight = scale * s * q - minimum * m
    Q3_K    256 third bits, 64 bytes of four low 2 bits, 16 x 6-bit s, scale        weight = scale * (s - 32) * (q - 4)
    Q4_K    scale, minimum, 8 x (6-bit s, 6-bit m), 128 bytes of two 4-bit numbers
                                                              weight = scale * s * q - minimum * m
    Q5_K    scale, minimum, 8 x (6-bit s, 6-bit m), 256 fifth bits, 128 such bytes
                                                              weight = scale * s * q - minimum * m
    Q6_K    128 bytes of two low 4 bits, 64 of four high 2 bits, 16 x int8 s, scale
                                                              weight = scale * s * (q - 32)
    TQ1_0   48 bytes of five digits 0 to 2, 4 bytes of four, scale                   weight = scale * (q - 1)
    TQ2_0   64 bytes of four 2-bit numbers, scale                                    weight = scale * (q - 1)
The other types look each number up in a table of 16 (LEVELS): weight = scale * level[q]
    IQ4_NL  scale, 16 bytes of two 4-bit numbers
    IQ4_XS  scale, 8 x 6-bit s, 128 such bytes                                       scale * (s - 32) for 32 weights
    MXFP4   exponent e of the scale 2^(e - 128), 16 such bytes
    NVFP4   4 scales E4M3 without a sign, 32 such bytes                              half of the scale for 16 weights
    IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M: scale, numbers of rows of a grid (block_grids.py), signs, and
            a number s of 3 or 4 bits for each 16 or 32 weights: scale * (2 s + 1), times 1/8; IQ3_XXS 1/4; IQ3_S 1.
            A grid's digit is the low three bits of q, its sign the fourth. In IQ1 types the fourth bit says for each 8
            or 32 weights whether an eighth is added to the digit or taken off.
And types that no file has, for packed folders:
    FP8     float32 scale, 64 bytes of E4M3                   weight = scale * the float
    NF4, BNB_FP4   float32 scale, 32 bytes of two 4-bit numbers, the high one first
                                                              weight = scale * level[q], levels that are no integers
    NVFP4_F32      float32 divisor, 4 scales E4M3, 32 bytes of two 4-bit numbers, the low one first
                                                              half of the scale, divided, for 16 weights
The two halves of a byte belong to weights 16 apart (in K blocks 32, in Q6_K 64, in NVFP4 8): the low half to the
earlier one. The four parts of a byte belong to weights 32 apart.

Products and sums are rounded one by one in float32, so results equal those of the gguf package bit for bit.
"""

from collections.abc import Callable

import numpy as np

from kernels.arrays import AnyInts, Floats, UInt8s, UInt32s
from kernels.block_grids import rows_of
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
    "Q2_K": (K_BLOCK, 84),
    "Q3_K": (K_BLOCK, 110),
    "Q4_K": (K_BLOCK, 144),
    "Q5_K": (K_BLOCK, 176),
    "Q6_K": (K_BLOCK, 210),
    "IQ4_NL": (BLOCK, 18),
    "IQ4_XS": (K_BLOCK, 136),
    "MXFP4": (BLOCK, 17),
    "NVFP4": (64, 36),
    "TQ1_0": (K_BLOCK, 54),
    "TQ2_0": (K_BLOCK, 66),
    "IQ2_XXS": (K_BLOCK, 66),
    "IQ2_XS": (K_BLOCK, 74),
    "IQ2_S": (K_BLOCK, 82),
    "IQ3_XXS": (K_BLOCK, 98),
    "IQ3_S": (K_BLOCK, 110),
    "IQ1_S": (K_BLOCK, 50),
    "IQ1_M": (K_BLOCK, 56),
    "FP8": (64, 68),
    "NF4": (64, 36),
    "BNB_FP4": (64, 36),
    "NVFP4_F32": (64, 40),
}
#: Types whose codes do not stand for integers.
FLOAT_CODES = ("FP8", "NF4", "BNB_FP4")
#: Types that tensors in files have.
FILE_TYPES = tuple(name for name in BLOCK_SIZES if name not in (*FLOAT_CODES, "NVFP4_F32"))

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of four bits


def _signed_levels(*magnitudes: int) -> tuple[int, ...]:
    """Return the levels of codes with a sign in the fourth bit; 0 for codes that no grid has."""
    half = magnitudes + (0,) * (8 - len(magnitudes))
    return half + tuple(-level for level in half)


_IQ2, _IQ1 = _signed_levels(8, 25, 43), (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)

#: Type -> what its codes 0 to 15 stand for; in IQ1 types eight times that.
LEVELS: dict[str, tuple[int, ...]] = {
    "IQ4_NL": _IQ4,
    "IQ4_XS": _IQ4,
    "MXFP4": _FP4,
    "NVFP4": _FP4,
    "NVFP4_F32": _FP4,
    "IQ2_XXS": _IQ2,
    "IQ2_XS": _IQ2,
    "IQ2_S": _IQ2,
    "IQ3_XXS": _signed_levels(4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": _signed_levels(1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1_S": _IQ1,
    "IQ1_M": _IQ1,
}

#: The same of types whose levels are float32 numbers: those that bitsandbytes writes to files.
FLOAT_LEVELS: dict[str, tuple[float, ...]] = {
    "NF4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "BNB_FP4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204),
        -0.25,
    ),
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
    return _by_scale(numbers, _signed(blocks[:, 192:208]) * _scalar(blocks, 208))


def _q2_k(blocks: UInt8s) -> Floats:
    s, m = blocks[:, :16] & 15, blocks[:, :16] >> 4
    numbers = _float(_quarters(blocks[:, 16:80])).reshape(-1, 16, 16)
    scales, minima = _float(s) * _scalar(blocks, 80), _float(m) * _scalar(blocks, 82)
    scaled: Floats = numbers * scales[:, :, None] - minima[:, :, None]
    return scaled.reshape(-1, K_BLOCK)


def _q3_k(blocks: UInt8s) -> Floats:
    """Convert Q3_K blocks. Bit i of byte j of the third bits belongs to weight 32 * i + j.

    Of the 12 bytes of s the first 8 have the low four bits, those of s 8 to 15 in the upper halves. The other two bits
    of s number i are in byte i % 4 of the last 4.
    """
    third = (blocks[:, None, :32] >> _shifts(1)) & 1
    numbers = _float(_quarters(blocks[:, 32:96]) | third.reshape(-1, K_BLOCK) << 2) - np.float32(4)
    high = (blocks[:, None, 104:108] >> _shifts(2) & 3).reshape(-1, 16)
    s = _float(_nibbles(blocks[:, 96:104], 8) | high << 4) - np.float32(32)
    return _by_scale(numbers, s * _scalar(blocks, 108))


def _tq1_0(blocks: UInt8s) -> Floats:
    """Convert TQ1_0 blocks. A byte is a fraction of 256; times 3 its whole part is the next digit."""
    parts = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:digits, None]
        parts.append(((blocks[:, None, begin:end] * powers).astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    return (_float(np.concatenate(parts, 1)) - np.float32(1)) * _scalar(blocks, 52)


def _tq2_0(blocks: UInt8s) -> Floats:
    return (_float(_quarters(blocks[:, :64])) - np.float32(1)) * _scalar(blocks, 64)


def _iq4_nl(blocks: UInt8s) -> Floats:
    return _levels(_nibbles(blocks[:, 2:], 16), "IQ4_NL") * _scalar(blocks, 0)


def _iq4_xs(blocks: UInt8s) -> Floats:
    """Convert IQ4_XS blocks: the upper two bits of the eight s, then their lower four, low halves of bytes first."""
    high = (blocks[:, 2:4, None] >> _shifts(2).reshape(-1) & 3).reshape(-1, 8)
    s = _float(_nibbles(blocks[:, 4:8], 1) | high << 4) - np.float32(32)
    return _by_scale(_levels(_nibbles(blocks[:, 8:], 16), "IQ4_XS"), s * _scalar(blocks, 0))


def _mxfp4(blocks: UInt8s) -> Floats:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    with np.errstate(over="ignore"):  # the largest scales give infinities
        return _levels(_nibbles(blocks[:, 1:], 16), "MXFP4") * scales


def _nvfp4(blocks: UInt8s) -> Floats:
    """Convert NVFP4 blocks. Of a scale seven bits count; the byte 0x7F is a zero."""
    bits = np.where(blocks[:, :4] == 0x7F, 0, blocks[:, :4] & 0x7F).astype(np.uint16)
    scales = (bits << 7).view(np.float16).astype(np.float32) * np.float32(128)  # E4M3's bias is 8 less; and a half
    return _by_scale(_levels(_nibbles(blocks[:, 4:], 8), "NVFP4"), scales)


def _fp8(blocks: UInt8s) -> Floats:
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    with np.errstate(over="ignore", invalid="ignore"):  # the largest scales give infinities
        numbers: Floats = E4M3[blocks[:, 4:]] * scales
    return numbers


def _nf4(blocks: UInt8s) -> Floats:
    return _float_levels(blocks, "NF4")


def _bnb_fp4(blocks: UInt8s) -> Floats:
    return _float_levels(blocks, "BNB_FP4")


def _float_levels(blocks: UInt8s, name: str) -> Floats:
    codes = np.stack((blocks[:, 4:] >> np.uint8(4), blocks[:, 4:] & np.uint8(15)), 2).reshape(len(blocks), -1)
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        numbers: Floats = np.array(FLOAT_LEVELS[name], np.float32)[codes] * scales
    return numbers


def _nvfp4_f32(blocks: UInt8s) -> Floats:
    bits = blocks[:, 4:8].astype(np.uint16)
    divisors = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scales = (bits << 7).view(np.float16).astype(np.float32) * np.float32(128) / divisors  # see _nvfp4()
        codes = np.stack((blocks[:, 8:] & np.uint8(15), blocks[:, 8:] >> np.uint8(4)), 2).reshape(len(blocks), -1)
        return _by_scale(_levels(codes, "NVFP4_F32"), scales)


def _e4m3_values() -> Floats:
    """Return float32 [256]: the value of each byte of E4M3 (4 bits of exponent, 3 of fraction)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


#: What bytes of E4M3 stand for.
E4M3 = _e4m3_values()


def _iq2_xxs(blocks: UInt8s) -> Floats:
    """Convert IQ2_XXS blocks: for each 32 weights four row numbers, and a word of four signs of 7 bits and s."""
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    signs, s = _signs_and_s(parts[:, :, 4:])
    return _of_grid("IQ2_XXS", parts[:, :, :4], signs, s * _scalar(blocks, 0) * np.float32(0.125))


def _iq2_xs(blocks: UInt8s) -> Floats:
    """Convert IQ2_XS blocks: of each 8 weights 9 bits of a row number and 7 of signs; then the s of each 16."""
    words = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    s = 2 * _float(_nibbles(blocks[:, 66:], 1)) + np.float32(1)
    return _of_grid("IQ2_XS", words & 511, _eighth_sign(words >> 9), s * _scalar(blocks, 0) * np.float32(0.125))


def _iq2_s(blocks: UInt8s) -> Floats:
    """Convert IQ2_S blocks: 8 bits of row numbers, all signs, 2 bits more of each row number, the s of each 16."""
    high = (blocks[:, 66:74, None] >> _shifts(2).reshape(-1) & 3).reshape(-1, 32)
    s = 2 * _float(_nibbles(blocks[:, 74:], 1)) + np.float32(1)
    numbers = blocks[:, 2:34] | high.astype(np.uint16) << 8
    return _of_grid("IQ2_S", numbers, blocks[:, 34:66], s * _scalar(blocks, 0) * np.float32(0.125))


def _iq3_xxs(blocks: UInt8s) -> Floats:
    """Convert IQ3_XXS blocks: all row numbers, then for each 32 weights a word of four signs of 7 bits and s."""
    signs, s = _signs_and_s(blocks[:, 66:].reshape(-1, 8, 4))
    return _of_grid("IQ3_XXS", blocks[:, 2:66], signs, s * _scalar(blocks, 0) * np.float32(0.25))


def _iq3_s(blocks: UInt8s) -> Floats:
    """Convert IQ3_S blocks: 8 bits of row numbers, their ninth bits, all signs, the s of each 32."""
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    s = 2 * _float(_nibbles(blocks[:, 106:], 1)) + np.float32(1)
    return _of_grid("IQ3_S", blocks[:, 2:66] | ninth << 8, blocks[:, 74:106], s * _scalar(blocks, 0))


def _iq1_s(blocks: UInt8s) -> Floats:
    """Convert IQ1_S blocks: 8 bits of row numbers, then for each 32 weights 4 x 3 bits more, s, and a sign for all."""
    words = np.ascontiguousarray(blocks[:, 34:]).view("<u2")
    high = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    signs = np.repeat(np.where(words >> 15, 0xFF, 0).astype(np.uint8), 4, 1)
    s = 2 * _float(words >> 12 & 7) + np.float32(1)
    return _of_grid("IQ1_S", blocks[:, 2:34] | high << 8, signs, s * _scalar(blocks, 0) * np.float32(0.125))


def _iq1_m(blocks: UInt8s) -> Floats:
    """Convert IQ1_M blocks: 8 bits of row numbers, then for each of them 3 bits more and a sign for its 8 weights.

    Four words end the block. Each has four s of 3 bits, and in its upper four bits a quarter of the scale.
    """
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")
    scale_bits = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(1, dtype=np.uint16)
    scale = scale_bits.view(np.float16).astype(np.float32)[:, None]
    s = 2 * _float((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)) + np.float32(1)
    high = _nibbles(blocks[:, 32:48], 1)
    signs = np.where(high & 8, 0xFF, 0).astype(np.uint8)
    numbers = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    return _of_grid("IQ1_S", numbers, signs, s * scale * np.float32(0.125))


def _of_grid(name: str, numbers: AnyInts, signs: UInt8s, scales: Floats) -> Floats:
    """Return the weights of rows of a grid. signs: a byte for 8 weights, the first in its lowest bit.

    numbers: [blocks, ...], each less than the grid's rows. scales: float32 [blocks, parts of a block].
    """
    digits = rows_of(name)[numbers.reshape(len(numbers), -1)].reshape(-1, K_BLOCK)
    negative = np.unpackbits(signs.reshape(len(signs), -1), axis=1, bitorder="little")
    return _by_scale(_levels(digits | negative << np.uint8(3), name), scales)


def _signs_and_s(words: UInt8s) -> tuple[UInt8s, Floats]:
    """Return the bytes of signs [blocks, 32] and 2 s + 1 [blocks, 8] of words [blocks, 8, 4 bytes]."""
    whole: UInt32s = np.ascontiguousarray(words).view("<u4")[:, :, 0]
    sevens = whole[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return _eighth_sign(sevens.reshape(len(words), -1)), 2 * _float(whole >> 28) + np.float32(1)


def _eighth_sign(sevens: AnyInts) -> UInt8s:
    """Return bytes of 8 signs of which seven are given: the number of negative ones is even."""
    signs: UInt8s = sevens.astype(np.uint8)
    odd = np.unpackbits(signs[..., None], axis=-1).sum(-1, dtype=np.uint8) & np.uint8(1)
    signs |= odd << np.uint8(7)
    return signs


def _by_scale(numbers: Floats, scales: Floats) -> Floats:
    """Multiply numbers [blocks, weights] by the scales [blocks, parts] of a block's parts."""
    scaled: Floats = numbers.reshape(*scales.shape, -1) * scales[:, :, None]
    return scaled.reshape(len(numbers), -1)


def _levels(codes: UInt8s, name: str) -> Floats:
    return np.array(LEVELS[name], np.float32)[codes]


def _quarters(packed: UInt8s) -> UInt8s:
    """Return the 2-bit numbers uint8 [blocks, 4n] of uint8 [blocks, n]: of each 32 bytes the lowest bits first."""
    quarters: UInt8s = packed.reshape(len(packed), -1, 1, 32) >> _shifts(2) & np.uint8(3)
    return quarters.reshape(len(packed), -1)


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
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "FP8": _fp8,
    "NF4": _nf4,
    "BNB_FP4": _bnb_fp4,
    "NVFP4_F32": _nvfp4_f32,
}
