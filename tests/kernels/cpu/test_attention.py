"""The C kernel's attention: right against a float64 loop, the same bits however a context was computed, and blind to
what it must not see; in every variant of the library that this CPU runs."""

import functools

import numpy as np
import pytest
import torch

import kernels.cpu.attention_plan
from kernels.cpu.attention_plan import AttentionPlanner
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.kernels.attention_bench import DTYPES, AttentionBench, chunkings
from tests.kernels.attention_reference import first_seen, reference_attention
from tests.kernels.on_tensors import CpuAttention, CpuKVCache

#: Query heads, KV heads, head size: groups of 1 to 9, sizes that fill vectors and that do not.
HEADS = [(9, 3, 64), (14, 2, 64), (8, 8, 16), (9, 1, 80), (4, 2, 12), (8, 1, 128), (2, 2, 256), (6, 2, 20)]
#: Tokens; the first context, whose bits are compared, has a tile of 512 and a part of another.
LENGTHS = (600, 90, 520, 47)

WINDOWS = [None, 1, 2, 15, 17, 64, 127, 128, 129, 200, 1000]

library = functools.cache(load_cpu_library)  # loading it takes as long as a bench's steps


class CpuBench(AttentionBench):
    """AttentionBench in the C kernels' cache."""

    def __init__(self, lengths, heads, dtype, seed, block_size=16, window=None):
        super().__init__(lengths, heads, dtype, seed, block_size, window)
        self.planner = AttentionPlanner(library(), *heads[:2])
        self.cache = CpuKVCache(1, self.cache.num_blocks, block_size, heads[1], head_dim=heads[2], dtype=dtype)
        self.cache.tensors[0][1:] = torch.nan

    def work(self, num_tokens, context_lens, tables):
        return self.planner(num_tokens, context_lens, tables, self.cache.block_size, self.window)


@pytest.fixture(scope="module", params=usable_variants())
def attention(request):
    return attention_of(load_cpu_library(request.param))


def attention_of(library):
    kernel = CpuAttention(library)
    run = lambda q, cache, *rest: kernel(q.to(cache.tensors[0].dtype), cache, *rest)  # noqa: E731
    run.library = library
    return run


def two_steps(heads, dtype, function):
    bench = CpuBench((700, 1, 17, 64, 130), heads, dtype, seed=3)
    first = bench.step({0: 650, 1: 1, 2: 2, 3: 40, 4: 129}, function)
    second = bench.step({4: 1, 0: 50, 2: 15, 3: 1}, function)
    return torch.cat([*first.values(), *second.values()]).double()


@functools.cache  # of all variants
def two_steps_in_float64(heads, dtype):
    return two_steps(heads, dtype, reference_attention)


#: Each shape with one of the dtypes; the other pairs are the soak's.
SHAPES = [
    pytest.param(heads, dtype, marks=[pytest.mark.soak] if (row + column) % 2 else [])
    for row, heads in enumerate(HEADS)
    for column, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("heads", "dtype"), SHAPES, ids=str)
def test_equals_float64_loop(heads, dtype, attention):
    difference = two_steps(heads, dtype, attention) - two_steps_in_float64(heads, dtype)
    assert difference.abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("chunks", [[40], [20, 20], [39, 1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_of_minus_infinity_is_a_weight_of_zero(dtype, chunks, attention):
    bench = CpuBench((40,), (4, 2, 16), dtype, seed=0)
    keys, values = bench.kv[0].view(40, 2, 2, 16).unbind(1)
    bench.q[0].zero_()
    bench.q[0][:, :, 0] = 1e20
    keys.zero_()
    keys[3, :, 0] = -1e20
    got = bench.run(0, chunks, attention=attention).float().view(40, 4, 16)
    seen = torch.arange(40)[:, None] >= torch.arange(40)
    seen[4:, 3] = False  # each of the others weighs the same
    weights = seen / seen.sum(1, keepdim=True)
    expected = torch.einsum("st,thd->shd", weights, values.float()).repeat_interleave(2, dim=1)
    assert torch.allclose(got[4:], expected[4:], atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_equal_float64_loop(window, dtype, c_library):
    outputs = []
    for function in (attention_of(c_library), reference_attention):
        bench = CpuBench((200, 1, 17, 600), (8, 4, 16), dtype, seed=3, window=window)
        first = bench.step({0: 150, 1: 1, 2: 2, 3: 550}, function)
        second = bench.step({3: 1, 0: 50, 2: 15}, function)
        outputs.append(torch.cat([*first.values(), *second.values()]).double())
    assert (outputs[0] - outputs[1]).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *zip(HEADS[2:4], DTYPES, strict=True),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in zip(HEADS[2:4], DTYPES[::-1], strict=True)),
        *(pytest.param(heads, dtype, marks=pytest.mark.soak) for heads in HEADS[:2] for dtype in DTYPES),
    ],
    ids=str,
)
def test_bits_depend_on_own_tokens_only(heads, dtype, attention):
    usual = CpuBench(LENGTHS[:1], heads, dtype, 0).run(0, [LENGTHS[0]], attention=attention)
    assert usual.isfinite().all()
    for num_threads, others in ((1, ()), (2, ((1, 30), (2, 200), (3, 1)))):
        attention.library.start_threads(num_threads)
        for seed, chunks in list(enumerate(chunkings(LENGTHS[0])))[num_threads - 1 :: 2]:
            bench = CpuBench(LENGTHS, heads, dtype, seed + 50)
            assert torch.equal(bench.run(0, chunks, others=others, attention=attention), usual)
    attention.library.stop_threads()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 17, 600])
def test_splits_of_a_long_context_change_no_bit(window, dtype, c_library, monkeypatch):
    """2,000 tokens at once, token by token at the end, with parts of the context apart or together, on threads."""
    attention = attention_of(c_library)
    usual = CpuBench((2000,), (6, 2, 32), dtype, 0, window=window).run(0, [2000], attention=attention)
    for num_threads, split_rows, item_rows in ((1, 64, 20), (2, 10_000, 192), (3, 0, 7)):
        monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_SPLIT_ROWS", split_rows)
        monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_ITEM_ROWS", item_rows)
        c_library.start_threads(num_threads)
        bench = CpuBench((2000,), (6, 2, 32), dtype, num_threads, window=window)
        assert torch.equal(bench.run(0, [1000, 985, 1, 1, 12, 1], attention=attention), usual)
    c_library.stop_threads()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 128])
def test_block_size_does_not_change_bits(block_size, dtype, c_library):
    attention = attention_of(c_library)
    for heads in ((9, 3, 64), (6, 2, 20)):
        usual = CpuBench((300,), heads, dtype, 0).run(0, [200, 100], attention=attention)
        bench = CpuBench((300,), heads, dtype, 1, block_size)
        assert torch.equal(bench.run(0, [123, 177], attention=attention), usual)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 129, *(pytest.param(each, marks=pytest.mark.soak) for each in (1, 100))])
def test_only_rows_that_see_a_bad_token_are_changed_by_it(window, dtype, bad, c_library):
    for chunks in ([300], [130, 169, 1], [37] * 8 + [4]):
        usual, bench = (CpuBench((300,), (8, 4, 16), dtype, 0, window=window) for _ in range(2))
        bench.kv[0][50] = bad
        attention = attention_of(c_library)
        out, expected = bench.run(0, chunks, attention=attention), usual.run(0, chunks, attention=attention)
        unseen = 300 if window is None else min(50 + window, 300)  # the first row that does not see it any more
        assert torch.equal(out[:50], expected[:50])
        assert out[50:unseen].isnan().all()
        assert torch.equal(out[unseen:], expected[unseen:])


def test_an_empty_batch_is_empty(c_library):
    cache = CpuKVCache(1, 2, 16, 3, head_dim=64, dtype=torch.bfloat16)
    nothing = np.zeros(0, np.int64)
    plan = AttentionPlanner(c_library, 9, 3)(nothing, nothing, np.zeros((0, 1), np.int32), 16)
    out = CpuAttention(c_library)(torch.empty(0, 9, 64, dtype=torch.bfloat16), cache, 0, plan, 0.125)
    assert out.shape == (0, 9 * 64)


@pytest.mark.parametrize("window", [None, 100, 700])
def test_items_cover_every_row_and_what_it_sees_once(window, c_library):
    counts, lengths = np.array([700, 1, 5, 33, 1]), np.array([1000, 1, 2000, 33, 5000])
    tables = np.arange(5 * 320).reshape(5, 320)
    plan = AttentionPlanner(c_library, 9, 3)(counts, lengths, tables, 16, window)
    work = plan.items[:, 3] * (plan.items[:, 6] - plan.items[:, 5])
    assert (work[1:] <= work[:-1] * 9 / 8).all()
    assert plan.max_item_tokens == plan.items[:, 3].max()
    seen = np.zeros((3, int(counts.sum()), 5000), int)
    for _, head, token, num_tokens, _, begin, end, _, _, _ in plan.items.tolist():
        seen[head, token : token + num_tokens, begin:end] += 1
    assert seen.max() == 1
    token = 0
    for count, length in zip(counts.tolist(), lengths.tolist(), strict=True):
        for position in range(length - count, length):
            assert seen[:, token, first_seen(plan.window, position) : position + 1].all()
            token += 1
    partials = plan.items[plan.items[:, 7] >= 0]
    rows = [set(range(item[7], item[7] + item[3] * 3)) for item in partials.tolist()]
    assert len(set().union(*rows)) == sum(map(len, rows)) == plan.num_partials
