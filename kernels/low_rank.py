"""LowRank: what a low-rank adapter adds to a product, and the products' shapes.

LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from typing import NamedTuple

from kernels.elements import Numbers

#: Version of the arithmetic of adapters. It is part of an adapter's digest, because equal digests promise equal tokens.
LORA_ARITHMETIC = 1


class LowRank(NamedTuple):
    """What an adapter adds to a part of a product's columns: scale * b @ (a @ x)."""

    a: Numbers  # [rank, in] float32, bfloat16 or float16
    b: Numbers  # [columns of the part, rank], likewise
    scale: float


class ProductShape(NamedTuple):
    """The columns of a product, part by part (Q, K and V of a merged matrix), and their layout."""

    depth: int
    parts: tuple[int, ...]  # columns of each part
    is_gated: bool = False  # two parts, of which the first are gates
