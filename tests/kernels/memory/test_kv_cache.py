"""The KV cache: sizes, layout, laziness, and the error when it does not fit."""

import resource
from pathlib import Path

import pytest
import torch

from kernels.memory.kv_cache import KVCache, bytes_per_block

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def test_bytes_per_block():
    cache = KVCache(3, 5, 16, 2, 8, torch.bfloat16)
    total = sum(layer.numel() * layer.element_size() for layer in cache.layers)
    assert bytes_per_block(16, 2, 8, 3, torch.bfloat16) * 5 == total
    assert bytes_per_block(16, 3, 64, 30, torch.float32) == 2 * 30 * 16 * 3 * 64 * 4


def test_write_and_logical_views_agree():
    cache = KVCache(2, 4, 4, 3, 8, torch.float32)
    kv = torch.randn(2, 2, 3, 8)
    cache.write(1, cache.slot_rows(torch.tensor([6, 15])), kv.flatten(1))
    assert cache.keys(1).shape == cache.values(1).shape == (4, 4, 3, 8)
    assert torch.equal(cache.keys(1)[[1, 3], [2, 3]], kv[:, 0])
    assert torch.equal(cache.values(1)[[1, 3], [2, 3]], kv[:, 1])


def test_null_block_holds_zeros():
    cache = KVCache(2, 3, 4, 3, 8, torch.float32)
    assert all((layer[0] == 0).all() for layer in cache.layers)


def test_a_pinned_cache_is_one_allocation(monkeypatch: pytest.MonkeyPatch):
    """torch takes a power of two of bytes for each: 30 layers of 36 MiB would be 30 of 64."""
    pinned, empty = [], torch.empty

    def without_a_gpu(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append((shape, pin_memory))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_a_gpu)
    cache = KVCache(3, 5, 4, 2, 8, torch.float32, pinned=True)
    assert pinned == [((3, 5, 2, 2, 4, 8), True)]
    assert [layer.shape for layer in cache.layers] == [(5, 2, 2, 4, 8)] * 3
    assert all(layer.is_contiguous() and not layer[0].any() for layer in cache.layers)


def test_untouched_memory_is_not_resident():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    cache = KVCache(4, 4096, 16, 4, 64, torch.float32)  # 512 MiB
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
    cache = KVCache(4, 4096, 16, 4, 64, torch.float32)
    assert all("hg" in flags_of(layer.data_ptr()) for layer in cache.layers)


def test_error_names_the_size():
    with pytest.raises(MemoryError, match=r"10000000000000 blocks of 16 tokens needs \d{16,} bytes"):
        KVCache(1, 10**13, 16, 2, 8, torch.float32)
