"""CachePages: how layers with a window and layers that see all tokens share the arrays of a KV cache.

A block holds block_size tokens for all layers that see everything. A page is a run of a few blocks. It is used either
as that many blocks of these layers, or for block_size tokens of the layers with a window. These layers then use one
block of the page each, and their tables contain the number of its first block. So tables, slots and kernels are the
same as for any cache; only a layer's array starts some blocks later.
"""

from typing import NamedTuple

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import cached_layers
from ipc.tables.rounding import ceil_div

#: The bytes of a token in a layer that sees everything, and in one with a window; or any numbers in proportion.
Widths = tuple[int, int]


class CachePages(NamedTuple):
    """The arrays of a cache of pages."""

    num_blocks: int  # per page
    num_arrays: int
    #: Of each layer with K and V: its array, and how many blocks of its own size its block is behind the one with the
    #: number in its table.
    places: tuple[tuple[int, int], ...]


def blocks_per_page(config: ModelConfig, widths: Widths = (1, 1)) -> int:
    """Return how many blocks a page of this model has; 0: its layers have their blocks in common.

    That is the case if all layers see the same tokens, or if fewer than half have a window, because then most of a page
    would be empty.
    """
    num_windowed = sum(_windowed(config))
    num_others = config.num_caches - num_windowed
    is_split = 0 < num_others <= num_windowed and config.is_causal
    # Each array has room for as many layers with a window.
    is_split = is_split and config.recurrent is None
    return ceil_div(ceil_div(num_windowed, num_others) * widths[1], widths[0]) if is_split else 0


def cache_pages(config: ModelConfig, num_blocks: int, widths: Widths = (1, 1)) -> CachePages:
    """Return the arrays of these layers, which may be a part of the model. num_blocks: of a page of the whole model."""
    windowed = _windowed(config)
    count = sum(windowed)
    num_arrays = max(len(windowed) - count, ceil_div(count, num_blocks * widths[0] // widths[1]))
    places, num_before = [], [0, 0]
    for has_window in windowed:
        index = num_before[has_window]
        num_before[has_window] += 1
        places.append((index % num_arrays, index // num_arrays))
    return CachePages(num_blocks, num_arrays, tuple(places))


def _windowed(config: ModelConfig) -> list[bool]:
    return [kind.window is not None for kind in cached_layers(config)]
