"""The products of experts in Triton: gate and up with their activation, and down. A program computes part of one tile.

The reference is kernels/torch/experts.py. A pair's numbers depend only on its own token: each is one chain of sums, in
ascending order of K, in tiles of every shape; see dot() in device.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.device import dot
from kernels.triton.gated_activation import gated
from kernels.triton.routed.expert_tiles import ExpertTiles

#: Tiles whose programs run next to each other with the same columns, so that an expert's weights are read from memory
#: once.
_SIDE_BY_SIDE = tl.constexpr(8)


class TileShape(NamedTuple):
    """The rows and columns of a program's result, how many numbers of both it reads at a time, and compiler options."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return the arguments of a launch."""
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


#: FEW pairs per expert: reading the weights takes the time. SOME: one tile holds them. MANY: products take the time.
FEW, SOME, MANY = (
    TileShape(16, 64, 128, num_warps=4, num_stages=4),
    TileShape(64, 128, 64, num_warps=4, num_stages=4),
    TileShape(128, 256, 64, num_warps=8, num_stages=3),
)
#: Replaces MANY on devices with too little shared memory for it (compute capability 8.6 and 8.9).
MANY_IN_LITTLE = TileShape(128, 128, 64, num_warps=8, num_stages=3)
#: A float32 product, which has no matrix unit, is unrolled into registers.
FEW_FLOATS = TileShape(16, 64, 32, num_warps=4, num_stages=3)
MANY_FLOATS = TileShape(64, 64, 16, num_warps=8, num_stages=3)


def tile_shape(num_pairs: int, num_experts: int, dtype: torch.dtype, *, has_room: bool) -> TileShape:
    """Return the shape for num_pairs pairs. has_room: whether the device has enough shared memory for MANY."""
    if dtype.itemsize == 4:
        return FEW_FLOATS if num_pairs <= 8 * num_experts else MANY_FLOATS
    if num_pairs <= 8 * num_experts:
        return FEW
    if num_pairs <= 48 * num_experts:
        return SOME
    return MANY if has_room else MANY_IN_LITTLE


@triton.jit
def _tile_and_columns(TILES_N: tl.constexpr):
    """Return this program's tile, and which of the tile's TILES_N parts."""
    num_tiles = tl.num_programs(0) // TILES_N
    program = tl.program_id(0)
    first = program // (_SIDE_BY_SIDE * TILES_N) * _SIDE_BY_SIDE
    count = tl.minimum(num_tiles - first, _SIDE_BY_SIDE)
    rest = program % (_SIDE_BY_SIDE * TILES_N)
    return first + rest % count, rest // count


# fmt: off
@triton.jit
def _multiply(
    x, weight, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Multiply rows of DEPTH numbers at x [BLOCK_M] with those at weight [BLOCK_N] -> [BLOCK_M, BLOCK_N] float32."""
    k = tl.arange(0, BLOCK_K)
    x = x[:, None] + k[None, :]
    weight = weight[None, :] + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            rows = tl.load(x + start)
            columns = tl.load(weight + start)
        else:
            rows = tl.load(x + start, mask=(start + k < DEPTH)[None, :], other=0.0)
            columns = tl.load(weight + start, mask=(start + k < DEPTH)[:, None], other=0.0)
        total = dot(rows, columns, total)
    return total


@triton.jit
def gate_up_kernel(
    x, weight, bias, order, bounds, out,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, NUM_CHOSEN: tl.constexpr, FUNCTION: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute f(gate) * up of a tile's tokens, for BLOCK_N // 2 columns. Columns of gate and up alternate."""
    HALF: tl.constexpr = BLOCK_N // 2
    tile, part = _tile_and_columns((WIDTH + HALF - 1) // HALF)
    expert = tl.load(bounds + tile * 3).to(tl.int64)
    first = tl.load(bounds + tile * 3 + 1)
    end = tl.load(bounds + tile * 3 + 2)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    token = (tl.load(order + tl.minimum(row, end - 1)) // NUM_CHOSEN).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    column = tl.minimum(part * HALF + n // 2, WIDTH - 1) + n % 2 * WIDTH
    total = _multiply(
        x + token * HIDDEN, weight + expert * (2 * WIDTH * HIDDEN) + column.to(tl.int64) * HIDDEN,
        HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    if HAS_BIAS:
        total += tl.load(bias + expert * (2 * WIDTH) + column).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, (BLOCK_M, HALF, 2)))
    column = part * HALF + tl.arange(0, HALF)
    at = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    result = gated(gate, up, FUNCTION).to(out.dtype.element_ty)
    tl.store(at, result, mask=(row < end)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def down_kernel(
    x, weight, bias, order, bounds, out,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of a tile's results.

    Rows of x are in the order of places, those of out in that of pairs.
    """
    tile, part = _tile_and_columns((HIDDEN + BLOCK_N - 1) // BLOCK_N)
    expert = tl.load(bounds + tile * 3).to(tl.int64)
    first = tl.load(bounds + tile * 3 + 1)
    end = tl.load(bounds + tile * 3 + 2)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    inside = tl.minimum(row, end - 1)
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, HIDDEN - 1)
    total = _multiply(
        x + inside.to(tl.int64) * WIDTH, weight + expert * (HIDDEN * WIDTH) + read.to(tl.int64) * WIDTH,
        WIDTH, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    if HAS_BIAS:
        total += tl.load(bias + expert * HIDDEN + read).to(tl.float32)[None, :]
    at = out + tl.load(order + inside).to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < HIDDEN)[None, :])
# fmt: on


class StackedProduct(NamedTuple):
    """The same product for all experts: weight [E, out, in], bias [E, out] or None; contiguous, with one dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def gate_up_products(
    x: torch.Tensor, product: StackedProduct, tiles: ExpertTiles, num_chosen: int, function: str, shape: TileShape
) -> torch.Tensor:
    """Return f(gate) * up [P, I] for tokens x [T, d], in the order of the tiles' places.

    The rows of product's weight are those of gate, then those of up.
    """
    weight, bias = product
    width = weight.shape[1] // 2
    assert x.is_contiguous(), x.stride()
    out = x.new_empty(len(tiles.order), width)
    gate_up_kernel[(len(tiles.bounds) * triton.cdiv(width, shape.columns // 2),)](
        x,
        weight,
        weight if bias is None else bias,
        *tiles,
        out,
        HIDDEN=x.shape[1],
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        FUNCTION=function,
        HAS_BIAS=bias is not None,
        **shape.options,
    )
    return out


def down_products(x: torch.Tensor, product: StackedProduct, tiles: ExpertTiles, shape: TileShape) -> torch.Tensor:
    """Return the products [P, d], in the order of pairs, for x [P, I], which is in the order of the tiles' places."""
    weight, bias = product
    hidden = weight.shape[1]
    out = x.new_empty(len(x), hidden)
    down_kernel[(len(tiles.bounds) * triton.cdiv(hidden, shape.columns),)](
        x,
        weight,
        weight if bias is None else bias,
        *tiles,
        out,
        WIDTH=x.shape[1],
        HIDDEN=hidden,
        HAS_BIAS=bias is not None,
        **shape.options,
    )
    return out
