"""Products in 8 bits by the definition in c/products/int8.h, in NumPy: each operation rounds as it says there."""

from typing import NamedTuple

import numpy as np

from ipc.tables.arrays import Floats
from kernels.cpu.quantized import BlockRows
from kernels.dequantize import BLOCK_SIZES, dequantize
from kernels.elements import Numbers, to_floats

GROUP = 32
#: Bytes of a block that hold codes -> what makes all codes 1, by K type.
_ONES = {"Q4_K": [(16, 144, 0x11)], "Q5_K": [(16, 48, 0), (48, 176, 0x11)], "Q6_K": [(0, 128, 0x11), (128, 192, 0xAA)]}


class Parts(NamedTuple):
    """What rows of blocks stand for, by groups of 32 numbers."""

    codes: Numbers  # int64 [rows, groups, 2, 16], zero taken off
    scales: Floats  # [rows, groups, 2]
    minima: Floats  # [rows, groups]


def parts_of(rows: BlockRows) -> Parts:
    """The codes and scales, found by dequantizing blocks whose factors are 1."""
    name, groups = rows.type_name, rows.depth // GROUP

    def numbers(data: Numbers) -> Floats:
        return dequantize(np.ascontiguousarray(data).reshape(-1), name).reshape(len(rows.data), groups, 2, 16)

    blocks = rows.data.reshape(len(rows.data), -1, BLOCK_SIZES[name][1])
    factors = _factors(blocks, name).astype(np.float32)
    per_factor = BLOCK_SIZES[name][0] // GROUP
    plain = blocks.copy()
    _factors(plain, name)[...] = [1.0, 0.0][: factors.shape[-1]]
    codes = numbers(plain)
    scales = np.repeat(factors[..., 0], per_factor, 1)[..., None].repeat(2, 2)
    minima = np.repeat(factors[..., -1], per_factor, 1) if factors.shape[-1] == 2 else np.zeros((1, groups), np.float32)
    if name in _ONES:
        for begin, end, value in _ONES[name]:
            plain[..., begin:end] = value
        own = numbers(plain)[..., 0]  # each group's integer scale
        codes, scales = codes / np.where(own, own, 1)[..., None], scales * own
        if name != "Q6_K":
            _factors(plain, name)[...] = [0.0, 1.0]
            minima = numbers(plain)[..., 0, 0] * minima
    return Parts(codes.astype(np.int64), scales, minima)


def _factors(blocks: Numbers, name: str) -> Numbers:
    begin, count = (208, 1) if name == "Q6_K" else (0, 2 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1)
    found: Numbers = blocks[..., begin : begin + 2 * count].view(np.float16)
    return found


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
    whole = codes.sum(2).astype(np.float32)
    y = np.zeros((len(x), len(weights.codes)), np.float32)
    has_halves = not np.array_equal(weights.scales[..., 0], weights.scales[..., 1])
    for group in range(codes.shape[1]):
        of_group, scales = sums[:, :, group], weights.scales[:, group]
        if has_halves:
            value = (
                of_group[..., 0].astype(np.float32) * scales[:, 0] + of_group[..., 1].astype(np.float32) * scales[:, 1]
            )
        else:
            value = of_group.sum(2).astype(np.float32) * scales[:, 0]
        if weights.minima.any():
            value = value + whole[:, group, None] * weights.minima[:, group]
        y = y + value * scale[:, group, None]
    return y
