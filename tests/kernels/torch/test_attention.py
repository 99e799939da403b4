"""torch's paged attention: right against a float64 loop, whatever the chunks, blocks and groups of work, and blind to
what a token must not see. Nothing is promised of bits."""

import numpy as np
import pytest
import torch

import kernels.torch.attention
from kernels.elements import FLOAT32
from kernels.torch.attention import attention_metadata, paged_attention
from kernels.torch.kv_cache import TorchKVCache
from tests.kernels.attention_bench import BLOCK_SIZE, DTYPES, HEADS, LENGTHS, AttentionBench, chunkings
from tests.kernels.attention_reference import reference_attention

#: Tokens: one; around a block of 16; longer than some contexts and than all.
WINDOWS = [None, 1, 2, 15, 17, 100, 129, 1000]

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def near(one, other, dtype):
    return bool(((one - other).abs() < TOLERANCE[dtype]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_equals_float64_loop(window, heads, dtype):
    outputs = []
    for function in (paged_attention, reference_attention):
        bench = AttentionBench((200, 1, 17, 64, 130), heads, dtype, seed=3, window=window)
        first = bench.step({0: 150, 1: 1, 2: 2, 3: 40, 4: 129}, function)
        second = bench.step({4: 1, 0: 50, 2: 15, 3: 1}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    assert near(*outputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_equal_float64_loop(window, dtype):
    outputs = []
    for function in (paged_attention, reference_attention):
        bench = AttentionBench((200, 1, 17, 300), (8, 4, 16), dtype, seed=3, window=window)
        first = bench.step({0: 150, 1: 1, 2: 2, 3: 250}, function)
        second = bench.step({3: 1, 0: 50, 2: 15}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    assert near(*outputs, dtype)


@pytest.mark.parametrize("max_scores", [1, 1000, 1 << 18])
def test_chunks_and_groups_of_work_change_nothing_but_rounding(max_scores, monkeypatch):
    monkeypatch.setattr(kernels.torch.attention, "_MAX_SCORES", max_scores)
    exact = AttentionBench(LENGTHS[:1], HEADS[0], torch.float32, 0).run(0, [LENGTHS[0]], attention=reference_attention)
    for seed, chunks in list(enumerate(chunkings(LENGTHS[0])))[1:]:
        mixed = AttentionBench(LENGTHS, HEADS[0], torch.float32, seed)
        assert near(mixed.run(0, chunks, others=((1, 30), (2, 200), (3, 1))), exact, torch.float32)


@pytest.mark.parametrize("max_scores", [1, 5000])
def test_groups_of_work_are_bounded(max_scores, monkeypatch):
    """A group makes at most so many scores a head, or is one token's; every token is in one group."""
    monkeypatch.setattr(kernels.torch.attention, "_MAX_SCORES", max_scores)
    cache = TorchKVCache(1, 400, BLOCK_SIZE, 3, head_dim=64, dtype=FLOAT32)
    counts, lengths = np.array([1, 500, 1, 1, 1, 7]), np.array([900, 800, 20, 1000, 1, 7])
    tables = np.arange(1, 6 * 63 + 1, dtype=np.int32).reshape(6, 63)
    metadata = attention_metadata(counts, lengths, tables, cache)
    for group in metadata.groups:
        assert len(group.tokens) == 1 or len(group.tokens) * (group.context - BLOCK_SIZE) <= max_scores
    assert torch.equal(torch.cat([group.tokens for group in metadata.groups]).sort().values, torch.arange(511))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunks", [[60], [40, 20], [51, *[1] * 9]], ids=str)
def test_a_token_that_is_not_finite_reaches_only_rows_that_see_it(chunks, window, bad):
    """The K and V of earlier tokens may be shared with requests that do not have it."""
    usual = AttentionBench((60, 9), HEADS[0], torch.float32, 0, window=window).run(0, chunks)
    bench = AttentionBench((60, 9), HEADS[0], torch.float32, 0, window=window)
    bench.kv[0][50] = bad
    out = bench.run(0, chunks, others=((1, 1),))
    last = 60 if window is None else 50 + window
    assert near(out[:50], usual[:50], torch.float32)
    assert out[50:last].isnan().all()
    assert near(out[last:], usual[last:], torch.float32)


@pytest.mark.parametrize("block_size", [1, 8, 128])
def test_any_block_size_is_right(block_size):
    exact = AttentionBench((300,), HEADS[0], torch.float32, 0).run(0, [200, 100], attention=reference_attention)
    bench = AttentionBench((300,), HEADS[0], torch.float32, 1, block_size)
    assert near(bench.run(0, [123, 177]), exact, torch.float32)
