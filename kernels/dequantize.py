"""GGUF tensor data to float32: plain floats and the 32-weight blocks Q8_0, Q4_0 and Q4_1.

Blocks (ggml-common.h), scales and minima float16, little-endian:
    Q8_0  scale, 32 x int8                        weight = scale * q
    Q4_0  scale, 16 bytes of two 4-bit numbers    weight = scale * (q - 8)
    Q4_1  scale, minimum, 16 such bytes           weight = scale * q + minimum
Byte j of a 4-bit block holds weight j in its low half and weight j + 16 in its high half.

Products and sums are rounded one by one in float32, so results equal those of the gguf package bit for bit.
"""

from collections.abc import Callable

import torch

BLOCK = 32  # weights

#: Type name -> weights in a block, bytes of a block.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (BLOCK, 34),
    "Q4_0": (BLOCK, 18),
    "Q4_1": (BLOCK, 20),
}


def dequantize(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """float32[n] of uint8[n / weights in a block * bytes of a block].

    `data` is contiguous and begins on a multiple of 4 bytes in its storage; the F32 result shares its memory.
    Errors: KeyError for a type not in BLOCK_SIZES; RuntimeError for a size that is not a number of blocks.
    """
    block_bytes = BLOCK_SIZES[type_name][1]
    return _KINDS[type_name](data.view(-1, block_bytes)).view(-1)


def _float32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.float32)


def _float16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.float16).float()


def _bfloat16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scalar(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_scalar(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_scalar(blocks, 0)).add_(_scalar(blocks, 1))


def _scalar(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """float32[blocks, 1]: the index-th float16 of each block."""
    return blocks[:, 2 * index : 2 * index + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """float32[blocks, 32], each 0 to 15, of uint8[blocks, 16]."""
    out = torch.empty(len(packed), BLOCK, dtype=torch.float32, device=packed.device)
    out[:, : BLOCK // 2] = packed & 15
    out[:, BLOCK // 2 :] = packed >> 4
    return out


_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
