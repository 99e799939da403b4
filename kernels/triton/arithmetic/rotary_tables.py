"""Cosines and sines of rotary embeddings; the definition is kernels/torch/rope.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import cos_sin
from kernels.triton.device import power_of_2

#: Tokens of a program.
_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def tables_kernel(
    positions, frequencies, cos, sin, factor, num_tokens, HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """Compute TOKENS tokens in each program."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, BLOCK)
    there = token < num_tokens
    frequency = tl.load(frequencies + i, mask=i < HALF, other=0.0)[None, :]
    angles = tl.load(positions + token, mask=there, other=0).to(tl.float32)[:, None] * frequency
    factors = tl.where(frequency == 0, 1.0, factor)
    cosines, sines = cos_sin(angles.to(tl.float64))
    cosines, sines = cosines.to(tl.float32) * factors, sines.to(tl.float32) * factors
    at = token.to(tl.int64)[:, None] * 2 * HALF + i[None, :]
    inside = there[:, None] & (i < HALF)[None, :]
    tl.store(cos + at, cosines, mask=inside)
    tl.store(cos + at + HALF, cosines, mask=inside)
    tl.store(sin + at, -sines, mask=inside)
    tl.store(sin + at + HALF, sines, mask=inside)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute positions [T] -> cos, sin [T, 1, head_dim] float32, times factor; frequencies [head_dim / 2] float32.

    sin includes the sign of its half: (-sin, +sin). A pair with the frequency 0 is not rotated: its cosine is 1.
    """
    half = len(frequencies)
    cos, sin = (torch.empty((len(positions), 1, 2 * half), device=positions.device) for _ in range(2))
    if len(positions):
        blocks = {"BLOCK": power_of_2(half), "TOKENS": _TOKENS}
        grid = (triton.cdiv(len(positions), _TOKENS),)
        tables_kernel[grid](positions, frequencies, cos, sin, factor, len(positions), HALF=half, **blocks)
    return cos, sin
