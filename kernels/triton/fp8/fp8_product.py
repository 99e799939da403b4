"""fp8_product: x @ weight.T of floats of 8 bits (E4M3) with a scale for each 128 neighbours of K: numerics level L2.

Tensor cores multiply FP8 at twice the rate of 16-bit floats, but Hopper's keep only 13 bits behind the point of their
sums. So the products of each 128 neighbours are a sum of their own, which begins at 0. Times the scales of its row and
column it is added to a float32, from low K to high: a number is

    sums = fma(part, scale of the weights * scale of x, sums)        for each 128 neighbours of K

and then the bias. This is defined, whatever the shape of the tiles, if a part's bits do not depend on it. They do not:
all tiles have at least 64 weights, so that Hopper computes them by one kind of instruction, `wgmma`, which adds 32
products at a time. (Its `mma.sync` for smaller tiles keeps 25 bits: arXiv 2511.10909.)

x is quantized as it comes, each 128 numbers of a row by themselves: its scale is their largest size over 448. Or one
scale is given for all of x; then larger numbers than 448 times the scale become that.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.triton.e4m3 import to_e4m3
from kernels.triton.ordered_product import ProductTile, tile_place

#: Version of the arithmetic; part of the fingerprint.
ARITHMETIC = 1
#: Neighbours of K with one scale.
BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(448.0)
#: Tiles by the most rows for which they are used. Two float32 of each number are in registers, so larger ones do not
#: fit. A multiprocessor has room for two programs of the largest: one multiplies while the other adds.
TILES = {
    16: ProductTile(64, 16, BLOCK, 4, 6),
    32: ProductTile(64, 32, BLOCK, 4, 5),
    64: ProductTile(64, 64, BLOCK, 4, 4),
    1 << 62: ProductTile(64, 128, BLOCK, 4, 4),
}


class Fp8Rows(NamedTuple):
    """Rows of `depth` numbers: each is code * scale. The codes of numbers that fill up the last block are 0."""

    codes: torch.Tensor  # uint8 [rows, blocks * BLOCK]
    scales: torch.Tensor  # float32 [blocks, rows]
    depth: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a product reads."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def numbers(self) -> torch.Tensor:
        """Return the numbers float32 [rows, depth]."""
        rows, width = self.codes.shape
        blocks = self.codes.view(torch.float8_e4m3fn).float().view(rows, width // BLOCK, BLOCK)
        return (blocks * self.scales.T[:, :, None]).view(rows, width)[:, : self.depth]


# fmt: off
@triton.jit(do_not_specialize=["num_rows"])
def quantize_kernel(x, codes, scales, given, num_rows, depth, width, ROWS: tl.constexpr, IS_GIVEN: tl.constexpr):
    """Quantize one block of ROWS rows in each program. given: the scale, if there is one. width: of a row of codes."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1)
    column = block * _BLOCK + tl.arange(0, _BLOCK)
    there = row < num_rows
    inside = there[:, None] & (column < depth)[None, :]
    numbers = tl.load(x + row[:, None] * depth + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.full((ROWS,), 1.0, tl.float32) * given
    if not IS_GIVEN:
        scale = tl.div_rn(tl.max(tl.abs(numbers), 1), _LARGEST)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    quotients = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], (ROWS, _BLOCK)))
    tl.store(codes + row[:, None] * width + column[None, :], to_e4m3(quotients), mask=there[:, None])
    tl.store(scales + block * num_rows.to(tl.int64) + row, scale, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def fp8_product_kernel(
    x, x_scales, weight, scales, bias, out, num_rows, num_columns, width, out_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Compute BLOCK_M columns of BLOCK_N rows in each program. BLOCK_K: neighbours of K with one scale."""
    token, column = tile_place(num_rows, num_columns, BLOCK_M, BLOCK_N)
    rows, columns = tl.minimum(token, num_rows - 1), tl.minimum(column, num_columns - 1)
    k = tl.arange(0, BLOCK_K)
    weights_at = weight + columns.to(tl.int64)[:, None] * width + k[None, :]
    numbers_at = x + rows.to(tl.int64)[None, :] * width + k[:, None]
    scales_at, x_scales_at = scales + columns, x_scales + rows
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        part = tl.dot(tl.load(weights_at + start), tl.load(numbers_at + start))
        factors = tl.load(scales_at)[:, None] * tl.load(x_scales_at)[None, :]
        sums = tl.fma(part, factors, sums)
        scales_at += num_columns
        x_scales_at += num_rows
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[None, :] * out_columns + column[:, None]
    inside = (column < num_columns)[:, None] & (token < num_rows)[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)
# fmt: on


def rows_of_a_program(num_rows: int) -> tuple[int, int]:
    """Return how many of so many rows a program quantizes, and its warps."""
    return (16, 4) if num_rows > 16 else (1, 1)


def quantized(x: torch.Tensor, scale: float | None = None) -> Fp8Rows:
    """Return numbers [rows, depth] of any floating type as E4M3 and scales. scale: of all; None = each block's own.

    Numbers that are not finite become NaN, and with an infinite one its block does, if it has a scale of its own.
    """
    assert x.is_contiguous(), x.stride()
    (num_rows, depth), device = x.shape, x.device
    blocks = ceil_div(depth, BLOCK)
    codes = torch.empty(num_rows, blocks * BLOCK, dtype=torch.uint8, device=device)
    scales = torch.empty(blocks, num_rows, dtype=torch.float32, device=device)
    rows, warps = rows_of_a_program(num_rows)
    if num_rows:
        quantize_kernel[(ceil_div(num_rows, rows), blocks)](
            x,
            codes,
            scales,
            1.0 if scale is None else scale,
            num_rows,
            depth,
            blocks * BLOCK,
            ROWS=rows,
            IS_GIVEN=scale is not None,
            num_warps=warps,
        )
    return Fp8Rows(codes, scales, depth)


def fp8_tile(num_rows: int) -> ProductTile:
    """Return the tile for this many rows."""
    return next(tile for most, tile in TILES.items() if num_rows <= most)


def fp8_product(
    x: torch.Tensor,
    weight: Fp8Rows,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: ProductTile | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Quantize x [T, in], write its product with weight [out, in] plus bias into out [T, out], and return out.

    Results are rounded once to out's dtype. bias has any. tile: None = as the number of rows needs. scale: see
    quantized().
    """
    num_rows, num_columns = out.shape
    assert out.stride(1) == 1, out.stride()
    if not num_rows:
        return out
    tile, given = tile or fp8_tile(num_rows), quantized(x, scale)
    fp8_product_kernel[(ceil_div(num_rows, tile.rows) * ceil_div(num_columns, tile.columns),)](
        given.codes.view(torch.float8_e4m3fn),
        given.scales,
        weight.codes.view(torch.float8_e4m3fn),
        weight.scales,
        given.scales if bias is None else bias,
        out,
        num_rows,
        num_columns,
        weight.codes.shape[1],
        out.stride(0),
        HAS_BIAS=bias is not None,
        **tile.options,
    )
    return out
