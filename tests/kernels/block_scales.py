"""The scales of quantized blocks: where each type has them, and how tests write them."""

import numpy as np

from kernels.dequantize import BLOCK_SIZES, FLOAT_CODES, PLAIN_TYPES
from kernels.elements import Numbers

#: Quantized types of kernels.dequantize.
TYPES = [name for name in BLOCK_SIZES if name not in PLAIN_TYPES]
#: Those whose codes are integers.
INTEGER_TYPES = [name for name in TYPES if name not in FLOAT_CODES]
WITH_MINIMUM = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
#: First byte of a block's float16 factors, if it is not 0. IQ1_M has quarters of one at four places.
_FIRST = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64, "IQ1_M": 48}
#: Types whose first four bytes are a float32.
WIDE_SCALES = (*FLOAT_CODES, "NVFP4_F32")
#: What other types have instead: the first byte of so many scales of one byte each.
BYTE_SCALES = {"MXFP4": (0, 1), "NVFP4": (0, 4)}


def num_scales(name: str) -> int:
    """Factors of a block that set_scales() writes."""
    return BYTE_SCALES[name][1] if name in BYTE_SCALES else 2 if name in WITH_MINIMUM else 1


def set_scales(blocks: Numbers, name: str, values: Numbers | float, first: int = 0) -> None:
    """Write factors from number `first` on into blocks uint8 [..., bytes]; values [..., factors] or one for all."""
    if name in WIDE_SCALES:
        with np.errstate(over="ignore", divide="ignore"):
            values = np.float32(1) / np.asarray(values, "<f4") if name == "NVFP4_F32" else np.asarray(values, "<f4")
        if name == "NVFP4_F32":
            blocks[..., 4:8] = blocks[..., 4:8] & 0x1F | 0x20
        blocks[..., :4] = np.ascontiguousarray(np.broadcast_to(values, (*blocks.shape[:-1], 1))).view(np.uint8)
        return
    count = num_scales(name) - first
    values = np.broadcast_to(np.asarray(values, np.float64), (*blocks.shape[:-1], count))
    if name in BYTE_SCALES:
        begin = BYTE_SCALES[name][0] + first
        blocks[..., begin : begin + count] = _exponents(values) if name == "MXFP4" else _floats_of_8_bits(values)
        return
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(values.astype("<f2")).view(np.uint8)
    begin = _FIRST.get(name, 0) + 2 * first
    if name != "IQ1_M":
        blocks[..., begin : begin + 2 * count] = halves
        return
    for i in range(4):
        nibble = halves[..., i // 2] >> i % 2 * 4 & 15
        blocks[..., begin + 2 * i + 1] = blocks[..., begin + 2 * i + 1] & 15 | nibble << 4


def without_nan(blocks: Numbers, name: str) -> Numbers:
    """Replace codes that are no numbers, which only FP8 has, in blocks uint8 [..., bytes]."""
    if name == "FP8":
        codes = blocks[..., 4:]
        codes[(codes & 0x7F) == 0x7F] ^= 1
    return blocks


def factors(blocks: Numbers, name: str) -> Numbers:
    """The float16 factors [..., 1 or 2] of blocks of a type that has them."""
    begin, count = _FIRST.get(name, 0), num_scales(name)
    if name == "IQ1_M":
        words = np.ascontiguousarray(blocks[..., begin : begin + 8]).view("<u2").astype(np.uint16)
        return (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(-1, dtype=np.uint16)[..., None].view("<f2")
    return np.ascontiguousarray(blocks[..., begin : begin + 2 * count]).view("<f2")


def _exponents(values: Numbers) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.rint(np.log2(np.abs(values))) + 128
    return np.select([np.isnan(values), np.isinf(values), values == 0], [255, 254, 0], exponents).astype(np.uint8)


def _floats_of_8_bits(values: Numbers) -> Numbers:
    """Bytes of E4M3; those of small values are 0x20 and more, and the first special value is one that means zero."""
    with np.errstate(invalid="ignore"):
        sizes = np.nan_to_num(np.minimum(np.abs(values), 1))
    ordinary = 0x20 + np.minimum(sizes / 0.003 * 16, 0x3F).astype(np.uint8)
    special = [np.isnan(values), np.isinf(values), values == 0, np.abs(values) < 1e-6, np.abs(values) > 1e3]
    return np.select(special, [0x7F, 0xFF, 0, 1, 0x7E], ordinary.astype(np.int64)).astype(np.uint8)
