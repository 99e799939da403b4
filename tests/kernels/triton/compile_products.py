"""The ordered products, and those of 8-bit floats, that compile_triton.py compiles."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kernels.triton.device import ROOM
from kernels.triton.fp8 import fp8_product
from kernels.triton.ordered_product import (
    FEW,
    FEW_IN_LITTLE,
    FEW_OF_MANY,
    FLOATS,
    TILES,
    TILES_IN_LITTLE,
    ProductTile,
    product_kernel,
)

HALF, FLOAT, E4M3 = "*bf16", "*fp32", "*fp8e4nv"


class Product(NamedTuple):
    dtype: torch.dtype
    tile: ProductTile
    is_even: bool = True
    has_bias: bool = True
    function: str = ""  # of a gated product

    def kernels(self) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
        """The product, with its arguments' types, constants and options as launched."""
        pointer = HALF if self.dtype == torch.bfloat16 else FLOAT
        sizes = dict.fromkeys(("num_rows", "num_columns", "depth", "out_columns"), "i32")
        types = {**dict.fromkeys(("x", "weight", "bias", "out"), pointer), **sizes}
        tile = self.tile.halves if self.function else self.tile
        blocks = {name: value for name, value in tile.options.items() if name.isupper()}
        rest = {name: value for name, value in tile.options.items() if not name.isupper()}
        constants = {"EVEN": self.is_even, "HAS_BIAS": self.has_bias, "FUNCTION": self.function}
        yield product_kernel, types, {**constants, **blocks}, rest


class Fp8Product(NamedTuple):
    tile: ProductTile
    has_bias: bool

    def kernels(self) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
        """The product, with its arguments' types, constants and options as launched."""
        sizes = dict.fromkeys(("num_rows", "num_columns", "width", "out_columns"), "i32")
        types = {"x": E4M3, "x_scales": FLOAT, "weight": E4M3, "scales": FLOAT, "bias": HALF, "out": HALF, **sizes}
        blocks = {name: value for name, value in self.tile.options.items() if name.isupper()}
        rest = {name: value for name, value in self.tile.options.items() if not name.isupper()}
        yield fp8_product.fp8_product_kernel, types, {"HAS_BIAS": self.has_bias, **blocks}, rest


def quantizers(*, every: bool) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """What quantizes rows for them: many, with their own scales; every: few, too, and with one that is given."""
    sizes = dict.fromkeys(("num_rows", "depth", "width"), "i32")
    types = {"x": HALF, "codes": "*u8", "scales": FLOAT, "given": "fp32", **sizes}
    for num_rows in (1, 99) if every else (99,):
        rows, warps = fp8_product.rows_of_a_program(num_rows)
        for is_given in (False, True) if every else (False,):
            yield fp8_product.quantize_kernel, types, {"ROWS": rows, "IS_GIVEN": is_given}, {"num_warps": warps}


def each_fp8_product(*, every: bool) -> Iterator[Fp8Product]:
    """The smallest and the largest tile, without a bias and with one; every: all, with both.

    The others have numbers of rows in between.
    """
    smallest, *_, largest = tiles = list(fp8_product.TILES.values())
    for tile in tiles if every else (smallest, largest):
        for has_bias in (False, True) if every else (tile == largest,):
            yield Fp8Product(tile, has_bias)


def tiles_of(shared_memory: int) -> list[ProductTile]:
    """Those of 16-bit floats on a device with so much shared memory."""
    if shared_memory < ROOM:
        return [FEW_IN_LITTLE, *TILES_IN_LITTLE.values()]
    return [FEW, FEW_OF_MANY, *TILES.values()]


def each_product(shared_memory: int, *, every: bool) -> Iterator[Product]:
    """Of each type the smallest, a middle and the largest tile, with and without a bias in turn, and the smallest and
    largest of gated products.

    every: all tiles with both, odd sizes, and all of gated products. The others have numbers of rows or columns in
    between, and the instructions of one of these.
    """
    halves = [(torch.bfloat16, tile) for tile in tiles_of(shared_memory)]
    floats = [(torch.float32, tile) for tile in FLOATS.values()]
    chosen = [*halves, *floats] if every else [halves[0], halves[len(halves) // 2], halves[-1], floats[0], floats[-1]]
    for turn, (dtype, tile) in enumerate(chosen):
        for is_even, has_bias in ((True, False), (False, True), (True, True)) if every else ((True, turn % 2 == 1),):
            yield Product(dtype, tile, is_even, has_bias)
    gated = [*halves, *floats] if every else [halves[0], halves[-1]]
    for dtype, tile in gated:
        for function in ("silu", "gelu_pytorch_tanh", "clamped_silu") if every else ("silu",):
            yield Product(dtype, tile, has_bias=function == "clamped_silu", function=function)
