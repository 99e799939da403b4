"""CachePages: how layers with a window and layers that see all tokens share the arrays of a KV cache.

A block holds block_size tokens for all layers that see everything. A page is a run of a few blocks. It is used either
as that many blocks of these layers, or for block_size tokens of the layers with a window. These layers then use one
block of the page each, and their tables contain the number of its first block. So tables, slots and kernels are the
same as for any cache; only a layer's array starts some blocks later.
"""

from typing import NamedTuple

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import layers
from ipc.tables.rounding import ceil_div


class CachePages(NamedTuple):
    """The arrays of a cache of pages."""

    num_blocks: int  # per page
    num_arrays: int
    #: For each layer: its array, and the offset in blocks from the number in its table to its own block.
    places: tuple[tuple[int, int], ...]


def blocks_per_page(config: ModelConfig) -> int:
    """Return how many blocks a page of this model has; 0: all its layers share their blocks.

    That is the case if all layers see the same tokens, or if fewer than half have a window, because then most of a page
    would be empty.
    """
    num_windowed = sum(_windowed(config))
    num_others = config.num_caches - num_windowed
    is_split = 0 < num_others <= num_windowed and config.is_causal
    return ceil_div(num_windowed, num_others) if is_split and config.recurrent is None else 0


def cache_pages(config: ModelConfig, num_blocks: int) -> CachePages:
    """Return the arrays for these layers, which may be part of the model. num_blocks: per page of the whole model."""
    windowed = _windowed(config)
    count = sum(windowed)
    num_arrays = max(len(windowed) - count, ceil_div(count, num_blocks))
    places, num_before = [], [0, 0]
    for has_window in windowed:
        index = num_before[has_window]
        num_before[has_window] += 1
        places.append((index % num_arrays, index // num_arrays))
    return CachePages(num_blocks, num_arrays, tuple(places))


def _windowed(config: ModelConfig) -> list[bool]:
    return [kind.window is not None for kind in layers(config)]
