"""ExpertTiles: pairs of a token and one of its experts, sorted by expert and split into tiles with one expert each.

One program per expert finds its pairs, in token order, without atomic counters. The number of tiles depends on the
data, so an upper bound derived from the sizes is allocated, and some tiles are empty.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SORT_BLOCK = 2048
NUM_WARPS = 8


class ExpertTiles(NamedTuple):
    """The sorted pairs of a batch, P = T * num_chosen, and their tiles. int32, on the device."""

    order: torch.Tensor  # [P] numbers of pairs: token * num_chosen + the expert's index for the token
    bounds: torch.Tensor  # [tiles, 3] for each tile: expert, the first of its places in order, their end

    @classmethod
    def allocate(cls, num_pairs: int, num_experts: int, tile_rows: int, device: torch.device) -> "ExpertTiles":
        """Allocate room for num_pairs pairs."""
        order = torch.empty(num_pairs, dtype=torch.int32, device=device)
        num_tiles = min(num_pairs, _most_tiles(num_pairs, num_experts, tile_rows))
        return cls(order, torch.empty((num_tiles, 3), dtype=torch.int32, device=device))


def _most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return the number of tiles if every expert has one more than the whole tiles that its pairs fill."""
    return num_pairs // tile_rows + num_experts


@triton.jit(do_not_specialize=["num_pairs", "is_few"])
def sort_kernel(experts, order, bounds, num_pairs, is_few, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sort one expert's pairs and write its tiles.

    is_few: there are as many tiles as pairs; an expert's tiles start at the number of pairs before it. Otherwise they
    start at the number of whole tiles in those, plus one for each earlier expert.
    """
    expert = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        numbers = tl.load(experts + start + j, mask=start + j < num_pairs, other=1 << 30)
        lower += (numbers < expert).to(tl.int32)
        own += (numbers == expert).to(tl.int32)
    first = tl.sum(lower, 0)
    count = tl.sum(own, 0)
    place = first - 1
    for start in range(0, num_pairs, BLOCK):
        mine = tl.load(experts + start + j, mask=start + j < num_pairs, other=1 << 30) == expert
        tl.store(order + place + tl.cumsum(mine.to(tl.int32), 0), start + j, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    begin = tl.where(is_few > 0, first, first // TILE_ROWS + expert)
    num_tiles = tl.where(is_few > 0, count, (first + count) // TILE_ROWS + expert + 1 - begin)
    for start in range(0, num_tiles, BLOCK):
        tile = start + j
        row = tl.minimum(first + tile * TILE_ROWS, first + count)
        bound = bounds + (begin + tile) * 3
        tl.store(bound, expert, mask=tile < num_tiles)
        tl.store(bound + 1, row, mask=tile < num_tiles)
        tl.store(bound + 2, tl.minimum(row + TILE_ROWS, first + count), mask=tile < num_tiles)


def sort_pairs(experts: torch.Tensor, num_experts: int, tile_rows: int, tiles: ExpertTiles) -> None:
    """Sort the pairs of experts [T, num_chosen] int32 contiguous into tiles of at most tile_rows."""
    num_pairs = experts.numel()
    is_few = num_pairs <= _most_tiles(num_pairs, num_experts, tile_rows)
    sort_kernel[(num_experts,)](
        experts,
        tiles.order,
        tiles.bounds,
        num_pairs,
        int(is_few),
        TILE_ROWS=tile_rows,
        BLOCK=SORT_BLOCK,
        num_warps=NUM_WARPS,
    )
