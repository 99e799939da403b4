"""ordered_product: x @ weight.T in which each number is one chain of sums, in ascending order of K: numerics level L2.

How many rows there are chooses the shape of the tiles, which changes no bit; see dot() in device.py. Nothing is split
along K, and there are no atomics. The weights are the left operand of the tensor cores' products, which have at least
16 rows there, so that few rows of x fill the right one.

A gated product has the activation in its end: gate and up of a number are sums of one program, each a chain of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.triton.device import dot, has_room
from kernels.triton.gated_activation import gated

#: Version of the arithmetic, with that of kernels/triton/arithmetic/; part of the fingerprint.
ARITHMETIC = 2
#: Tiles of rows whose programs run next to each other with the same weights, so that these are read from memory once.
_SIDE_BY_SIDE = tl.constexpr(8)


class ProductTile(NamedTuple):
    """A program's tile: columns and rows of the result, how many neighbours of K it loads at a time, and options."""

    columns: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def halves(self) -> "ProductTile":
        """Return the tile for as many columns of gate and up together: half as many of a gated product's result."""
        return self._replace(columns=self.columns // 2)

    @property
    def options(self) -> dict[str, int]:
        """Return the arguments of a launch."""
        blocks = {"BLOCK_M": self.columns, "BLOCK_N": self.rows, "BLOCK_K": self.depth}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


#: Columns of a product from which the larger of two tiles of FEW rows is enough to keep a device busy.
_MANY_COLUMNS = 16384
FEW, FEW_OF_MANY = ProductTile(32, 16, 128, 4, 5), ProductTile(64, 16, 128, 4, 6)
#: Others by the most rows for which they are used.
TILES = {
    32: ProductTile(64, 32, 128, 4, 4),
    64: ProductTile(64, 64, 128, 4, 4),
    256: ProductTile(128, 128, 64, 8, 4),
    1 << 62: ProductTile(128, 256, 64, 8, 3),
}
#: Replace the others on devices whose shared memory has no room for them.
FEW_IN_LITTLE = ProductTile(64, 16, 128, 4, 3)
TILES_IN_LITTLE = {
    64: ProductTile(64, 64, 64, 4, 4),
    1 << 62: ProductTile(128, 128, 64, 8, 3),
}
#: A float32 product, which has no matrix unit, is unrolled into registers.
FLOATS = {16: ProductTile(64, 16, 32, 4, 3), 1 << 62: ProductTile(64, 64, 16, 8, 3)}


def product_tile(num_rows: int, num_columns: int, dtype: torch.dtype, *, room: bool) -> ProductTile:
    """Return the tile for this many rows and columns. room: see has_room()."""
    tiles = TILES if room else TILES_IN_LITTLE
    if dtype.itemsize == 4:
        tiles = FLOATS
    elif num_rows <= FEW.rows:
        few = FEW if num_columns < _MANY_COLUMNS else FEW_OF_MANY
        return few if room else FEW_IN_LITTLE
    return next(tile for most, tile in tiles.items() if num_rows <= most)


# fmt: off
@triton.jit
def tile_place(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a program's rows [BLOCK_N] and columns [BLOCK_M] of the result, some of which may be outside of it."""
    num_tiles, parts = tl.cdiv(num_rows, BLOCK_N), tl.cdiv(num_columns, BLOCK_M)
    program = tl.program_id(0)
    first = program // (_SIDE_BY_SIDE * parts) * _SIDE_BY_SIDE
    count = tl.minimum(num_tiles - first, _SIDE_BY_SIDE)
    rest = program % (_SIDE_BY_SIDE * parts)
    token = (first + rest % count) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = rest // count * BLOCK_M + tl.arange(0, BLOCK_M)
    return token, column


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x, weight, bias, out, num_rows, num_columns, depth, out_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """Compute BLOCK_M columns of BLOCK_N rows in each program. EVEN: whole tiles of K cover the depth.

    FUNCTION: that of a gated product, whose weights are num_columns of gate and then as many of up; "" = none.
    """
    token, column = tile_place(num_rows, num_columns, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weights_at = weight + tl.minimum(column, num_columns - 1).to(tl.int64)[:, None] * depth + k[None, :]
    numbers_at = x + tl.minimum(token, num_rows - 1).to(tl.int64)[None, :] * depth + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FUNCTION != "":
        ups_at = weights_at + num_columns.to(tl.int64) * depth
        up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            weights = tl.load(weights_at + start)
            numbers = tl.load(numbers_at + start)
        else:
            weights = tl.load(weights_at + start, mask=(start + k < depth)[None, :], other=0.0)
            numbers = tl.load(numbers_at + start, mask=(start + k < depth)[:, None], other=0.0)
        sums = dot(weights, numbers, sums)
        if FUNCTION != "":
            if EVEN:
                ups = tl.load(ups_at + start)
            else:
                ups = tl.load(ups_at + start, mask=(start + k < depth)[None, :], other=0.0)
            up_sums = dot(ups, numbers, up_sums)
    if HAS_BIAS:
        bias += column
        sums += tl.load(bias, mask=column < num_columns, other=0.0).to(tl.float32)[:, None]
    if FUNCTION != "":
        if HAS_BIAS:
            up_sums += tl.load(bias + num_columns, mask=column < num_columns, other=0.0).to(tl.float32)[:, None]
        # rounded as they would be in memory, so that the bits are those of the product and then the activation
        gate, up = sums.to(out.dtype.element_ty).to(tl.float32), up_sums.to(out.dtype.element_ty).to(tl.float32)
        sums = gated(gate, up, FUNCTION)
    target = out + token.to(tl.int64)[None, :] * out_columns + column[:, None]
    inside = (column < num_columns)[:, None] & (token < num_rows)[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)
# fmt: on


def ordered_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: ProductTile | None = None
) -> torch.Tensor:
    """Write x [T, in] @ weight.T plus bias into out [T, out], rounded once to its dtype, and return it.

    weight [out, in] has x's dtype; bias has any. out's rows may be part of longer ones. tile: None = as the sizes need.
    """
    if tile is None:
        tile = product_tile(len(x), len(weight), x.dtype, room=has_room(x.device))
    return _run(x, weight, bias, out, tile)


def gated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    function: str,
    tile: ProductTile | None = None,
) -> torch.Tensor:
    """Return f(gate) * up [T, width] for x [T, in], with the bits of ordered_product() and then that activation.

    weight [2 * width, in]: gate, then up. function: see gated(). tile: of gate and up together; None = as the sizes
    need.
    """
    if tile is None:
        tile = product_tile(len(x), len(weight), x.dtype, room=has_room(x.device))
    return _run(x, weight, bias, x.new_empty(len(x), len(weight) // 2), tile.halves, function)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: ProductTile,
    function: str = "",
) -> torch.Tensor:
    (num_rows, depth), num_columns = x.shape, out.shape[1]
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert out.stride(1) == 1, out.stride()
    if not num_rows:
        return out
    product_kernel[(ceil_div(num_rows, tile.rows) * ceil_div(num_columns, tile.columns),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_columns,
        depth,
        out.stride(0),
        EVEN=depth % tile.depth == 0,
        HAS_BIAS=bias is not None,
        FUNCTION=function,
        **tile.options,
    )
    return out
