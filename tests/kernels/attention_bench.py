"""AttentionBench: contexts of random numbers, attended to step by step; what the tests of attention kernels share."""

import numpy as np
import torch

from kernels.torch.attention import attention_metadata, paged_attention
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.tensors import element_type

HEADS = [(9, 3, 64), (14, 2, 64), (8, 8, 16), (9, 3, 80)]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 16


class AttentionBench:
    """Contexts of given lengths with random Q, K and V, run step by step over a cache that is NaN elsewhere."""

    def __init__(self, lengths, heads, dtype, seed, block_size=BLOCK_SIZE, window=None):
        num_heads, num_kv_heads, head_dim = heads
        self.window = window
        self.lengths = lengths
        numbers = [torch.Generator().manual_seed(index) for index in range(len(lengths))]  # a context's own
        self.q = [torch.randn(n, num_heads, head_dim, generator=g) for n, g in zip(lengths, numbers, strict=True)]
        width = 2 * num_kv_heads * head_dim
        self.kv = [torch.randn(n, width, generator=g).to(dtype) for n, g in zip(lengths, numbers, strict=True)]
        rng = np.random.default_rng(seed)
        num_blocks = [-(-n // block_size) for n in lengths]
        self.cache = TorchKVCache(
            1, sum(num_blocks) + 9, block_size, num_kv_heads, head_dim=head_dim, dtype=element_type(dtype)
        )
        self.cache.layers[0][1:] = torch.nan
        blocks = iter(rng.permutation(np.arange(1, self.cache.num_blocks)).tolist())
        # What stands beyond a context's blocks is garbage: a NaN block that belongs to nobody.
        self.tables = np.full((len(lengths), max(num_blocks) + 2), next(blocks), np.int32)
        for index, count in enumerate(num_blocks):
            self.tables[index, :count] = [next(blocks) for _ in range(count)]
        self.done = [0] * len(lengths)

    def step(self, counts, attention=paged_attention):
        """counts: {context: tokens}. Writes their K and V, attends; {context: outputs [tokens, H * D]}."""
        which = np.array(list(counts))
        num_tokens = np.array(list(counts.values()))
        starts = np.array([self.done[index] for index in which])
        q, kv, slots = [], [], []
        for index, count, start in zip(which, num_tokens, starts, strict=True):
            positions = np.arange(start, start + count)
            size = self.cache.block_size
            slots.append(self.tables[index, positions // size].astype(np.int64) * size + positions % size)
            q.append(self.q[index][start : start + count])
            kv.append(self.kv[index][start : start + count])
            self.done[index] += int(count)
        self.cache.write(0, self.cache.slot_rows(torch.from_numpy(np.concatenate(slots))), torch.cat(kv))
        work = self.work(num_tokens, starts + num_tokens, self.tables[which])
        out = attention(torch.cat(q), self.cache, 0, work, 0.125)
        return dict(zip(counts, out.split(num_tokens.tolist()), strict=True))

    def work(self, num_tokens, context_lens, tables):
        return attention_metadata(num_tokens, context_lens, tables, self.cache, self.window)

    def run(self, context, chunks, others=(), attention=paged_attention):
        """All outputs of one context, computed in these chunks; others run beside it, up to their length."""
        outputs = []
        for number, chunk in enumerate(chunks):
            counts = {context: chunk}
            for place, (other, size) in enumerate(others):
                if self.done[other] < self.lengths[other]:
                    count = min(size, self.lengths[other] - self.done[other])
                    counts = {**counts, other: count} if (number + place) % 2 else {other: count, **counts}
            outputs.append(self.step(counts, attention)[context])
        return torch.cat(outputs)


LENGTHS = (333, 90, 520, 47)


def chunkings(length):
    yield [length]
    yield [64] * (length // 64) + [length % 64]
    yield [38] * (length // 38) + [length % 38]
    yield [1, 2, 130, length - 148, *([1] * 15)]
