"""A device's self-test at start: whether its products are what numerics level L2 rests on; see dot() in device.py."""

import zlib
from functools import cache

import torch

from kernels.triton.device import has_room
from kernels.triton.fp8.fp8_product import TILES as FP8_TILES
from kernels.triton.fp8.fp8_product import fp8_product, quantized
from kernels.triton.ordered_product import (
    FEW,
    FEW_IN_LITTLE,
    FEW_OF_MANY,
    FLOATS,
    TILES,
    TILES_IN_LITTLE,
    ordered_product,
)

_ROWS, _DEPTH, _COLUMNS = 9, 384, 40


@cache
def products_are_ordered(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether tiles of all shapes give the same bits, for numbers whose sums depend on their order.

    This runs each shape's kernel once, which compiles it.
    """
    return len(set(tile_digests(device, dtype))) == 1


def tile_digests(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """Return the CRC-32 of the same product by tiles of each shape."""
    x, weight = (numbers.to(device, dtype) for numbers in factors())
    tiles = [FEW, FEW_OF_MANY, *TILES.values()] if has_room(device) else [FEW_IN_LITTLE, *TILES_IN_LITTLE.values()]
    if dtype.itemsize == 4:
        tiles = list(FLOATS.values())
    out = torch.empty(_ROWS, _COLUMNS, device=device)
    results = (ordered_product(x, weight, None, out.clone(), tile) for tile in tiles)
    return [_digest(result) for result in results]


@cache
def fp8_products_are_ordered(device: torch.device) -> bool:
    """Return whether tiles of all shapes give the same bits of products of 8-bit floats, as above."""
    return len(set(fp8_tile_digests(device))) == 1


def fp8_tile_digests(device: torch.device) -> list[int]:
    """Return the CRC-32 of the same product of 8-bit floats by tiles of each shape."""
    x, weight = (numbers.to(device) for numbers in factors())
    rows, out = quantized(weight), torch.empty(_ROWS, _COLUMNS, device=device)
    return [_digest(fp8_product(x, rows, None, out.clone(), tile)) for tile in FP8_TILES.values()]


def _digest(result: torch.Tensor) -> int:
    return zlib.crc32(result.cpu().numpy().tobytes())


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, in] and weight [out, in] float32. Their sizes differ by up to 2 ** 24."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        sizes = torch.exp2(torch.randint(-12, 12, (count, _DEPTH), generator=generator).float())
        return torch.randint(-127, 128, (count, _DEPTH), generator=generator) * sizes

    return drawn(_ROWS), drawn(_COLUMNS)
