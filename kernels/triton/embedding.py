"""Rows of an embedding table, scaled, in Triton; to them rows of a table of positions may be added."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2

_MAX_BLOCK = 1024


@triton.jit
def gather_kernel(
    ids, positions, table, places, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_PLACES: tl.constexpr
):
    """Compute BLOCK numbers of one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(table + tl.load(ids + row) * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_PLACES:  # padding has position -1
        place = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
        values += tl.load(places + place * WIDTH + column, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, values, mask=inside)


def embedding(
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    table: torch.Tensor,
    scale: float,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of a table times scale, [T, d] float32; ids [T] int64, table [V, d] contiguous.

    places [P, d] float32: rows that are added, by positions [T], which only a table of places needs.
    """
    assert table.is_contiguous(), table.stride()
    assert places is None or positions is not None, "rows are added by position"
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=torch.float32, device=table.device)
    block = min(_MAX_BLOCK, power_of_2(width))
    if len(ids):
        gather_kernel[(len(ids), triton.cdiv(width, block))](
            ids,
            ids if positions is None else positions,
            table,
            table if places is None else places,
            out,
            scale,
            WIDTH=width,
            BLOCK=block,
            HAS_PLACES=places is not None,
        )
    return out
