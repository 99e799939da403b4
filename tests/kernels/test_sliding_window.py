"""Attention within a sliding window: right, blind to what has left the window, and each row the same bits whichever
query tile it is in and whatever else that query tile visits."""

import numpy as np
import pytest
import torch

from kernels.attention import paged_attention
from kernels.attention_metadata import TileShape, attention_metadata
from kernels.attention_reference import reference_attention, sdpa_attention
from kernels.kv_cache import KVCache
from kernels.rounding import ceil_div
from tests.kernels.test_attention import BLOCK_SIZE, DTYPES, LENGTHS, Bench, chunkings

HEADS = (8, 4, 16)

#: Tokens: one; less than a query tile of 16 and across it; around a KV tile of 128; longer than most contexts.
WINDOWS = [1, 2, 15, 17, 64, 127, 128, 129, 200, 1000]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [17, 100, 130])
def test_bits_depend_on_own_tokens_only(window, dtype):
    usual = Bench(LENGTHS[:1], HEADS, dtype, 0, window=window).run(0, [LENGTHS[0]])
    assert usual.isfinite().all()
    for seed, chunks in enumerate(chunkings(LENGTHS[0])):
        assert torch.equal(Bench(LENGTHS[:1], HEADS, dtype, seed, window=window).run(0, chunks), usual)
        mixed = Bench(LENGTHS, HEADS, dtype, seed + 50, window=window)
        assert torch.equal(mixed.run(0, chunks, others=((1, 30), (2, 200), (3, 1))), usual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("attention", [paged_attention, sdpa_attention], ids=lambda f: f.__name__)
def test_equals_float64_loop(attention, window, dtype):
    outputs = []
    for function in (attention, reference_attention):
        bench = Bench((200, 1, 17, 300), HEADS, dtype, seed=3, window=window)
        first = bench.step({0: 150, 1: 1, 2: 2, 3: 250}, function)
        second = bench.step({3: 1, 0: 50, 2: 15}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    assert (outputs[0] - outputs[1]).abs().max() < (2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("query_tiles", [(1,), (16,), (1, 16, 64)])
def test_what_has_left_the_window_is_not_seen(window, query_tiles):
    """A token gone wrong shows in every row that sees it and changes no bit of the others."""
    for chunks in ([300], [130, 169, 1], [37] * 8 + [4]):
        usual, bench = (Bench((300,), HEADS, torch.float32, 0, window=window) for _ in range(2))
        usual.shape = bench.shape = TileShape(*HEADS, query_tiles)
        bench.kv[0][50] = torch.nan
        out, expected = bench.run(0, chunks), usual.run(0, chunks)
        unseen = min(50 + window, 300)  # the first row that does not see it any more
        assert torch.equal(out[:50], expected[:50])
        assert out[50:unseen].isnan().all()
        assert torch.equal(out[unseen:], expected[unseen:])


@pytest.mark.parametrize("window", [1, 100, 128, 129])
@pytest.mark.parametrize("count", [1, 30, 700])
def test_kv_tiles_wholly_before_the_window_are_not_visited(count, window):
    cache = KVCache(1, 130, BLOCK_SIZE, 3, 64, torch.float32)
    tables = np.arange(1, 130, dtype=np.int32)[None]  # block b + 1 holds tokens from 16 * b on
    metadata = attention_metadata(
        np.array([count]), np.array([2000]), tables, cache, TileShape(9, 3, 64), window=window
    )
    first_tile = max(0, 2000 - count - window + 1) // 128
    for group in metadata.groups:
        seen_together = window + group.query_tile - 1  # tokens, by all rows of a query tile
        assert len(group.counts) <= ceil_div(seen_together, 128) + 1
        blocks = np.unique(group.kv_rows.numpy() // (2 * 3))
        assert blocks[blocks > 0].min() >= first_tile * 8 + 1


@pytest.mark.parametrize("count", [1, 30])
def test_a_window_that_nothing_has_left_costs_nothing(count):
    cache = KVCache(1, 130, BLOCK_SIZE, 3, 64, torch.float32)
    tables = np.arange(1, 130, dtype=np.int32)[None]
    args = (np.array([count]), np.array([2000]), tables, cache, TileShape(9, 3, 64))
    plain, windowed = attention_metadata(*args), attention_metadata(*args, window=2000)
    for mine, theirs in zip(windowed.groups, plain.groups, strict=True):
        assert (mine.num_partial, mine.counts) == (theirs.num_partial, theirs.counts)
        assert torch.equal(mine.mask, theirs.mask)
