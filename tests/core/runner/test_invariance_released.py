"""Blocks behind the window are given back: the target has the bits that it has with all of them, and NaN lies there."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.inputs import EngineInput
from tests.core.hostile_drafts import speculative, use
from tests.core.runner.invariance import DTYPES, KINDS, Recorder, Run, difference, neighbours, request, run, tiny_model
from tests.core.runner.invariance_scenarios import PROMPT, SCENARIOS, Preempting, mixed

KIND = "sliding window"
WINDOW = KINDS[KIND].sliding_window


class Watch:
    """The most blocks that a row has given back, and the most that one has held."""

    def __init__(self, inner: Any = None) -> None:
        self.most_released = self.most_held = 0
        self._inner = inner

    def __call__(self, engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        table, rows = engine.scheduler.table, engine.scheduler.running
        if len(rows):
            self.most_released = max(self.most_released, int(table.num_released[rows].max()))
            self.most_held = max(self.most_held, int((table.num_blocks[rows] - table.num_released[rows]).max()))
        return [] if self._inner is None else list(self._inner(engine, recorder))


def released(watch: Watch, dtype: str, **settings: Any) -> Run:
    got = run(tiny_model(DTYPES[dtype], KIND), PROMPT, kv_window=WINDOW, between=watch, **settings)
    assert watch.most_released >= (300 - 90 + 1) // 16, "nothing was given back"
    return got


@pytest.mark.parametrize("dtype", DTYPES)
def test_scenarios_have_the_bits_of_a_run_that_keeps_all(dtype: str) -> None:
    alone = run(tiny_model(DTYPES[dtype], KIND), PROMPT)
    for name, one in SCENARIOS.items():
        if one.group != "preempted":
            assert difference(released(Watch(), dtype, **one.settings), alone) == "", name
    for settings in ({"prefix_caching": False, "budget": 50}, {"depth": 2, "budget": 40, "num_blocks": 60}):
        crowd = mixed(neighbours(9, 3, 150, 60))
        assert difference(released(Watch(), dtype, neighbours=crowd, **settings), alone) == "", settings


@pytest.mark.parametrize("forgets", [False, True])
def test_preempted_after_every_third_step(forgets: bool) -> None:
    alone = run(tiny_model(DTYPES["bfloat16"], KIND), PROMPT)
    preempting = Preempting({7, 9, 12, 20}, forgets)
    got = released(Watch(preempting), "bfloat16", budget=48, num_blocks=60)
    alone = run(tiny_model(DTYPES["bfloat16"], KIND), PROMPT)
    assert got.num_preemptions >= 3
    assert difference(got, alone) == ""


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_with_drafts(kind: str) -> None:
    model = tiny_model(DTYPES["bfloat16"], KIND)
    alone = run(model, PROMPT, max_tokens=40)

    def propose(table: Any, row: int, count: int) -> list[int]:
        first = int(table.num_tokens[row] - table.num_prompt_tokens[row])
        return alone.tokens[0][first : first + count]

    def begin(engine: EngineCore) -> None:
        use(engine.scheduler, kind, lambda table: partial(propose, table), KINDS[KIND].vocab_size)

    got = released(Watch(), "bfloat16", max_tokens=40, speculative=speculative(4), begin=begin)
    assert difference(got, alone) == ""


def test_a_long_answer_holds_no_more_than_its_window_and_a_chunk() -> None:
    watch = Watch()
    got = released(watch, "bfloat16", budget=32, max_tokens=150)
    assert len(got.tokens[0]) == 150
    assert watch.most_held <= -(-(90 + 32) // 16) + 1


def test_a_later_request_finds_what_was_given_back() -> None:
    again = released(Watch(), "bfloat16", first=[request(1, PROMPT, 4, 0.0)], budget=64)
    assert again.num_cached_tokens == 288
    assert np.isfinite(again.logits[0]).all()
