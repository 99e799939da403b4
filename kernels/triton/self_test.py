"""A device's self-test at start: whether its products are what numerics level L2 rests on; see dot() in device.py."""

from functools import cache

import torch

from kernels.triton.device import has_room
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
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        sizes = torch.exp2(torch.randint(-12, 12, (count, _DEPTH), generator=generator).float())
        return (torch.randn(count, _DEPTH, generator=generator) * sizes).to(device, dtype)

    x, weight = drawn(_ROWS), drawn(_COLUMNS)
    tiles = [FEW, FEW_OF_MANY, *TILES.values()] if has_room(device) else [FEW_IN_LITTLE, *TILES_IN_LITTLE.values()]
    if dtype.itemsize == 4:
        tiles = list(FLOATS.values())
    results = [ordered_product(x, weight, None, x.new_empty(_ROWS, _COLUMNS), tile) for tile in tiles]
    return all(torch.equal(results[0], each) for each in results[1:])
