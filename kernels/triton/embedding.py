"""Rows of an embedding table, scaled, in Triton."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2

_MAX_BLOCK = 1024


@triton.jit
def gather_kernel(ids, table, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(table + tl.load(ids + row) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, values * scale, mask=inside)


def embedding(ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the rows of a table times scale, [T, d] float32; ids [T] int64, table [V, d] contiguous."""
    assert table.is_contiguous(), table.stride()
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=torch.float32, device=table.device)
    block = min(_MAX_BLOCK, power_of_2(width))
    if len(ids):
        gather_kernel[(len(ids), triton.cdiv(width, block))](ids, table, out, scale, WIDTH=width, BLOCK=block)
    return out
