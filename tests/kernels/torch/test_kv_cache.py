"""The KV cache as tensors: what is written is where the logical views say."""

import torch

from kernels.elements import FLOAT32
from kernels.torch.kv_cache import TorchKVCache


def test_write_and_logical_views_agree():
    cache = TorchKVCache(2, 4, 4, 3, head_dim=8, dtype=FLOAT32)
    kv = torch.randn(2, 2, 3, 8)
    cache.write(1, cache.slot_rows(torch.tensor([6, 15])), kv.flatten(1))
    assert cache.keys(1).shape == cache.values(1).shape == (4, 4, 3, 8)
    assert torch.equal(cache.keys(1)[[1, 3], [2, 3]], kv[:, 0])
    assert torch.equal(cache.values(1)[[1, 3], [2, 3]], kv[:, 1])
