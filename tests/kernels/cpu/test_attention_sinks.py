"""Attention with sinks: the C kernel and torch's operations against a float64 loop; a row's bits are its own."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import kernels.cpu.attention_plan
from kernels.cpu.attention import sink_scores
from kernels.cpu.build import usable_variants
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.torch.attention import paged_attention
from tests.kernels.attention_bench import DTYPES, AttentionBench
from tests.kernels.attention_reference import reference_attention
from tests.kernels.cpu.test_attention import CpuBench, attention_of

#: One that takes nearly nothing, some that take a part, one that takes nearly all, one that takes all.
SINKS = torch.tensor([-50.0, -1.0, 0.0, 1.5, 30.0, 900.0])
HEADS = (6, 2, 20)
Attend = Callable[..., torch.Tensor]


def with_sinks(library: CpuLibrary) -> Attend:
    attend: Any = attention_of(library)
    scores = sink_scores(SINKS.numpy())
    return lambda *arguments: attend(*arguments, None, scores)


def steps(bench: AttentionBench, attention: Any) -> torch.Tensor:
    """Two steps: whole prompts, parts of them, single tokens; one context has more than a tile."""
    first = bench.step({0: 650, 1: 1, 2: 16}, attention)
    second = bench.step({2: 1, 0: 50}, attention)
    return torch.cat([*first.values(), *second.values()]).double()


@cache
def expected(dtype: torch.dtype, window: int | None) -> torch.Tensor:
    bench = CpuBench((700, 1, 17), HEADS, dtype, seed=3, window=window)
    return steps(bench, lambda *arguments: reference_attention(*arguments, SINKS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 17])
def test_equals_a_float64_loop(window: int | None, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for variant in usable_variants():
        bench = CpuBench((700, 1, 17), HEADS, dtype, seed=3, window=window)
        got = steps(bench, with_sinks(load_cpu_library(variant)))
        assert (got - expected(dtype, window)).abs().max() < tolerance, variant
        assert not got.view(-1, 6, 20)[:, 5].any()
    bench = AttentionBench((700, 1, 17), HEADS, dtype, 3, window=window)
    got = steps(bench, lambda q, *rest: paged_attention(q, *rest, None, SINKS))
    assert (got - expected(dtype, window)).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_of_a_context_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in usable_variants():
        library = load_cpu_library(variant)
        attend = with_sinks(library)
        usual = CpuBench((1300,), HEADS, dtype, 0).run(0, [1300], attention=attend)
        for num_threads, split_rows, item_rows in ((1, 64, 20), (2, 10_000, 192)):
            monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_SPLIT_ROWS", split_rows)
            monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_ITEM_ROWS", item_rows)
            library.start_threads(num_threads)
            bench = CpuBench((1300,), HEADS, dtype, num_threads)
            assert torch.equal(bench.run(0, [600, 685, 1, 12, 2], attention=attend), usual), variant
        library.stop_threads()


def test_a_row_that_is_not_a_number_stays_so() -> None:
    bench = CpuBench((40,), HEADS, torch.float32, 0)
    bench.kv[0][7] = torch.nan
    out = bench.run(0, [40], attention=with_sinks(load_cpu_library()))
    assert out[:7].isfinite().all()
    assert out[7:].isnan().all()
