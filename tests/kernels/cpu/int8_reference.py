"""Products in 8 bits by the definition in c/products/int8.h, in NumPy: each operation rounds as it says there."""

from typing import NamedTuple

import numpy as np

from ipc.tables.arrays import Floats
from kernels.cpu.quantized import BlockRows
from kernels.dequantize import BLOCK_SIZES, LEVELS, dequantize
from kernels.elements import Numbers, to_floats
from tests.kernels.block_scales import BYTE_SCALES, factors, num_scales, set_scales

GROUP = 32
#: Type -> bytes that hold integer scales: where they are, which of their bits are kept, and which are set, so that each
#: scale is 1 (in Q2_K each minimum 0, in types with a grid 2 s + 1 = 1).
_PLAIN_SCALES: dict[str, list[tuple[slice, int, int]]] = {
    "Q2_K": [(slice(0, 16), 0, 1)],
    "Q3_K": [(slice(96, 104), 0, 0x11), (slice(104, 108), 0, 0xAA)],
    "Q4_K": [(slice(4, 8), 0, 1), (slice(8, 12), 0, 0), (slice(12, 16), 0, 1)],
    "Q5_K": [(slice(4, 8), 0, 1), (slice(8, 12), 0, 0), (slice(12, 16), 0, 1)],
    "Q6_K": [(slice(192, 208), 0, 1)],
    "IQ4_XS": [(slice(2, 4), 0, 0xAA), (slice(4, 8), 0, 0x11)],
    "MXFP4": [(slice(0, 1), 0, 128)],
    "NVFP4": [(slice(0, 4), 0, 0x40)],
    "IQ2_XXS": [(slice(9, None, 8), 0x0F, 0)],
    "IQ2_XS": [(slice(66, 74), 0, 0)],
    "IQ2_S": [(slice(74, 82), 0, 0)],
    "IQ3_XXS": [(slice(69, None, 4), 0x0F, 0)],
    "IQ3_S": [(slice(106, 110), 0, 0)],
    "IQ1_S": [(slice(35, None, 2), 0x8F, 0)],
    "IQ1_M": [(slice(48, None, 2), 0, 0), (slice(49, None, 2), 0xF0, 0)],
}
#: The same bytes set so that minima are 1 and what is subtracted from is 0.
_PLAIN_MINIMA = {
    "Q2_K": [(slice(16, 80), 0, 0)],
    "Q4_K": [(slice(16, 144), 0, 0)],
    "Q5_K": [(slice(16, 176), 0, 0)],
}
_HALVES = ("Q2_K", "Q3_K", "Q6_K", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
_EIGHTHS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")


class Parts(NamedTuple):
    """What rows of blocks stand for, by groups of 32 numbers and their halves."""

    codes: Numbers  # int64 [rows, groups, 2, 16], zero taken off
    scales: Floats  # [rows, groups, 2]
    minima: Floats | None  # [rows, groups, 2]
    has_halves: bool  # whether each half has a scale


def parts_of(rows: BlockRows) -> Parts:
    """The codes and scales, found by dequantizing blocks of which some bytes are set to known values."""
    name, groups = rows.type_name, rows.depth // GROUP
    blocks = rows.data.reshape(len(rows.data), -1, BLOCK_SIZES[name][1])

    if name == "NVFP4_F32":
        return _parts_of_nvfp4(blocks, groups)

    def numbers(data: Numbers) -> Floats:
        return dequantize(np.ascontiguousarray(data).reshape(-1), name).reshape(len(rows.data), groups, 2, 16)

    ones, plain = blocks.copy(), blocks.copy()
    has_factors = name not in BYTE_SCALES
    per_factor = BLOCK_SIZES[name][0] // GROUP
    if has_factors:
        set_scales(ones, name, [1.0, 0.0][: num_scales(name)])
        set_scales(plain, name, [1.0, 0.0][: num_scales(name)])
    _set(plain, _PLAIN_SCALES.get(name, []))
    unit = np.float32(0.125 if name in _EIGHTHS else 0.25 if name == "IQ3_XXS" else 1)
    codes = numbers(plain) / unit
    own = np.where(codes != 0, numbers(ones) / np.where(codes, codes, 1), 0)  # each part's scale with a factor of 1
    scales = np.take_along_axis(own, np.abs(codes).argmax(-1)[..., None], -1)[..., 0].astype(np.float32)
    if name not in _HALVES:
        scales = np.where(np.abs(scales[..., :1]) > 0, scales[..., :1], scales[..., 1:]).repeat(2, -1)
    minima = None
    if has_factors:
        found = np.repeat(factors(blocks, name).astype(np.float32), per_factor, 1)
        scales = scales * found[..., :1]
        if found.shape[-1] == 2:
            set_scales(ones, name, [0.0, 1.0])
            _set(ones, _PLAIN_MINIMA.get(name, []))
            minima = numbers(ones)[..., 0] * found[..., 1:]
    return Parts(codes.astype(np.int64), scales, minima, name in _HALVES)


def _parts_of_nvfp4(blocks: Numbers, groups: int) -> Parts:
    """The same of a type whose scales are quotients."""
    rows = len(blocks)
    packed = blocks[..., 8:]
    codes = np.array(LEVELS["NVFP4_F32"])[np.stack((packed & 15, packed >> 4), -1)].reshape(rows, groups, 2, 16)
    halves = (blocks[..., 4:8].astype(np.uint16) << 7).view(np.float16).astype(np.float32) * np.float32(128)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = halves / np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    return Parts(codes.astype(np.int64), scales.reshape(rows, groups, 2), None, True)


def _set(blocks: Numbers, places: list[tuple[slice, int, int]]) -> None:
    for place, kept, value in places:
        blocks[..., place] = blocks[..., place] & kept | value


def product(x: Numbers, weights: Parts) -> Floats:
    """y [T, rows] float32 of x [T, depth]."""
    blocks = to_floats(x).reshape(len(x), -1, GROUP)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        largest = np.abs(blocks).max(2)
        is_bad, is_zero = ~np.isfinite(largest), largest < np.float32(1e-30)
        inverse = np.where(is_bad | is_zero, 0, np.float32(127) / largest).astype(np.float32)
        scale = np.where(is_bad, np.nan, np.where(is_zero, 0, largest / np.float32(127))).astype(np.float32)
        codes = np.rint(np.where(is_bad[..., None], 0, blocks) * inverse[..., None]).astype(np.int64)
    halves = codes.reshape(*codes.shape[:2], 2, 16)
    sums = np.einsum("tghk,nghk->tngh", halves, weights.codes)
    of_x = halves.sum(3)
    y = np.zeros((len(x), len(weights.codes)), np.float32)
    for group in range(codes.shape[1]):
        of_group, scales = sums[:, :, group], weights.scales[:, group]
        of_parts = [of_group[..., half] for half in (0, 1)] if weights.has_halves else [of_group.sum(2)]
        of_x_parts = [of_x[:, group, half] for half in (0, 1)] if weights.has_halves else [of_x[:, group].sum(1)]
        value = of_parts[0].astype(np.float32) * scales[:, 0]
        for part in of_parts[1:]:
            value = value + part.astype(np.float32) * scales[:, 1]
        for half, part in enumerate(of_x_parts if weights.minima is not None else []):
            value = value + part.astype(np.float32)[:, None] * weights.minima[:, group, half]
        y = y + value * scale[:, group, None]
    return y
