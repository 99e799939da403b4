"""The KV cache: sizes, layout, laziness, and the error when it does not fit."""

import resource
from pathlib import Path

import numpy as np
import pytest

from kernels.elements import BFLOAT16, FLOAT32
from kernels.memory.kv_cache import KVCache, bytes_per_block

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def test_bytes_per_block():
    cache = KVCache(3, 5, 16, 2, head_dim=8, dtype=BFLOAT16)
    total = sum(layer.nbytes for layer in cache.layers)
    assert bytes_per_block(16, 2, 8, 3, BFLOAT16) * 5 == total
    assert bytes_per_block(16, 3, 64, 30, FLOAT32) == 2 * 30 * 16 * 3 * 64 * 4


def test_null_block_holds_zeros():
    cache = KVCache(2, 3, 4, 3, head_dim=8, dtype=FLOAT32)
    assert all((layer[0] == 0).all() for layer in cache.layers)


def test_blocks_are_copied_in_all_layers():
    cache, other = (KVCache(2, blocks, 4, 3, head_dim=8, dtype=BFLOAT16) for blocks in (5, 3))
    for index, layer in enumerate((*cache.layers, *other.layers)):
        layer[1:] = np.arange(index, index + len(layer) - 1)[:, None, None, None, None]
    cache.copy_blocks(np.array([4, 1], np.int32), other, np.array([1, 2], np.int32))
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert np.array_equal(theirs[[1, 2]], mine[[4, 1]])


def test_a_new_cache_has_no_page_of_its_own():
    """Not even for the null block: with huge pages, a page of each of 500 layers would be a gigabyte."""
    before = _resident_pages()
    cache = KVCache(500, 64, 16, 4, head_dim=64, dtype=BFLOAT16)  # 500 MiB
    assert _resident_pages() - before < 200
    assert not cache.layers[-1][0].any()


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_untouched_memory_is_not_resident():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    cache = KVCache(4, 4096, 16, 4, head_dim=64, dtype=FLOAT32)  # 512 MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert cache.layers[3].shape == (4096, 2, 4, 16, 64)


def flags_of(address: int) -> list[str]:
    """Flags of the mapping that holds this address."""
    flags: list[str] = []
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            flags = words[1:]
    return flags


@pytest.mark.skipif(
    not SMAPS.exists() or not HUGE_PAGES.exists(), reason="no huge pages, or nothing that tells of them"
)
def test_its_pages_are_huge():
    cache = KVCache(4, 4096, 16, 4, head_dim=64, dtype=FLOAT32)
    assert all("hg" in flags_of(layer.ctypes.data) for layer in cache.layers)


def test_error_names_the_size():
    with pytest.raises(MemoryError, match=r"10000000000000 blocks of 16 tokens needs \d{16,} bytes"):
        KVCache(1, 10**13, 16, 2, head_dim=8, dtype=FLOAT32)
