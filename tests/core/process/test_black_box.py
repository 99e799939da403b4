"""The black box: what the engine notes is what a reader finds, while it runs and after it died."""

import os
import random
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from core.execution.plan import ModelRunnerOutput, NewRow, SchedulerOutput
from core.features.image_waits import ImageWaits
from core.process.black_box import BlackBox
from frontend.engine.process import EngineProcess
from ipc.machine.memory_files import make_memory_file
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.records.black_box import NO_READING, BlackBoxFile, request_digest, size_of
from ipc.tables.arrays import NO_INT32S
from tests.placed import PREFIX
from tests.raw_client import PATIENCE_S, RawClient

PARAMS = SamplingParams(temperature=0.0)
DONE = ModelRunnerOutput(0, NO_INT32S)


class Steps:
    """A scheduler, as far as a black box reads it."""

    def __init__(self, box: BlackBox, num_rows: int = 8) -> None:
        self.computed = np.zeros(num_rows, np.int64)
        self.table = SimpleNamespace(num_computed_tokens=self.computed)
        self.stats = SimpleNamespace(num_scheduled_tokens=0)
        self.box = box
        box.watch(self)  # type: ignore[arg-type]

    def begin(self, rows: list[int], counts: list[int], *added: NewRow) -> None:
        """Plan a step, and begin it."""
        self.stats.num_scheduled_tokens += sum(counts)
        self.box.begin(plan(rows, counts, *added))


def new_row(row: int, prompt: list[int], output: list[int], params: SamplingParams = PARAMS) -> NewRow:
    return NewRow(row, np.array(prompt + output, np.int32), len(prompt), 0, NO_INT32S, params, 0)


def plan(rows: list[int], counts: list[int], *added: NewRow) -> SchedulerOutput:
    columns = np.array(rows, np.int32), np.array(counts, np.int32)
    return SchedulerOutput(1, NO_INT32S, list(added), NO_INT32S, NO_INT32S, *columns)


def digest(prompt: list[int], params: SamplingParams = PARAMS) -> bytes:
    return request_digest(np.array(prompt, "<i4").tobytes(), params)


def test_a_reader_finds_the_steps_in_flight() -> None:
    page = BlackBoxFile(8)
    assert page.reader.read() == NO_READING
    assert page.reader.suspects() == []
    box = BlackBox(page.fd, 8, epoch=3)
    steps = Steps(box)
    steps.computed[[5, 2]] = 4, 3
    steps.begin([5, 2], [4, 1], new_row(5, [1, 2, 3], [9]), new_row(2, [4], [8, 8]))
    box.turn(7)
    reading = page.reader.read()
    assert (reading.epoch, reading.pid, reading.num_begun, reading.num_ended) == (3, os.getpid(), 1, 0)
    assert (reading.num_tokens, reading.num_running, reading.num_waiting, reading.num_turns) == (5, 2, 7, 1)
    assert reading.is_in_step
    assert reading.turned_ns >= reading.begun_ns > 0
    assert page.reader.suspects() == [(digest([1, 2, 3]), 0, 4), (digest([4]), 2, 3)]
    steps.computed[5] = 5
    steps.begin([5], [1])  # the second step in flight
    assert page.reader.suspects() == [(digest([1, 2, 3]), 0, 5), (digest([4]), 2, 3)]
    box.end(DONE)
    box.turn(7)
    assert page.reader.suspects() == [(digest([1, 2, 3]), 4, 5)]
    box.end(DONE)
    box.turn(7)
    assert page.reader.suspects() == []
    assert not page.reader.read().is_in_step


def test_a_steady_step_stores_no_column() -> None:
    page = BlackBoxFile(8)
    steps = Steps(BlackBox(page.fd, 8, 0))
    steps.computed[[5, 2]] = 3, 1
    steps.begin([5, 2], [3, 1], new_row(5, [1, 2, 3], []), new_row(2, [4], []))
    steps.computed[[5, 2]] += 1
    steps.begin([5, 2], [1, 1])
    ends = page.reader._page.ends
    columns = ends.tobytes()
    for age in range(1, 4):
        steps.computed[[5, 2]] += 1
        steps.begin([5, 2], [1, 1])
        steps.box.end(DONE)
        steps.box.turn(0)
        assert page.reader.last_rows() == [(digest([1, 2, 3]), 3 + age, 4 + age), (digest([4]), 1 + age, 2 + age)]
    assert ends.tobytes() == columns
    steps.computed[5] += 1
    steps.begin([5], [1])
    assert ends.tobytes() != columns
    assert page.reader.last_rows() == [(digest([1, 2, 3]), 7, 8)]


def test_what_is_found_equals_what_was_planned() -> None:
    """Random plans, of which many are steady; at most two of them are in flight."""
    draw = random.Random(5)
    page = BlackBoxFile(8)
    steps, num_steady = Steps(BlackBox(page.fd, 8, 0)), 0
    prompts = {row: [row] for row in range(8)}
    steps.computed[:] = 1
    steps.begin(list(range(8)), [1] * 8, *(new_row(row, [row], []) for row in range(8)))
    rows, counts, flying = list(range(8)), [1] * 8, [{digest([row]): (0, 1) for row in range(8)}]
    for step in range(2000):
        if draw.random() < 0.3:
            rows = draw.sample(range(8), draw.randint(1, 8))
            counts = [draw.choice([1, 1, 1, 3]) for _ in rows]
        added = []
        if not flying and draw.random() < 0.2:  # another request takes a row
            row = draw.choice(rows)
            steps.computed[row], prompts[row] = draw.randrange(50), [row, step]
            added = [new_row(row, prompts[row], [])]
        num_steady += counts == [1] * len(rows) and not added
        steps.computed[rows] += counts
        steps.begin(rows, counts, *added)
        ends = steps.computed[rows].tolist()
        planned = zip(rows, counts, ends, strict=True)
        flying.append({digest(prompts[row]): (end - count, end) for row, count, end in planned})
        assert {one.digest: one[1:] for one in page.reader.last_rows()} == flying[-1]
        while len(flying) > 2 or (flying and draw.random() < 0.5):
            flying.pop(0)
            steps.box.end(DONE)
        steps.box.turn(0)
        due = flying[0] if flying else {}
        for found, (start, end) in (flying[1] if len(flying) > 1 else {}).items():
            due[found] = (min(due.get(found, (start, 0))[0], start), max(due.get(found, (0, end))[1], end))
        assert {one.digest: one[1:] for one in page.reader.suspects()} == due
    assert num_steady > 500


def test_a_digest_is_of_the_prompt_and_the_options() -> None:
    assert digest([1]) != digest([2])
    assert digest([1]) != digest([1], SamplingParams(temperature=0.5))
    with_prompt = SamplingParams(temperature=0.0, prompt_logprobs=1)
    assert digest([1], with_prompt) == digest([1]), "only the first choice of a request has its prompt's"


def test_the_first_step_is_expected_by_the_warm_up() -> None:
    page = BlackBoxFile(8)
    steps = Steps(BlackBox(page.fd, 8, 0, warm_up_ns=1600))
    expected = []
    for count in (1, 16, 31, 32, 1024):
        steps.begin([0], [count])
        expected.append(page.reader.read().expected_ns)
    assert expected == [1600, 1600, 1600, 3200, 64 * 1600]


def test_what_a_step_may_take_survives_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(f"{PREFIX}core.process.black_box.time.monotonic_ns", lambda: now[0])
    page = BlackBoxFile(8)

    def step(steps: Steps, count: int, took_ns: int) -> int:
        """Return what was expected of it."""
        steps.begin([0], [count])
        now[0] += took_ns
        steps.box.end(DONE)
        steps.box.turn(0)
        return page.reader.read().expected_ns

    steps = Steps(BlackBox(page.fd, 8, 0))
    assert step(steps, 1, 100) == 0, "nothing is known"
    assert step(steps, 1, 50) == 100
    assert step(steps, 8, 700) == 800, "eight times as many tokens"
    assert step(steps, 9, 10) == 700
    steps = Steps(BlackBox(page.fd, 8, 1))
    assert step(steps, 1, 1) == 100
    for _ in range(1200):
        step(steps, 1, 7)
    assert step(steps, 1, 7) == 7, "slow steps are forgotten ..."
    assert step(steps, 12, 7) == 700, "... but not those of other sizes"


def test_a_page_of_another_version_is_left_alone() -> None:
    """The owner's program may be older than the engine's, and then its page has another size."""
    file = make_memory_file("engine-core-test", size_of(4) - 16)
    try:
        box = BlackBox(file, 4, 0)
        box.turn(0)
        assert os.pread(file, 4096, 0) == bytes(size_of(4) - 16)
    finally:
        os.close(file)


def test_a_page_may_have_more_rows_than_the_engine() -> None:
    """The owner makes it before the engine has chosen its number of rows."""
    page = BlackBoxFile(8)
    steps = Steps(BlackBox(page.fd, 3, 0), num_rows=3)
    steps.computed[[0, 2]] = 5, 1
    steps.begin([0, 2], [5, 1], new_row(0, [1] * 5, []), new_row(2, [2], []))
    reading = page.reader.read()
    assert (reading.num_running, reading.num_tokens) == (2, 6)
    assert [(suspect.start, suspect.end) for suspect in page.reader.suspects()] == [(0, 5), (0, 1)]
    too_few = BlackBoxFile(2)
    Steps(BlackBox(too_few.fd, 3, 0), num_rows=3).begin([0], [1])
    assert too_few.reader.read() == NO_READING


def test_a_step_may_wait_for_its_turn() -> None:
    page = BlackBoxFile(8)
    steps = Steps(BlackBox(page.fd, 8, 0, warm_up_ns=1000, waits=ImageWaits(500, 70), may_wait=True))
    steps.begin([0], [1])
    assert page.reader.read().expected_ns == 1500


def test_a_step_with_images_takes_longer() -> None:
    page = BlackBoxFile(8)
    steps = Steps(BlackBox(page.fd, 8, 0, warm_up_ns=1000, waits=ImageWaits(500, 70)))
    one, part = [(0, [0])], [(b"1", 1)]
    for images, parts, expected in (
        ([], [], 1000),
        (one, [], 1500),
        ([], part, 1070),
        (one, part, 1570),
        ([], [], 1000),
    ):
        steps.stats.num_scheduled_tokens += 1
        encoded = {"scheduled_encoder_inputs": images, "image_parts": parts}
        steps.box.begin(msgspec.structs.replace(plan([0], [1]), **encoded))
        assert page.reader.read().expected_ns == expected


def test_the_box_of_a_running_engine() -> None:
    config = EngineConfig(executor="fake", max_num_seqs=4)
    with EngineProcess(config) as engine, RawClient(engine.address) as client:
        client.add(1, [1, 2])
        client.finish(1)
        reading = engine.black_box.read()
        assert (reading.epoch, reading.pid) == (0, engine.pid)
        assert reading.num_begun >= 8
        deadline = time.monotonic() + PATIENCE_S
        while engine.black_box.read().num_ended < reading.num_begun:  # said once the outputs are on their way
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine.stop()
        engine.wait(PATIENCE_S)
        assert engine.black_box.read().num_begun == reading.num_begun
