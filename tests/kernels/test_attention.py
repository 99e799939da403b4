"""Paged attention: right against a float64 loop, the same bits however a context was computed, and blind to what it
must not see. The same check on torch's own attention must fail."""

import numpy as np
import pytest
import torch

import kernels.attention
import kernels.attention_metadata
from kernels.attention import attention_variant, paged_attention
from kernels.attention_metadata import TileShape, attention_metadata
from kernels.attention_reference import reference_attention, sdpa_attention
from kernels.kv_cache import KVCache
from kernels.rounding import ceil_div

HEADS = [(9, 3, 64), (14, 2, 64), (8, 8, 16), (9, 3, 80)]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 16


class Bench:
    """Contexts of given lengths with random Q, K and V, run step by step over a cache that is NaN elsewhere."""

    def __init__(self, lengths, heads, dtype, seed, block_size=BLOCK_SIZE, window=None):
        num_heads, num_kv_heads, head_dim = heads
        self.window = window
        self.shape = attention_variant(*heads).shape
        self.lengths = lengths
        numbers = [torch.Generator().manual_seed(index) for index in range(len(lengths))]  # a context's own
        self.q = [torch.randn(n, num_heads, head_dim, generator=g) for n, g in zip(lengths, numbers, strict=True)]
        width = 2 * num_kv_heads * head_dim
        self.kv = [torch.randn(n, width, generator=g).to(dtype) for n, g in zip(lengths, numbers, strict=True)]
        rng = np.random.default_rng(seed)
        num_blocks = [ceil_div(n, block_size) for n in lengths]
        self.cache = KVCache(1, sum(num_blocks) + 9, block_size, num_kv_heads, head_dim, dtype)
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
        return attention_metadata(num_tokens, context_lens, tables, self.cache, self.shape, window=self.window)

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


def outputs_in_every_way(heads, dtype, attention, set_threads):
    """Outputs of context 0, computed in many ways that must not matter."""
    for num_threads in (1, 2):
        set_threads(num_threads)
        # Two threads meet at barriers, which takes long where other processes compute: two ways of four will do.
        for seed, chunks in list(enumerate(chunkings(LENGTHS[0])))[::num_threads]:
            yield Bench(LENGTHS[:1], heads, dtype, seed).run(0, chunks, attention=attention)
            mixed = Bench(LENGTHS, heads, dtype, seed + 50)
            yield mixed.run(0, chunks, others=((1, 30), (2, 200), (3, 1)), attention=attention)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_depend_on_own_tokens_only(heads, dtype, threads):
    first, *others = outputs_in_every_way(heads, dtype, paged_attention, threads)
    assert first.isfinite().all()
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_own_attention_fails_the_same_check(dtype, threads):
    first, *others = outputs_in_every_way(HEADS[0], dtype, sdpa_attention, threads)
    assert first.isfinite().all()
    assert not all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("attention", [paged_attention, sdpa_attention], ids=lambda f: f.__name__)
def test_equals_float64_loop(attention, heads, dtype):
    outputs = []
    for function in (attention, reference_attention):
        bench = Bench((200, 1, 17, 64, 130), heads, dtype, seed=3)
        first = bench.step({0: 150, 1: 1, 2: 2, 3: 40, 4: 129}, function)
        second = bench.step({4: 1, 0: 50, 2: 15, 3: 1}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    error = (outputs[0] - outputs[1]).abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_does_not_reach_earlier_rows(bad):
    """Their K and V may be shared with requests that do not have it."""
    usual = Bench((60,), HEADS[0], torch.float32, 0).run(0, [60])
    bench = Bench((60,), HEADS[0], torch.float32, 0)
    bench.kv[0][50] = bad
    out = bench.run(0, [60])
    assert torch.equal(out[:50], usual[:50])
    assert out[50:].isnan().all()


@pytest.mark.parametrize("block_size", [1, 8, 128])
def test_block_size_does_not_change_bits(block_size):
    usual = Bench((300,), HEADS[0], torch.float32, 0).run(0, [200, 100])
    assert torch.equal(Bench((300,), HEADS[0], torch.float32, 1, block_size).run(0, [123, 177]), usual)


def test_size_of_work_groups_does_not_change_bits(monkeypatch):
    usual = Bench((500,), HEADS[0], torch.float32, 0).run(0, [450, 50])
    monkeypatch.setattr(kernels.attention_metadata, "WORK_GROUP_BYTES", 1)
    bench = Bench((500,), HEADS[0], torch.float32, 0)
    assert torch.equal(bench.run(0, [450, 50]), usual)


def test_memory_of_a_long_prompt_is_bounded():
    """2,000 tokens: every work group but those of a single query tile keeps to the limit."""
    heads = (9, 3, 64)
    cache = KVCache(1, 130, BLOCK_SIZE, 3, 64, torch.float32)
    tables = np.arange(1, 130, dtype=np.int32)[None]
    metadata = attention_metadata(np.array([2000]), np.array([2000]), tables, cache, TileShape(*heads))
    bytes_per_item = 3 * (2 * 128 * 64 * 8 + 4 * 192 * (128 + 2 * 64))
    assert sum(group.num_query_tiles for group in metadata.groups) == 32
    for group in metadata.groups:
        size = len(group.item_query) * bytes_per_item
        assert size <= kernels.attention_metadata.WORK_GROUP_BYTES or group.num_query_tiles == 1
        assert size < 20 << 20


def test_padding_rows_are_finite_and_change_nothing():
    bench = Bench((40, 3), HEADS[0], torch.float32, 0)
    plain = bench.step({0: 39, 1: 2})
    bench.done = [0, 0]
    num_tokens = np.array([39, 2])
    metadata = attention_metadata(num_tokens, num_tokens, bench.tables, bench.cache, bench.shape, num_rows=48)
    q = torch.cat((bench.q[0][:39], bench.q[1][:2], torch.full((7, 9, 64), torch.nan)))
    out = paged_attention(q, bench.cache, 0, metadata, 0.125)
    assert out.shape == (48, 9 * 64)
    assert out.isfinite().all()
    assert torch.equal(out[:41], torch.cat((plain[0], plain[1])))


@pytest.mark.parametrize(
    ("differs", "expected"),
    [(lambda rows, batch: rows > 100, (1, 16)), (lambda rows, batch: rows < 16, (16,))],
)
def test_query_tiles_whose_products_differ_are_not_mixed(differs, expected, monkeypatch):
    monkeypatch.setattr(kernels.attention, "probe_products", lambda rows, _, batch: str(differs(rows, batch)))
    kernels.attention._choose.cache_clear()
    try:
        variant = attention_variant(9, 3, 64)
    finally:
        kernels.attention._choose.cache_clear()
    assert variant.shape.query_tiles == expected
    assert variant.row_invariant


def test_products_that_depend_on_the_batch_are_admitted_to_be_l0(monkeypatch):
    monkeypatch.setattr(kernels.attention, "probe_products", lambda rows, _, batch: str(batch > 3))
    kernels.attention._choose.cache_clear()
    try:
        variant = attention_variant(9, 3, 64)
    finally:
        kernels.attention._choose.cache_clear()
    assert not variant.row_invariant
    assert str(variant).endswith("L0")


@pytest.mark.parametrize("query_tiles", [(1,), (16,), (1, 16), (1, 16, 64)])
def test_any_choice_of_query_tiles_is_right(query_tiles):
    bench = Bench((150, 20, 9), HEADS[0], torch.float32, 0)
    bench.shape = TileShape(*HEADS[0], query_tiles)
    out = bench.step({0: 150, 1: 19, 2: 9})
    bench.done = [0, 0, 0]
    exact = bench.step({0: 150, 1: 19, 2: 9}, reference_attention)
    for context in out:
        assert (out[context] - exact[context]).abs().max() < 2e-6
