"""Copies of KV blocks within a device's memory by Triton: one launch for a layer."""

import torch
import triton
import triton.language as tl

from kernels.triton.device import power_of_2

_MAX_BLOCK = 2048


@triton.jit
def _copy(source, target, source_ids, target_ids, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK numbers of one KV block in each program."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    from_row = tl.load(source_ids + pair).to(tl.int64) * WIDTH
    to_row = tl.load(target_ids + pair).to(tl.int64) * WIDTH
    tl.store(target + to_row + column, tl.load(source + from_row + column, mask=inside), mask=inside)


def copy_blocks(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy blocks: target[target_ids] = source[source_ids].

    Both are [blocks, ...] contiguous, of one dtype and device, and of one shape but for the number of blocks. ids [n]
    int32; no target is named twice, or is a source too.
    """
    assert source.is_contiguous(), source.stride()
    assert target.is_contiguous(), target.stride()
    assert source.shape[1:] == target.shape[1:], (source.shape, target.shape)
    assert source.dtype == target.dtype, (source.dtype, target.dtype)
    width = source[0].numel()
    block = min(_MAX_BLOCK, power_of_2(width))
    if len(source_ids):
        grid = (len(source_ids), triton.cdiv(width, block))
        _copy[grid](source, target, source_ids, target_ids, WIDTH=width, BLOCK=block)
