"""The kernels of routed MLPs that compile_triton.py compiles."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kernels.triton.device import ROOM
from kernels.triton.routed import choose_experts, expert_sum, expert_tiles
from kernels.triton.routed.expert_products import (
    FEW,
    FEW_FLOATS,
    MANY,
    MANY_FLOATS,
    MANY_IN_LITTLE,
    SOME,
    TileShape,
    down_kernel,
    gate_up_kernel,
)

HALF, FLOAT, INT = "*bf16", "*fp32", "*i32"
PAIRS = {"order": INT, "bounds": INT}

_CHOICE: tuple[Any, dict[str, str]] = (
    choose_experts.choose_kernel,
    {
        "logits": FLOAT,
        "correction": FLOAT,
        "scales": FLOAT,
        "experts": INT,
        "weights": FLOAT,
        "order": INT,
        "tiles": INT,
        "scaling": "fp32",
        "added_to_sum": "fp32",
    },
)
_OF_ALL = {
    "EXPERTS": 128,
    "COLUMNS": 128,
    "NUM_CHOSEN": 8,
    "SIGMOID": False,
    "NORMALISES": False,
    "CORRECTS": False,
    "HAS_SCALES": True,
}
_OF_GROUPS = {
    "EXPERTS": 160,
    "COLUMNS": 161,
    "NUM_CHOSEN": 6,
    "SIGMOID": True,
    "NORMALISES": True,
    "CORRECTS": True,
    "HAS_SCALES": False,
}

#: Those that choose experts and sum their results up.
ROUTING: tuple[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]], ...] = (
    (
        *_CHOICE,
        _OF_ALL | {"GROUPS": 1, "CHOSEN_GROUPS": 1, "BEST": 1, "BLOCK_G": 1, "BLOCK_S": 128},
        {"num_warps": 1},
    ),
    (
        *_CHOICE,
        _OF_GROUPS | {"GROUPS": 8, "CHOSEN_GROUPS": 3, "BEST": 2, "BLOCK_G": 8, "BLOCK_S": 32},
        {"num_warps": 1},
    ),
    (
        expert_tiles.sort_kernel,
        {"experts": INT, **PAIRS, "num_pairs": "i32", "is_few": "i32"},
        {"TILE_ROWS": 16, "BLOCK": expert_tiles.SORT_BLOCK},
        {"num_warps": expert_tiles.NUM_WARPS},
    ),
    (
        expert_sum.sum_kernel,
        {"results": HALF, "weights": FLOAT, "shared": HALF, "logits": FLOAT, "out": HALF},
        {"WIDTH": 2000, "NUM_CHOSEN": 8, "COLUMNS": 129, "HAS_SHARED": True, "HAS_GATE": True, "BLOCK": 512},
        {},
    ),
)


class Experts(NamedTuple):
    dtype: torch.dtype
    shape: TileShape
    hidden: int
    width: int

    def kernels(self) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
        """Both products, with their arguments' types, constants and options as launched."""
        options = self.shape.options
        pointer = HALF if self.dtype == torch.bfloat16 else FLOAT
        types = {"x": pointer, "weight": pointer, "bias": pointer, **PAIRS, "out": pointer}
        sizes = {"HIDDEN": self.hidden, "WIDTH": self.width, "HAS_BIAS": True}
        blocks = {name: value for name, value in options.items() if name.isupper()}
        rest = {name: value for name, value in options.items() if not name.isupper()}
        function = {"FUNCTION": "clamped_silu", "NUM_CHOSEN": 8}
        yield gate_up_kernel, types, sizes | function | blocks, rest
        yield down_kernel, types, sizes | blocks, rest


def each_experts(shared_memory: int, *, every: bool) -> Iterator[Experts]:
    """The shapes of tiles that a device with so much shared memory uses, but for one in the middle. Sizes that its
    steps divide, or odd ones, in turn; every: both, of all shapes."""
    many = MANY_IN_LITTLE if shared_memory < ROOM else MANY
    halves, floats = torch.bfloat16, torch.float32
    tiles = (halves, FEW), (halves, SOME), (halves, many), (floats, FEW_FLOATS), (floats, MANY_FLOATS)
    for turn, (dtype, shape) in enumerate(tiles):
        for odd, size in enumerate(((2048, 768), (1000, 360))):
            if every or (odd == turn % 2 and shape != SOME):
                yield Experts(dtype, shape, *size)
