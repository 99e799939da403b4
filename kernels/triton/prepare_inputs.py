"""A step's token ids and KV slots, read on the device from its tables of tokens and blocks.

So the host never needs to know a token that the previous step has just sampled.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens"])
def prepare_kernel(
    rows,
    positions,
    tokens,
    tokens_width,
    blocks,
    blocks_width,
    token_ids,
    slots,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the ids and slots of BLOCK tokens in each program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    row = tl.load(rows + at, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions + at, mask=inside, other=-1)
    real = row >= 0
    ids = tl.load(tokens + row * tokens_width + position, mask=real, other=0)
    block = tl.load(blocks + row * blocks_width + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    tl.store(token_ids + at, ids.to(tl.int64), mask=inside)
    tl.store(slots + at, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)


def prepare_inputs(
    rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, blocks: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [T] int64, 0 for padding, and slots [T] int64, -1 for padding.

    rows, positions [T] int32, -1 = padding; tokens [rows, length], blocks [rows, P] int32.
    """
    ids = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    slots = torch.empty_like(ids)
    if len(rows):
        prepare_kernel[(triton.cdiv(len(rows), _BLOCK),)](
            rows,
            positions,
            tokens,
            tokens.stride(0),
            blocks,
            blocks.stride(0),
            ids,
            slots,
            len(rows),
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
        )
    return ids, slots
