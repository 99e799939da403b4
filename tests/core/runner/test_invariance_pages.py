"""Layers with a window give blocks back beside layers that see all: the target has the bits of a run with all blocks.

NaN lies in what was given back, and in all else that nobody may read.
"""

from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.inputs import EngineInput
from core.models.config import HeadSizes
from core.models.llama import Llama
from tests.core.hostile_drafts import speculative, use
from tests.core.runner.invariance import (
    DTYPES,
    KINDS,
    Recorder,
    Run,
    difference,
    neighbours,
    random_model,
    request,
    run,
)
from tests.core.runner.invariance_scenarios import PROMPT, SCENARIOS, Preempting, mixed

_GLOBAL = KINDS["local and global"]
#: Every other layer; two of three; five of six, as in Gemma 3; with sinks, as in gpt-oss.
MIXES = {
    "1:1": msgspec.structs.replace(_GLOBAL, num_hidden_layers=2, sliding_layers=(0,), sliding_window=90),
    "2:1": _GLOBAL,
    "5:1": msgspec.structs.replace(_GLOBAL, num_hidden_layers=6, sliding_layers=(0, 1, 2, 3, 4), sliding_window=60),
    "11:2": msgspec.structs.replace(
        _GLOBAL, num_hidden_layers=13, sliding_layers=tuple(set(range(13)) - {5, 11}), sliding_window=60
    ),
    "sinks": KINDS["sinks"],
    "narrow": KINDS[
        "shared keys and values"
    ],  # 2:1, where heads are 40 and 2 x 16 numbers wide, in the cache 48 and 32
    "wide": msgspec.structs.replace(KINDS["experts beside"], full_heads=HeadSizes(1, 16)),  # 2:1, 16 and 32 numbers
}
PAGE_BLOCKS = {"1:1": 1, "2:1": 2, "5:1": 5, "11:2": 6, "sinks": 2, "narrow": 2, "wide": 4}


@lru_cache(maxsize=16)
def models(mix: str, dtype: str) -> tuple[Llama, Llama]:
    """The model with one table for all layers, and the same with pages."""
    whole, paged = (random_model(MIXES[mix], DTYPES[dtype]) for _ in range(2))
    assert paged.num_blocks_per_page == PAGE_BLOCKS[mix]
    paged.split_cache(PAGE_BLOCKS[mix])
    return whole, paged


class Watch:
    """The most blocks of windows that a row has given back, and the most that one has held."""

    def __init__(self, inner: Any = None) -> None:
        self.most_released = self.most_held = 0
        self._inner = inner

    def __call__(self, engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        batch = engine.scheduler.batch
        windows, rows = batch.others[0].table, engine.scheduler.running
        if len(rows):
            self.most_released = max(self.most_released, int(windows.num_released[rows].max()))
            self.most_held = max(self.most_held, int((windows.num_blocks[rows] - windows.num_released[rows]).max()))
        return [] if self._inner is None else list(self._inner(engine, recorder))


def paged(watch: Watch, mix: str, dtype: str = "bfloat16", **settings: Any) -> Run:
    window = MIXES[mix].sliding_window or 0
    pages = {"kv_window": window, "kv_page_blocks": PAGE_BLOCKS[mix]}
    got = run(models(mix, dtype)[1], PROMPT, between=watch, **pages, **settings)
    assert watch.most_released >= (300 - window + 1) // 16, "nothing was given back"
    return got


def alone(mix: str, dtype: str = "bfloat16", **settings: Any) -> Run:
    return run(models(mix, dtype)[0], PROMPT, **settings)


@pytest.mark.parametrize("mix", MIXES)
def test_bits_are_those_of_a_run_that_keeps_all(mix: str) -> None:
    expected, crowd = alone(mix), mixed(neighbours(9, 3, 150, 60))
    for settings in ({}, {"budget": 50}, {"prefix_caching": False, "depth": 2, "budget": 40, "num_blocks": 90}):
        assert difference(paged(Watch(), mix, neighbours=crowd, **settings), expected) == "", settings


@pytest.mark.parametrize(("mix", "dtype"), [("2:1", "float32"), ("5:1", "bfloat16")])
def test_scenarios_have_the_bits_of_a_run_that_keeps_all(mix: str, dtype: str) -> None:
    expected = alone(mix, dtype)
    for name, one in SCENARIOS.items():
        if one.group != "preempted":
            assert difference(paged(Watch(), mix, dtype, **one.settings), expected) == "", name


@pytest.mark.parametrize("forgets", [False, True])
def test_preempted_after_every_third_step(forgets: bool) -> None:
    preempting = Preempting({7, 9, 12, 20}, forgets)
    got = paged(Watch(preempting), "5:1", budget=48, num_blocks=90)
    assert got.num_preemptions >= 3
    assert difference(got, alone("5:1")) == ""


@pytest.mark.parametrize("mix", MIXES)
def test_blocks_are_copied_to_the_host_and_back(mix: str) -> None:
    """With forgets nothing is found in the prefix cache: all of it comes back from the host."""
    for forgets in (False, True):
        preempting = Preempting({7, 9, 12, 20}, forgets)
        got = paged(Watch(preempting), mix, budget=48, num_blocks=120, num_swap_blocks=400)
        assert got.num_preemptions >= 3
        stats = got.recorder.scheduler.stats
        assert stats.num_swapped_out_blocks > 3 * 19
        assert (stats.num_swapped_in_blocks == stats.num_swapped_out_blocks) == forgets
        assert stats.num_recomputed_tokens == 0
        assert difference(got, alone(mix)) == ""


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_with_drafts(kind: str) -> None:
    mix = "2:1"
    expected = alone(mix, max_tokens=40)

    def propose(table: Any, row: int, count: int) -> list[int]:
        first = int(table.num_tokens[row] - table.num_prompt_tokens[row])
        return expected.tokens[0][first : first + count]

    def begin(engine: EngineCore) -> None:
        use(engine.scheduler, kind, lambda table: partial(propose, table), MIXES[mix].vocab_size)

    got = paged(Watch(), mix, max_tokens=40, speculative=speculative(4), begin=begin)
    assert difference(got, expected) == ""


def test_a_long_answer_holds_no_more_than_its_window_and_a_chunk() -> None:
    watch = Watch()
    got = paged(watch, "5:1", budget=32, max_tokens=150)
    assert len(got.tokens[0]) == 150
    assert watch.most_held <= -(-(60 + 32) // 16) + 1


def test_a_later_request_finds_what_was_given_back() -> None:
    again = paged(Watch(), "5:1", first=[request(1, PROMPT, 4, 0.0)], budget=64)
    assert again.num_cached_tokens == 288
    assert np.isfinite(again.logits[0]).all()
    assert difference(again, alone("5:1")) == ""


def test_a_later_request_finds_less_where_a_part_of_its_window_is_gone() -> None:
    """Another prompt takes the blocks of windows that were freed first; the bits stay."""
    long = [int(token) for token in np.random.default_rng(5).integers(1, 500, 700)]
    first = [request(1, PROMPT, 4, 0.0), request(2, long, 4, 0.0)]
    again = paged(Watch(), "5:1", first=first, budget=64, num_blocks=62)
    assert again.num_cached_tokens < 288
    assert difference(again, alone("5:1")) == ""
