"""packed_product: x @ weight.T with weights that are unpacked in the kernel. Sums are float32.

Tensor cores multiply a tile of weights, rounded to x's type, by the rows of x, at least 16. A product with few columns
may be split along its depth, because a GPU has more processors than it has tiles; the parts' sums are added in order.
Without parts each number is one chain of sums, in ascending order of K: that of ordered_product().
"""

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.torch.packed_rows import HALF, PackedRows
from kernels.triton.device import dot, power_of_2
from kernels.triton.packed_tile import TILE_BYTES, constants, unpacked

TILE_COLUMNS = 64  # of the product: rows of weights
_FEW_ROWS, _MOST_TILE_ROWS = 32, 128
#: Programs of a product with few rows, and with more: four and two for each of an H100's 132 processors, as many as fit
#: in their registers.
_NUM_PROGRAMS, _NUM_LARGE_PROGRAMS = 528, 264
_LEAST_TILES = 4  # that one program sums
_MERGED = 1024  # numbers per program of merge_parts_kernel


# fmt: off
@triton.jit(do_not_specialize=["num_rows"])
def multiply_packed_kernel(
    x, codes, scales, fine, minima, fine_minima, bias, out, partial_sums, num_rows, num_columns, depth, width,
    num_groups, split_tiles, first_column, out_columns,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BIT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr,
    MINIMA: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Compute BLOCK_N columns of BLOCK_M rows per program, or their sum over one part of the depth.

    width: bytes of codes per row, of which a program takes split_tiles tiles. DIRECT: there is one part.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(column, num_columns - 1).to(tl.int64)
    source = x + tl.minimum(token, num_rows - 1).to(tl.int64)[None, :] * depth
    WEIGHTS: tl.constexpr = BLOCK_K * 8 // (8 if BITS > 4 else 4)  # of a tile of codes
    place = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * split_tiles
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(begin, tl.minimum(begin + split_tiles, tl.cdiv(width, BLOCK_K))):
        first, group, at = tile * WEIGHTS, tile * (WEIGHTS // GROUP), tile * BLOCK_K + place
        packed = _loaded(codes + row[:, None] * width + at[None, :], (at < width)[None, :], EVEN)
        numbers = _loaded(source + (first + place)[:, None], (at < width)[:, None], EVEN)
        placed = packed.to(tl.int32) << BIT
        weights = unpacked(
            placed, row, first, group, num_groups, depth, scales, fine, minima, fine_minima, BIT, BITS,
            ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
        )
        sums = dot(weights.to(x.dtype.element_ty), numbers, sums)
        if BITS == 4:
            numbers = _loaded(source + (first + BLOCK_K + place)[:, None], (at < width)[:, None], EVEN)
            weights = unpacked(
                placed, row, first + BLOCK_K, group + BLOCK_K // GROUP, num_groups, depth, scales, fine, minima,
                fine_minima, BIT + 4, BITS, ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
            )
            sums = dot(weights.to(x.dtype.element_ty), numbers, sums)
    inside = (column < num_columns)[:, None] & (token < num_rows)[None, :]
    if DIRECT:
        if HAS_BIAS:
            sums += tl.load(bias + first_column + row)[:, None].to(tl.float32)
        target = out + token.to(tl.int64)[None, :] * out_columns + first_column + column[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=inside)
    else:
        part = tl.program_id(1).to(tl.int64) * num_rows + token
        tl.store(partial_sums + part[None, :] * num_columns + column[:, None], sums, mask=inside)


@triton.jit
def _loaded(places, inside, EVEN: tl.constexpr):
    """Return what is stored there, and zeros outside. EVEN: nothing is outside."""
    if EVEN:
        return tl.load(places)
    else:  # without it Triton compiles both  # noqa: RET505
        return tl.load(places, mask=inside, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def merge_parts_kernel(
    bias, out, partial_sums, num_rows, num_columns, first_column, out_columns,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Add BLOCK numbers of all parts per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(partial_sums + (part * num_rows + token) * num_columns + column, mask=inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + first_column + column, mask=inside, other=0.0).to(tl.float32)
    target = out + token * out_columns + first_column + column
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)
# fmt: on


def packed_product(
    x: torch.Tensor,
    weight: PackedRows,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    first_column: int = 0,
    *,
    in_parts: bool = False,
) -> None:
    """Write x [T, depth] @ weight.T plus the bias, rounded once, into columns of out [T, columns].

    x and out are contiguous, and T is at least 1. The columns start at first_column; the bias is for all columns.
    in_parts: few columns are split along their depth, in a way that depends on the number of rows.
    """
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    num_rows, (num_columns, width) = len(x), weight.codes.shape
    tile_rows = min(_MOST_TILE_ROWS, max(16, power_of_2(num_rows)))
    tile_bytes = bytes_of_tile(weight, tile_rows)
    split_tiles, parts = ceil_div(width, tile_bytes), 1
    if in_parts:
        split_tiles, parts = split_product(num_columns, width, tile_rows, tile_bytes)
    shape = (parts, num_rows, num_columns) if parts > 1 else (1,)
    partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    fields = (weight.scales if one is None else one for one in (weight.fine, weight.minima, weight.fine_minima))
    multiply_packed_kernel[ceil_div(num_columns, TILE_COLUMNS), parts, ceil_div(num_rows, tile_rows)](
        x,
        weight.codes,
        weight.scales,
        *fields,
        x if bias is None else bias,
        out,
        partial_sums,
        num_rows,
        num_columns,
        weight.depth,
        width,
        weight.depth // weight.group,
        split_tiles,
        first_column,
        out.shape[1],
        BLOCK_N=TILE_COLUMNS,
        BLOCK_M=tile_rows,
        BLOCK_K=tile_bytes,
        EVEN=width % tile_bytes == 0,
        DIRECT=parts == 1,
        HAS_BIAS=bias is not None,
        **constants(weight),
    )
    if parts > 1:
        grid = num_rows, ceil_div(num_columns, _MERGED)
        has_bias = bias is not None
        options = {"PARTS": parts, "BLOCK": _MERGED, "HAS_BIAS": has_bias}
        merge_parts_kernel[grid](
            bias if has_bias else x, out, partial_sums, num_rows, num_columns, first_column, out.shape[1], **options
        )


def bytes_of_tile(weight: PackedRows, tile_rows: int) -> int:
    """Return the bytes of codes per tile row: fewer if registers would run short. Four bits are stored in tiles."""
    return HALF if tile_rows > _FEW_ROWS or weight.in_4_bits else TILE_BYTES


def split_product(num_columns: int, width: int, tile_rows: int, tile_bytes: int) -> tuple[int, int]:
    """Return the tiles of a row's codes per program, and the resulting number of parts."""
    tiles, programs = ceil_div(width, tile_bytes), _NUM_PROGRAMS if tile_rows <= _FEW_ROWS else _NUM_LARGE_PROGRAMS
    wanted = min(programs // ceil_div(num_columns, TILE_COLUMNS), tiles // _LEAST_TILES)
    split_tiles = ceil_div(tiles, max(1, wanted))
    return split_tiles, ceil_div(tiles, split_tiles)
