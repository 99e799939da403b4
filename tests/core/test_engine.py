"""EngineCore over an executor that checks the cache: aborts, deadlines, failures, resumption, at depth 1 and 2."""

from typing import Any

import pytest

from core.batch.index import RequestIndex
from core.inputs import NewWeights
from core.scheduling.waiting_lines import Line
from core.scheduling.waiting_queue import WaitingQueue
from ipc.wire.messages import (
    Abort,
    AddRequest,
    CallDone,
    ErrorCode,
    FinishReason,
    GetStatistics,
    Goodbye,
    Outputs,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Statistics,
)
from ipc.wire.weights_messages import UpdateMode, Weights, WeightsMark
from tests.columns import pack_numbers
from tests.core.driving import EOS, Driver, Received, add_message, expected_tokens, small_config

MS = 1_000_000  # ns
POISON = 999


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def abort(*numbers: int) -> Abort:
    return Abort(pack_numbers(list(numbers)))


def is_prefix(entry: Received, message: AddRequest) -> bool:
    return entry.tokens == expected_tokens(message, 396)[: len(entry.tokens)]


# --- aborts ------------------------------------------------------------------------------------------------------


def test_abort_while_waiting(depth: int) -> None:
    driver = Driver(small_config(depth=depth, max_num_seqs=1))
    driver.step([(0, add_message(1, [5] * 4, 20)), (0, add_message(2, [6] * 4)), (0, add_message(3, [7] * 4))])
    driver.step([(0, abort(2))])
    entry = driver.inbox.received[0, 2]
    assert (entry.tokens, entry.finish, entry.cached) == ([], FinishReason.ABORT, None)
    driver.drain()
    assert driver.inbox.received[0, 3].finish == FinishReason.LENGTH


def test_abort_while_running_and_in_flight(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    message, other = add_message(1, [5] * 9, 50), add_message(2, [6] * 9, 20)
    driver.step([(0, message), (0, other)])
    for _ in range(4):
        driver.step()
    assert driver.engine.pipeline.num_in_flight == depth - 1
    driver.step([(0, abort(1))])
    entry = driver.inbox.received[0, 1]
    assert entry.finish == FinishReason.ABORT
    assert is_prefix(entry, message)
    assert len(entry.tokens) == 6 - depth
    driver.drain()
    assert driver.inbox.received[0, 2].tokens == expected_tokens(other, 396)


def test_blocks_of_a_step_in_flight_are_not_given_away_before_its_update() -> None:
    driver = Driver(small_config(num_blocks=5, max_model_len=16, depth=2))
    driver.step([(0, add_message(1, [5] * 13, 3))])  # all four blocks
    driver.step([(0, abort(1)), (0, add_message(2, [6] * 13, 3))])
    # PagedExecutor would object to a plan that takes them; the pipeline has been flushed instead
    assert driver.scheduler.get_request_counts() == (0, 1)
    assert driver.scheduler.pool.num_free == 4
    driver.drain()
    assert len(driver.inbox.received[0, 2].tokens) == 3


def test_abort_in_the_inbox_of_the_request_itself(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    driver.step([(0, add_message(1, [5] * 4)), (0, abort(1))])
    assert driver.inbox.received[0, 1].finish == FinishReason.ABORT
    assert not driver.engine.has_work


def test_abort_between_the_chunks_of_a_prompt(depth: int) -> None:
    driver = Driver(small_config(depth=depth, budget=8))
    driver.step([(0, add_message(1, [5] * 40))])
    driver.step()
    driver.step([(0, abort(1))])
    assert driver.inbox.received[0, 1].tokens == []
    driver.drain()


def test_unknown_double_and_late_aborts_are_ignored(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    assert driver.step([(0, abort(77))]) == []
    driver.step([(0, add_message(1, [5] * 4)), (1, add_message(1, [6] * 4))])
    driver.step([(0, abort(1, 1, 2)), (0, abort(1)), (2, abort(1))])
    driver.drain()
    assert driver.inbox.received[0, 1].finish == FinishReason.ABORT
    assert driver.inbox.received[1, 1].finish == FinishReason.LENGTH
    assert driver.step([(1, abort(1))]) == []


def test_goodbye_ends_the_client_and_nobody_is_told(depth: int) -> None:
    driver = Driver(small_config(depth=depth, max_num_seqs=2))
    stays = add_message(1, [5] * 4, 20)
    driver.step([(0, stays), *((1, add_message(n, [n] * 4, 20)) for n in range(3))])
    driver.step()
    replies = driver.step([(1, Goodbye()), (1, Goodbye())])
    assert {client for client, _ in replies} <= {0}
    assert driver.scheduler.get_request_counts() == (1, 0)
    driver.drain()
    assert driver.inbox.received[0, 1].tokens == expected_tokens(stays, 396)
    assert not any(driver.inbox.received[1, n].is_over for n in range(3))


def test_a_number_in_use_is_refused_and_the_first_request_goes_on(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    first = add_message(1, [5] * 4, 10)
    driver.step([(0, first)])
    replies = driver.engine.step([(0, add_message(1, [6] * 4))], 0)
    refusals = [reply for _, reply in replies if not isinstance(reply, Outputs)]
    assert [(r.number, r.code) for r in refusals] == [(1, ErrorCode.ALREADY_EXISTS)]  # type: ignore[union-attr]
    driver.inbox.take((client, reply) for client, reply in replies if isinstance(reply, Outputs))
    driver.drain()
    assert driver.inbox.received[0, 1].tokens == expected_tokens(first, 396)


# --- deadlines ---------------------------------------------------------------------------------------------------


def test_deadlines_fail_waiting_and_running_requests_at_their_time(depth: int) -> None:
    driver = Driver(small_config(depth=depth, max_num_seqs=1))
    added = [add_message(1, [5] * 4, 90, deadline_ms=7), add_message(2, [6] * 4, deadline_ms=5), add_message(3, [7])]
    driver.step([(0, message) for message in added], now_ns=100 * MS)
    driver.step(now_ns=105 * MS - 1)
    assert not driver.inbox.received[0, 2].is_over
    driver.step(now_ns=105 * MS)
    failed = driver.inbox.received[0, 2].failed
    assert failed is not None
    assert failed.code == ErrorCode.DEADLINE_EXCEEDED
    assert not driver.inbox.received[0, 1].is_over
    driver.step(now_ns=200 * MS)
    running = driver.inbox.received[0, 1]
    assert running.failed is not None
    assert is_prefix(running, added[0])
    assert len(running.tokens) >= 2
    driver.drain(now_ns=10**15)
    assert driver.inbox.received[0, 3].finish == FinishReason.LENGTH


def test_a_request_that_ends_in_time_is_not_failed_later() -> None:
    driver = Driver(small_config())
    driver.step([(0, add_message(1, [5] * 4, 2, deadline_ms=5))])
    driver.drain()
    assert driver.step(now_ns=10 * MS) == []


def test_what_is_kept_of_finished_requests_is_bounded() -> None:
    """Aborted requests behind a waiting head, and finished ones with a far deadline."""
    driver = Driver(small_config(max_num_seqs=1))
    driver.step([(0, add_message(0, [5] * 4, 390)), (0, add_message(1, [6] * 4))])
    for number in range(2, 302):
        driver.step([(0, add_message(number, [7] * 4, deadline_ms=10**9)), (0, abort(number))])
    scheduler = driver.scheduler
    assert scheduler.get_request_counts() == (1, 1)
    assert len(scheduler.policy.line._heap) <= 70
    assert len(scheduler._requests._deadlines) <= 70
    driver.drain()
    assert driver.inbox.received[0, 1].finish == FinishReason.LENGTH


def test_empty_queue_and_index() -> None:
    queue = WaitingQueue(Line())
    assert (len(queue), queue.peek(), queue.pop(), len(RequestIndex())) == (0, None, None, 0)
    assert RequestIndex().get(0, 0) == []
    assert RequestIndex().of_client(0) == []


# --- failures ----------------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_fail_one_request_alone(depth: int) -> None:
    driver = Driver(small_config(depth=depth), poison=POISON)
    shared = list(range(10, 18))
    sound = [add_message(n, [*shared, n], 12) for n in (1, 3)]
    bad = add_message(2, [*shared, POISON, *range(60, 70)], 12)
    driver.step([(0, sound[0]), (0, bad), (1, sound[1])])
    driver.drain()
    received = driver.inbox.received
    failed = received[0, 2].failed
    assert failed is not None
    assert failed.code == ErrorCode.NUMERIC
    assert "not finite" in failed.message
    assert received[0, 2].tokens == []
    assert received[0, 1].tokens == expected_tokens(sound[0], 396)
    assert received[1, 3].tokens == expected_tokens(sound[1], 396)


def test_blocks_of_a_failed_request_are_not_found(depth: int) -> None:
    driver = Driver(small_config(depth=depth), poison=POISON)
    prompt = [POISON, *range(40, 56)]
    (failed,) = driver.run(add_message(1, prompt))
    assert failed.failed is not None
    assert len(driver.scheduler.pool.names) == 0
    (again,) = driver.run(add_message(2, [*prompt, 1]))
    assert again.cached == 0


def test_failure_in_the_middle_of_generation_keeps_what_was_delivered(depth: int) -> None:
    message = add_message(1, [5] * 6, 12)
    poison = expected_tokens(message, 396)[4]
    driver = Driver(small_config(depth=depth), poison=poison)
    (entry,) = driver.run(message)
    assert entry.failed is not None
    assert entry.tokens == expected_tokens(message, 396)[:5]


# --- delivered tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_resumes_after_a_crash_with_the_same_tokens(depth: int, temperature: float) -> None:
    whole = add_message(1, [5] * 6, 12, temperature=temperature, seed=2**63 + 5)
    tokens = expected_tokens(whole, 396)
    for have in range(13):
        driver = Driver(small_config(depth=depth))
        resumed = add_message(1, [5] * 6, 12, temperature=temperature, seed=2**63 + 5, delivered=tokens[:have])
        (entry,) = driver.run(resumed)  # the inbox checks the positions
        assert entry.tokens == tokens
        assert entry.finish == FinishReason.LENGTH


def test_delivered_tokens_count_towards_the_limits(depth: int) -> None:
    plain = add_message(1, [5] * 6, 12, min_tokens=6)
    tokens = expected_tokens(plain, 396)
    stop = tokens[3]
    stopping = expected_tokens(add_message(1, [5] * 6, 12, min_tokens=6, stop_token_ids=[stop]), 396)
    driver = Driver(small_config(depth=depth, max_model_len=15))
    limits = {"stop_token_ids": [stop], "min_tokens": 6, "delivered": tokens[:5]}
    (entry,) = driver.run(add_message(1, [5] * 6, 12, **limits))  # type: ignore[arg-type]
    assert entry.tokens == stopping[:9]  # six prompt tokens and nine more are max_model_len


@pytest.mark.parametrize("extra", [0, 3])
def test_delivered_tokens_that_reach_the_limit_finish_at_once(depth: int, extra: int) -> None:
    driver = Driver(small_config(depth=depth))
    replies = driver.step([(0, add_message(1, [5] * 6, 4, delivered=[1] * (4 + extra)))])
    entry = driver.inbox.received[0, 1]
    assert (len(replies), entry.finish, len(entry.tokens)) == (1, FinishReason.LENGTH, 4 + extra)
    assert not driver.engine.has_work


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        ({"ignore_eos": False}, FinishReason.STOP),
        ({"ignore_eos": True}, FinishReason.NONE),
        ({"ignore_eos": False, "min_tokens": 3}, FinishReason.NONE),
        ({"stop_token_ids": [EOS]}, FinishReason.STOP),
    ],
)
def test_delivered_tokens_that_end_the_request_finish_at_once(
    depth: int, options: dict[str, Any], finish: FinishReason
) -> None:
    driver = Driver(small_config(depth=depth))
    driver.step([(0, add_message(1, [5] * 6, 12, delivered=[9, EOS], **options))])
    if finish:
        assert driver.inbox.received[0, 1].finish == finish
    assert driver.engine.has_work == (finish == FinishReason.NONE)


def test_an_empty_delivery_is_a_new_request(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    message = add_message(1, [5] * 6, 4, delivered=[])
    assert driver.run(message)[0].tokens == expected_tokens(message, 396)


# --- calls -------------------------------------------------------------------------------------------------------


def test_reset_with_running_requests_hides_what_they_hold_and_disturbs_nobody(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    runs = add_message(1, list(range(50, 70)), 30)
    driver.run(add_message(0, list(range(80, 100))))
    driver.step([(0, runs)])
    driver.step()
    assert (0, CallDone(9)) in driver.step([(0, ResetPrefixCache(9))])
    again = [add_message(2, list(range(50, 70)), 3), add_message(3, list(range(80, 100)), 3)]
    driver.step([(0, message) for message in again])
    driver.drain()
    received = driver.inbox.received
    assert [received[0, n].cached for n in (2, 3)] == [0, 0]
    assert received[0, 1].tokens == expected_tokens(runs, 396)
    (third,) = driver.run(add_message(4, list(range(50, 70)), 3))
    assert third.cached == 16


def test_reset_after_work_leaves_only_blank_blocks(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    driver.run(*(add_message(n, [n] * 20, 9) for n in range(4)))
    assert len(driver.scheduler.pool.names) > 0
    assert driver.step([(0, ResetPrefixCache(1))]) == [(0, CallDone(1))]
    assert len(driver.scheduler.pool.names) == 0
    driver.scheduler.check_integrity()


def test_statistics_count_what_was_done() -> None:
    driver = Driver(small_config())
    driver.run(add_message(1, [5] * 9, 4), add_message(2, [5] * 9, 4))
    ((client, reported),) = driver.step([(3, GetStatistics(8))])
    assert (client, reported) == (3, driver.engine.statistics(8))
    assert isinstance(reported, Statistics)
    assert (reported.call, reported.num_finished, reported.num_running, reported.num_waiting) == (8, 2, 0, 0)
    assert (reported.num_prompt_tokens, reported.num_generation_tokens) == (18, 8)
    assert (reported.num_steps, reported.num_scheduled_rows, reported.max_scheduled_rows) == (4, 8, 2)
    assert reported.num_scheduled_tokens == 9 + 1 + 3 * 2  # the second shares two blocks of the first
    assert (reported.prefix_cache_queries, reported.prefix_cache_hits) == (18, 8)
    assert (reported.num_blocks, reported.num_free_blocks, reported.block_size) == (100, 99, 4)
    assert reported.max_used_blocks == 4  # two shared, and each its own third


def test_an_idle_engine_says_nothing_and_makes_no_step(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    driver.run(add_message(1, [5] * 4))
    steps = driver.scheduler.stats.num_steps
    assert not driver.engine.has_work
    assert driver.step() == []
    assert driver.scheduler.stats.num_steps == steps


def test_max_tokens_is_never_exceeded_with_steps_in_flight(depth: int) -> None:
    driver = Driver(small_config(depth=depth, budget=7))
    messages = [add_message(n, list(range(n, n + 5)), n % 3 + 1) for n in range(12)]
    for message, entry in zip(messages, driver.run(*messages), strict=True):
        assert entry.tokens == expected_tokens(message, 396)
    assert driver.scheduler.stats.num_generation_tokens == sum(n % 3 + 1 for n in range(12))


def test_no_step_is_spent_on_what_follows_the_last_token(depth: int) -> None:
    """That a request ends by its length is known before its last token is."""
    driver = Driver(small_config(depth=depth))
    driver.run(add_message(1, [5] * 6, 4), add_message(2, [6] * 6, 9))
    assert driver.scheduler.stats.num_scheduled_tokens == (6 + 3) + (6 + 8)


def test_a_request_that_fills_the_whole_cache_runs_to_its_end(depth: int) -> None:
    driver = Driver(small_config(depth=depth, num_blocks=9))
    messages = [add_message(n, [n] * 7, None) for n in range(3)]
    for message, entry in zip(messages, driver.run(*messages), strict=True):
        assert entry.tokens == expected_tokens(message, 32)
        assert len(entry.tokens) == 25


def test_every_counter_of_the_scheduler_is_in_the_answer() -> None:
    """The scheduler counts in a Statistics message, so a new counter needs one declaration."""
    engine = Driver(small_config()).engine
    engine.scheduler.stats.num_swapped_in_blocks, engine.scheduler.stats.num_head_fenced = 7, 8
    answer = engine.statistics(3, 9)
    assert (answer.num_swapped_in_blocks, answer.num_head_fenced, answer.call, answer.engine_ns) == (7, 8, 3, 9)
    assert type(answer) is Statistics


@pytest.mark.parametrize("is_paused", [False, True])
def test_the_answer_to_new_weights_does_not_wait_for_rows_that_are_computed_again(is_paused: bool) -> None:
    driver = Driver(small_config())
    message, mark = add_message(1, [5] * 9, 12), WeightsMark(1, "fingerprint", "digest", "")
    driver.step([(0, message)])
    driver.step()
    if is_paused:
        driver.step([(0, Pause(1, PauseMode.ALL))])
    num_plans, num_computed = len(driver.executor.plans), driver.scheduler.stats.num_scheduled_tokens
    assert driver.step([(3, NewWeights(7, mark, UpdateMode.KEEP))]) == [(3, Weights(7, mark))]
    assert len(driver.executor.plans) == num_plans
    if is_paused:
        driver.step([(0, Resume(2))])
    else:
        driver.step()
    assert driver.scheduler.stats.num_scheduled_tokens - num_computed == 9 + 2
    driver.drain()
    assert driver.inbox.received[0, 1].tokens == expected_tokens(message, 396)
