"""The KV cache in pinned memory of the host."""

import pytest
import torch

from kernels.elements import FLOAT32
from kernels.triton.kv_cache import TritonKVCache


def test_a_pinned_cache_is_one_allocation(monkeypatch: pytest.MonkeyPatch):
    """torch takes a power of two of bytes for each: 30 layers of 36 MiB would be 30 of 64."""
    pinned, empty = [], torch.empty

    def without_a_gpu(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append((shape, pin_memory))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_a_gpu)
    cache = TritonKVCache(3, 5, 4, 2, head_dim=8, dtype=FLOAT32, device=torch.device("cpu"), pinned=True)
    assert pinned == [((3, 5, 2, 2, 4, 8), True)]
    assert [layer.shape for layer in cache.layers] == [(5, 2, 2, 4, 8)] * 3
    assert all(layer.is_contiguous() and not layer[0].any() for layer in cache.layers)
