"""The batch is a table: Python calls per step do not depend on the number of running requests, only on events.

Counted with sys.setprofile, Python and C functions alike; nothing here is measured by time.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import pytest

from core.capture.engine import CapturedEngine, make_header
from core.capture.flight_recorder import FlightRecorder
from core.engine import EngineCore
from core.executors.fake import create
from ipc.options.config import EngineConfig
from ipc.records.flight_ring import FlightFile
from ipc.wire.messages import Abort, AddRequest, encode
from tests.columns import pack_numbers
from tests.core.driving import add_message, small_config
from tests.fake_options import fake_options

BLOCK_SIZE = 16
PHASES = ("schedule", "execute", "update", "encode")
Result = TypeVar("Result")


def count_calls(function: Callable[[], Result]) -> tuple[int, Result]:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    was_enabled = gc.isenabled()
    gc.disable()  # callbacks of the collector are Python calls too
    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return count, result


def config(depth: int = 1) -> EngineConfig:
    # More rows than the tests use: a full table does not look at the queue, which saves a call.
    # No token is EOS: that one ends a request or not is an event.
    options = {"executor_options": fake_options(eos_token_id=2**20)}
    return small_config(2000, BLOCK_SIZE, max_num_seqs=300, budget=2**14, depth=depth, max_model_len=1024, **options)


def request(number: int, length: int, stop_token_ids: list[int] | None = None) -> AddRequest:
    """Prompts differ in their first token, so that no block is shared."""
    return add_message(number, [number, *range(length - 1)], 500, stop_token_ids=stop_token_ids)


def prefilled(messages: list[AddRequest], depth: int = 1, num_clients: int = 1) -> EngineCore:
    """All of these have started; the next step is the first that decodes alone."""
    engine = EngineCore(config(depth), executor := create(config(depth)))
    executor.initialize_cache(config(depth))
    engine.step([(index % num_clients, message) for index, message in enumerate(messages)], 0)
    assert engine.scheduler.get_request_counts() == (len(messages), 0)
    return engine


def whole_step(engine: EngineCore) -> int:
    """Calls of a step and of the encoding of its messages."""
    rows_before = engine.scheduler.stats.num_scheduled_rows
    count, _ = count_calls(lambda: [encode(message) for _, message in engine.step((), 0)])
    assert engine.scheduler.stats.num_scheduled_rows - rows_before == len(engine.scheduler.running)
    return count


def phases_of_step(engine: EngineCore) -> Counter[str]:
    """Calls of each phase of a step at depth 1."""
    counts: Counter[str] = Counter()
    counts["schedule"], plan = count_calls(lambda: engine.scheduler.schedule(0))
    counts["execute"], done = count_calls(lambda: engine.pipeline.execute(plan))
    assert done is not None
    counts["update"], messages = count_calls(lambda: engine.scheduler.update_from_output(*done))
    counts["encode"], _ = count_calls(lambda: [encode(message) for _, message in messages])
    return counts


def steady(num_rows: int, **options: int) -> EngineCore:
    """No row is near a block boundary for the next ten steps."""
    return prefilled([request(number, 20) for number in range(num_rows)], **options)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_costs_the_same_for_16_and_256_rows(phase: str) -> None:
    few, many = steady(16), steady(256)
    for _ in range(3):
        assert phases_of_step(few)[phase] == phases_of_step(many)[phase]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_clients", [1, 4])
def test_a_step_costs_the_same_for_16_and_256_rows(depth: int, num_clients: int) -> None:
    few, many = (steady(rows, depth=depth, num_clients=num_clients) for rows in (16, 256))
    counts = [(whole_step(few), whole_step(many)) for _ in range(5)]
    assert all(one == other for one, other in counts), counts
    assert counts[-1][0] < 400 + 50 * num_clients


def test_rows_with_stop_tokens_cost_as_one_group() -> None:
    stop_token_ids = [1001, 1002, 1003]  # never sampled
    counts = []
    for num_rows, num_group in ((16, 1), (256, 1), (256, 200)):
        messages = [request(n, 20, stop_token_ids if n < num_group else None) for n in range(num_rows)]
        counts.append(whole_step(prefilled(messages)))
    assert counts[0] == counts[1] == counts[2]
    assert 0 < counts[0] - whole_step(steady(16)) < 25


def crossing_counts(num_rows: int, num_crossing: int) -> list[Counter[str]]:
    """Calls of the step in which some rows fill a block, which is named, and of the next, which gives them another."""
    messages = [request(number, 31 if number < num_crossing else 20) for number in range(num_rows)]
    engine = prefilled(messages)
    free_before = engine.scheduler.pool.num_free
    names_before = len(engine.scheduler.pool.names)
    counts = [phases_of_step(engine), phases_of_step(engine)]
    assert len(engine.scheduler.pool.names) - names_before == num_crossing
    assert free_before - engine.scheduler.pool.num_free == num_crossing
    return counts


@pytest.mark.parametrize(("step", "name"), [(0, "a block is full"), (1, "a block is added")])
@pytest.mark.parametrize("phase", PHASES)
def test_crossing_a_block_boundary_costs_per_crossing_row(phase: str, step: int, name: str) -> None:
    crossing = (0, 1, 2, 8, 32, 64)
    costs = {k: crossing_counts(64, k)[step][phase] for k in crossing}
    per_row = costs[2] - costs[1]
    assert 0 <= per_row <= 40, f"{name}: {per_row} calls for each crossing row"
    for k in crossing[1:]:
        assert costs[k] <= costs[1] + per_row * (k - 1), f"{name}: not linear: {costs}"
    assert costs[1] - costs[0] <= 30, f"{name}: {costs}"
    assert crossing_counts(256, 8)[step][phase] == costs[8], f"{name}: rows that do not cross pay"


def test_blocks_are_added_without_a_call_per_row() -> None:
    one, many = crossing_counts(64, 1)[1], crossing_counts(64, 64)[1]
    assert one == many


def test_a_page_of_tokens_costs_per_row_that_needs_it() -> None:
    """Every 256 tokens a row takes a page in the scheduler's and in the executor's table."""
    costs = {}
    for num_crossing in (0, 1, 9, 18):
        # the prompt and the first sampled token; the next token is the 257th, or one that has a page already
        engine = prefilled([request(n, 255 if n < num_crossing else 245) for n in range(20)])
        costs[num_crossing] = whole_step(engine)
    assert costs[1] > costs[0]
    for num_crossing in (1, 9, 18):  # the pool of pages doubles now and then
        assert costs[num_crossing] - costs[0] <= 80 + 40 * num_crossing, costs


def arrival_count(num_running: int, num_new: int) -> int:
    """Calls of the step in which these requests come and start."""
    engine = steady(num_running)
    messages = [(0, request(1000 + number, 20)) for number in range(num_new)]
    count, _ = count_calls(lambda: engine.step(messages, 0))
    assert engine.scheduler.get_request_counts() == (num_running + num_new, 0)
    return count


def test_an_arrival_and_a_start_cost_per_request_whatever_runs() -> None:
    few, many = arrival_count(16, 8), arrival_count(16, 40)
    assert 0 < many - few <= 32 * 101
    assert arrival_count(256, 8) == few
    assert arrival_count(256, 40) <= many


def turnover_count(num_waiting: int, num_ended: int) -> int:
    """Calls of a step before which running requests are aborted, and in which as many start in their place."""
    engine = steady(300)
    engine.step([(0, request(1000 + number, 20)) for number in range(num_waiting)], 0)
    assert engine.scheduler.get_request_counts() == (300, num_waiting)
    count, _ = count_calls(lambda: engine.step([(0, Abort(pack_numbers(list(range(num_ended)))))], 0))
    assert engine.scheduler.get_request_counts() == (300, num_waiting - num_ended)
    return count


def test_an_abort_and_a_start_cost_per_request_whatever_waits() -> None:
    few, many = turnover_count(50, 8), turnover_count(50, 40)
    assert 0 < many - few <= 32 * 170
    assert turnover_count(1000, 8) == few


def test_what_no_request_uses_costs_a_steady_step_one_question_each() -> None:
    """Drafts, beams and grammars: of some 130 calls of Python functions six ask whether there are any."""
    engine, found = steady(32), Counter[str]()
    engine.step((), 0)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found[frame.f_code.co_qualname.partition(".")[0]] += 1

    sys.setprofile(profile)
    try:
        engine.step((), 0)
    finally:
        sys.setprofile(None)
    assert (found["Speculation"], found["BeamSearches"], found["RowMatchers"]) == (1, 1, 4)
    others = {"DraftRule", "Grammars", "Forks", "NgramProposer", "SuffixProposer", "OfferedDrafts"}
    others |= {"Beside", "CacheKind", "CacheRoom", "HostBeside", "OtherStart"}  # of further kinds of layers
    assert not others & found.keys()
    assert found.total() < 140


def test_the_flight_recorder_makes_the_same_few_calls_for_any_number_of_rows() -> None:
    """They run once a step, when the step has filled the caches: each takes several times what it takes in a loop."""
    added = {calls_of_recorder([request(number, 20) for number in range(num_rows)]) for num_rows in (1, 16, 200)}
    assert len(added) == 1, added
    assert max(added) <= 28, added


def calls_of_recorder(messages: list[AddRequest]) -> int:
    """Calls of a decoding step with a flight recorder that one without it has not."""
    plain, options = prefilled(messages), config()
    executor, ring = create(options), FlightFile(1 << 22)
    executor.initialize_cache(options)
    recorder = FlightRecorder(ring.fd, make_header(options, executor.info, "1", 0), 3600)
    recorded = CapturedEngine(options, executor, recorder)
    recorded.step([(0, message) for message in messages], 0)
    for _ in range(2):  # the rows of the second step are those of the first
        without, _ = count_calls(lambda: plain.step((), 1))
        with_it, _ = count_calls(lambda: recorded.step((), 1))
    recorder.close()
    return with_it - without
