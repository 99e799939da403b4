"""The target itself loses its row and its blocks: after each chunk of its prompt and at each output position, in any
row, at any place in the batch, among neighbours that come and go, with one step in flight and with two.
"""

import numpy as np
import pytest

from core.engine import EngineCore
from core.inputs import EngineInput, HoldClient, ReleaseClient
from kernels.elements import BFLOAT16
from tests.core.runner.invariance import (
    DTYPES,
    TARGET,
    TARGET_CLIENT,
    Recorder,
    difference,
    neighbours,
    run,
    tiny_model,
)
from tests.core.runner.invariance_kinds import EVERY_KIND, KINDS
from tests.core.runner.invariance_scenarios import PROMPT, Preempting, mixed, preempt, progress
from tests.in_turn import in_turn

SHORT = PROMPT[:150]  # past the first KV tile and both windows
CHUNK = 48
NUM_STEPS = 11  # of the target alone: four chunks, the last of which gives the first of eight tokens


@pytest.mark.parametrize(("dtype", "kind"), EVERY_KIND)
def test_preempted_after_any_one_step(dtype: str, kind: str) -> None:
    """Everything is computed again, once from each step on: of the plain kind, and of others from every other step."""
    model = tiny_model(DTYPES[dtype], kind)
    alone = run(model, SHORT, max_tokens=8)
    seen: set[tuple[int, int]] = set()
    steps = slice(None) if kind == "plain" else slice(list(KINDS).index(kind) % 2, None, 2)
    for step in range(1, NUM_STEPS)[steps]:
        preempting = Preempting({step}, forgets=True)
        got = run(model, SHORT, budget=CHUNK, max_tokens=8, num_blocks=40, between=preempting)
        assert got.num_preemptions == 1
        assert difference(got, alone) == "", f"preempted at (computed, output) {preempting.seen}"
        seen |= preempting.seen
    every = [(48, 0), (96, 0), (144, 0), *((149 + output, output) for output in range(1, 8))]
    assert seen == set(every[steps])


@pytest.mark.parametrize(("dtype", "kind"), EVERY_KIND)
def test_preempted_after_every_step(dtype: str, kind: str) -> None:
    """The prefix cache keeps the whole blocks, and with recurrent layers the states, so that there is progress."""
    model = tiny_model(DTYPES[dtype], kind)
    alone = run(model, SHORT, max_tokens=24)
    preempting = Preempting(None, forgets=False)
    got = run(model, SHORT, budget=CHUNK, max_tokens=24, num_blocks=40, between=preempting)
    assert difference(got, alone) == ""
    assert {output for _, output in preempting.seen} == set(range(24))
    assert got.num_preemptions == 3 + 23


@pytest.mark.parametrize("forgets", [False, True])
def test_tokens_of_steps_in_flight_are_sampled_again(forgets: bool) -> None:
    """At depth 2 a preempted row loses the token of the step in flight. The recorder compares what comes twice."""
    model = tiny_model(BFLOAT16, kind="local and global")
    alone = run(model, SHORT, max_tokens=8)
    num_again = 0
    for step in range(1, NUM_STEPS):
        preempting = Preempting({step}, forgets)
        got = run(model, SHORT, budget=CHUNK, max_tokens=8, num_blocks=40, depth=2, between=preempting)
        assert got.num_preemptions == 1
        assert difference(got, alone) == "", f"preempted at (computed, output) {preempting.seen}"
        num_again += got.recorder.num_computed_again
    assert num_again >= 7, f"{num_again} tokens were sampled again"


class Crowd:
    """New neighbours before most steps, each for a few tokens. With so many output tokens as `positions` names (0: in
    the middle of its prompt) the target loses its row, once for each: the youngest is preempted; any other's client is
    held for two steps, in which others take its row."""

    def __init__(self, seed: int, positions: set[int]) -> None:
        self._rng = np.random.default_rng(seed)
        self._newcomers = mixed(neighbours(200, seed, 40, 8))
        self._due = set(positions)
        self._steps_held = 0
        self.places: set[str] = set()  # in the batch before it lost its row

    def __call__(self, engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        inbox: list[tuple[int, EngineInput]] = [self._newcomers.pop() for _ in range(int(self._rng.integers(0, 3)))]
        at = progress(engine)
        if self._steps_held:
            self._steps_held -= 1
            if self._steps_held == 0:
                inbox.append((TARGET_CLIENT, ReleaseClient()))
        elif at is not None and at[1] in self._due:
            self._due.remove(at[1])
            self.places.add(place_name(recorder.places[-1]))
            youngest = int(engine.scheduler.running[-1])
            if engine.scheduler.table.number[youngest] == TARGET:
                preempt(engine, youngest)
            else:
                inbox.append((TARGET_CLIENT, HoldClient()))
                self._steps_held = 2
        return inbox


def place_name(place: tuple[int, int, int]) -> str:
    _, index, size = place
    return "alone" if size == 1 else "first" if index == 0 else "last" if index == size - 1 else "middle"


@pytest.mark.parametrize(("kind", "dtype"), in_turn(["plain", "sliding window", "local and global"], DTYPES))
def test_preempted_in_any_row_and_place(dtype: str, kind: str) -> None:
    """Six crowds, in each of which the target loses its row at two of its twelve output positions."""
    model = tiny_model(DTYPES[dtype], kind=kind)
    alone = run(model, SHORT, max_tokens=12)
    rows: set[int] = set()
    places: set[str] = set()
    lost_at: set[str] = set()
    num_moved = 0
    for seed in range(6):
        crowd = Crowd(seed, {seed, seed + 6})
        older = mixed(neighbours(seed % 4, seed, 40, 8))
        got = run(model, SHORT, neighbours=older, budget=96, max_tokens=12, rows=9, num_blocks=120, between=crowd)
        assert difference(got, alone) == "", f"crowd {seed}: {got.recorder.places}"
        assert got.num_preemptions == 2
        own_rows = {row for row, _, _ in got.recorder.places}
        num_moved += len(own_rows) > 1
        rows |= own_rows
        places |= {place_name(place) for place in got.recorder.places}
        lost_at |= crowd.places
    assert {"first", "middle", "last"} <= places, places
    assert {"first", "middle", "last"} <= lost_at, lost_at
    assert len(rows) >= 5, f"the target was only in rows {rows}"
    assert num_moved >= 3, f"the target changed its row in {num_moved} of 6 crowds"
