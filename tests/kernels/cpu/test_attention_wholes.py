"""Attention among the tokens of a whole, as an image's: right against a float64 loop, the same bits in any steps."""

import numpy as np
import pytest
import torch

import kernels.cpu.attention_plan
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.kernels.attention_bench import DTYPES
from tests.kernels.cpu.test_attention import CpuBench, attention_of

#: (first token, tokens) of the first context's wholes: side by side, and across the tile that ends at 512.
WHOLES = ((5, 40), (45, 20), (470, 90), (610, 1))
LENGTH = 700


class WholeBench(CpuBench):
    """A bench whose first context has WHOLES; its steps may begin within one, and never end there."""

    def work(self, num_tokens, context_lens, tables):
        start, end = int(context_lens[0] - num_tokens[0]), int(context_lens[0])
        clipped = [(max(first, start) - start, min(first + n, end) - max(first, start)) for first, n in WHOLES]
        wholes = np.array([pair for pair in clipped if pair[1] > 0], np.int64)
        given = (num_tokens, context_lens, tables, self.cache.block_size, self.window)
        return self.planner(*given, wholes=wholes if len(wholes) else None)


def run(heads, dtype, window, chunks, function, seed=0, beside=0):
    bench = WholeBench((LENGTH, 90, 300), heads, dtype, seed, window=window)
    return torch.cat([bench.step({0: count, **({1: 2, 2: 7} if beside else {})}, function)[0] for count in chunks])


def expected(heads, dtype, window):
    """The first context's attention in float64, by a mask of all its tokens."""
    bench, (num_heads, num_kv_heads, dim) = WholeBench((LENGTH,), heads, dtype, 0), heads
    places = torch.arange(LENGTH)
    seen = places <= places[:, None]
    for first, n in WHOLES:
        seen[first : first + n, first : first + n] = True
    if window is not None:
        seen &= places > places[:, None] - window
    q = bench.q[0].to(dtype).double().transpose(0, 1)
    keys, values = bench.kv[0].double().reshape(LENGTH, 2, num_kv_heads, dim).permute(1, 2, 0, 3)
    keys, values = (part.repeat_interleave(num_heads // num_kv_heads, 0) for part in (keys, values))
    scores = (q @ keys.transpose(1, 2) * 0.125).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 12, 300])
@pytest.mark.parametrize("variant", usable_variants())
def test_wholes_see_their_ends(variant, window, dtype):
    heads = (8, 4, 16)
    attention = attention_of(load_cpu_library(variant))
    got = run(heads, dtype, window, [LENGTH], attention)
    assert (got - expected(heads, dtype, window)).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    causal = CpuBench((LENGTH,), heads, dtype, 0, window=window).run(0, [LENGTH], attention=attention)
    same = [torch.equal(*pair) for pair in zip(got, causal, strict=True)]
    in_whole = {t for first, n in WHOLES for t in range(first, first + n - 1)}  # the last one sees no more
    assert same == [t not in in_whole for t in range(LENGTH)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 12])
def test_bits_do_not_depend_on_steps_and_threads(window, dtype, c_library, monkeypatch):
    attention, heads = attention_of(c_library), (6, 2, 32)
    usual = run(heads, dtype, window, [LENGTH], attention)
    for threads, item_rows, chunks in ((1, 9, [65, 495, 140]), (3, 60, [5, 40, 425, 90, 50, 1, 89])):
        monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_ITEM_ROWS", item_rows)
        c_library.start_threads(threads)
        assert torch.equal(run(heads, dtype, window, chunks, attention, seed=threads, beside=1), usual)
    c_library.stop_threads()


def test_a_step_that_begins_within_a_whole(c_library):
    """K and V before it are in the cache already; its own tokens get the bits that they have in one step."""
    attention, heads = attention_of(c_library), (6, 2, 32)
    usual = run(heads, torch.bfloat16, None, [560], attention)
    bench = WholeBench((LENGTH,), heads, torch.bfloat16, 4)
    bench.step({0: 560}, attention)
    bench.done[0] = 505
    assert torch.equal(bench.step({0: 55}, attention)[0], usual[505:])
    bench.done[0] = 559
    assert torch.equal(bench.step({0: 1}, attention)[0], usual[559:])
