"""KV memory is taken before blocks are written: up to a bound, each piece once, and without touching what is there."""

import ctypes
import mmap

import numpy as np
import pytest

from kernels.elements import BFLOAT16, Numbers, to_floats
from kernels.memory import blocks_ahead
from kernels.memory.blocks_ahead import BlocksAhead
from kernels.memory.kv_cache import KVCache
from kernels.rounding import ceil_div

LAYERS, BLOCK_SIZE = 3, 16


def cache_of(num_blocks: int) -> KVCache:
    """Blocks of 16 KiB in a layer."""
    return KVCache(LAYERS, num_blocks, BLOCK_SIZE, 4, head_dim=64, dtype=BFLOAT16)


def blocks(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(numbers, np.int32)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(address of the layer, first byte, last byte) of each piece."""
    pieces: list[tuple[int, int, int]] = []

    def take(array: Numbers, begin: int, end: int) -> bool:
        pieces.append((array.ctypes.data, begin, end))
        return True

    monkeypatch.setattr(blocks_ahead, "take_pages", take)
    return pieces


def test_each_layer_is_taken_once_up_to_the_bound(taken: list[tuple[int, int, int]]) -> None:
    cache = cache_of(4000)
    ahead = BlocksAhead(cache)
    for highest in (0, 100, 50, 2000):
        ahead.use(blocks(1, highest))
        ahead.use(blocks())
        while ahead.take():
            pass
    block_bytes = cache.layers[0].nbytes // cache.num_blocks
    for layer in cache.layers:
        ranges = [(begin, end) for address, begin, end in taken if address == layer.ctypes.data]
        assert all(end - begin <= 2 << 20 for begin, end in ranges)
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        reach = ranges[-1][1] // block_bytes
        assert reach == 2000 + blocks_ahead.AHEAD_TOKENS // BLOCK_SIZE


def test_never_more_than_there_is(taken: list[tuple[int, int, int]]) -> None:
    cache = cache_of(130)
    ahead = BlocksAhead(cache)
    ahead.use(blocks(129))
    assert sum(ahead.take() for _ in range(100)) == len(taken) == 2 * LAYERS  # of 128 blocks and of 2
    assert {end for _, _, end in taken[-LAYERS:]} == {cache.layers[0].nbytes}


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(blocks_ahead, "take_pages", lambda tensor, begin, end: asked.append(begin))
    ahead = BlocksAhead(cache_of(100))
    assert not ahead.take()
    assert not ahead.take()
    assert asked == [0]


def resident_pages(array: Numbers) -> int:
    """Number of the array's pages that have memory."""
    page = mmap.PAGESIZE
    first = array.ctypes.data // page * page
    count = ceil_div(array.ctypes.data + array.nbytes - first, page)
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), found) == 0
    return sum(state & 1 for state in found)


def untouched_cache() -> KVCache:
    """A cache without memory yet. Malloc may have room that was used before; the caches that get it are held here."""
    used: list[KVCache] = []
    while resident_pages((cache := cache_of(2100)).layers[1]) > 1024:
        used.append(cache)
        assert len(used) < 20, f"{len(used)} caches of {sum(layer.nbytes for layer in cache.layers)} bytes had memory"
    return cache


def test_pages_are_there_and_hold_what_they_held() -> None:
    cache = untouched_cache()
    ahead = BlocksAhead(cache)
    cache.layers[1][5] = 0x3FC0  # 1.5
    before = resident_pages(cache.layers[1])
    if not ahead.take():
        pytest.skip("this system takes no pages on demand")
    while ahead.take():
        pass
    assert resident_pages(cache.layers[1]) >= 1024 * 16384 // mmap.PAGESIZE > before
    assert bool((to_floats(cache.layers[1][5]) == 1.5).all())
    assert not cache.layers[1][6:].any()
