"""Clients on hold and pauses: requests wait without rows or blocks, go on with the same tokens, and harm nobody."""

import random

import pytest

from core.inputs import HoldClient, ReleaseClient
from ipc.wire.messages import Abort, CallDone, FinishReason, Goodbye, Pause, PauseMode, Resume
from tests.columns import pack_numbers
from tests.core.driving import Driver, add_message, expected_tokens, small_config
from tests.in_turn import in_turn


@pytest.mark.parametrize(("prefix_caching", "depth"), in_turn([True, False], [1, 2]))
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))])
def test_holds_change_no_token(seed: int, depth: int, prefix_caching: bool) -> None:
    """Three clients on and off hold at random, short of blocks and rows, with aborts."""
    rng = random.Random(seed)
    config = small_config(30, max_num_seqs=4, budget=16, depth=depth, prefix_caching=prefix_caching, max_model_len=40)
    driver = Driver(config)
    held: set[int] = set()
    requests = {}
    for step in range(150):
        messages: list[tuple[int, object]] = []
        client = rng.randrange(3)
        if rng.random() < 0.3 and step < 100:
            message = add_message(step, [rng.randrange(9) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 20))
            requests[client, step] = message
            messages.append((client, message))
        if rng.random() < 0.2:
            messages.append((client, ReleaseClient() if client in held else HoldClient()))
            held ^= {client}
        if rng.random() < 0.03 and requests:
            who, number = rng.choice(list(requests))
            messages.append((who, Abort(pack_numbers([number]))))
        driver.step(messages)  # type: ignore[arg-type]
        running = driver.scheduler.running
        assert not held & set(driver.scheduler.table.client[running].tolist())
    driver.step([(client, ReleaseClient()) for client in sorted(held)])
    driver.drain()
    assert driver.scheduler.waiting.num_tokens == 0
    for key, message in requests.items():
        received = driver.inbox.received[key]
        wanted = expected_tokens(message, 40)
        assert received.tokens == wanted[: len(received.tokens)]
        assert received.tokens == wanted or received.finish == FinishReason.ABORT


def test_what_ends_before_it_is_computed_again_is_no_thrash() -> None:
    driver = Driver(small_config(30, budget=4, prefix_caching=False))
    driver.step([(0, add_message(1, [1] * 12, 20))])
    driver.step()
    driver.step()
    for again in (4, 8):  # of the prompt's 12 tokens, 4 in a step
        driver.step([(0, HoldClient())])
        driver.step([(0, ReleaseClient())])
        assert driver.scheduler.stats.num_recomputed_tokens == again + 8
        driver.step([(0, HoldClient() if again == 4 else Abort(pack_numbers([1])))])
        assert driver.scheduler.stats.num_recomputed_tokens == again


def test_who_is_on_hold_takes_nothing_and_is_no_work() -> None:
    driver = Driver(small_config(30, max_num_seqs=2))
    driver.step([(0, add_message(1, [1] * 9, 20)), (0, add_message(2, [2] * 9, 20)), (0, add_message(3, [3], 20))])
    driver.step([(0, HoldClient())])
    assert not driver.engine.has_work
    assert driver.engine.has_unfinished
    assert driver.engine.count_waiting() == (3, 9 + 9 + 1 + 2)
    assert driver.scheduler.pool.num_free == driver.scheduler.pool.num_blocks - 1
    (other,) = driver.run(add_message(1, [4], 5), client=1)
    assert len(other.tokens) == 5
    steps = driver.engine.statistics(0).num_steps
    driver.step([(0, ReleaseClient())])
    driver.drain()
    assert driver.engine.statistics(0).num_steps > steps
    assert driver.engine.statistics(0).prefix_cache_hits == 0  # counted where a request begins, which it did once
    assert [len(driver.inbox.received[0, number].tokens) for number in (1, 2, 3)] == [20] * 3


def test_the_end_of_a_client_on_hold() -> None:
    driver = Driver(small_config(30))
    driver.step([(0, add_message(1, [1] * 9, 20))])
    driver.step([(0, HoldClient()), (0, Goodbye())])
    assert not driver.engine.has_unfinished
    assert driver.engine.count_waiting() == (0, 0)
    driver.step([(0, ReleaseClient())])  # was on its way already
    driver.scheduler.check_integrity()


def test_pauses() -> None:
    driver = Driver(small_config(60, max_num_seqs=4))
    message = add_message(1, [1] * 5, 30)
    driver.step([(0, message)])
    assert driver.step([(9, Pause(7, PauseMode.NEW)), (0, add_message(2, [2], 3))])[0] == (9, CallDone(7))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.get_request_counts() == (1, 1)
    driver.step([(9, Pause(8, PauseMode.ALL))])
    before = len(driver.inbox.received[0, 1].tokens)
    assert before >= 6
    assert not driver.engine.has_work
    driver.step()
    driver.step([(0, Abort(pack_numbers([2])))])
    assert driver.inbox.received[0, 2].finish == FinishReason.ABORT
    assert len(driver.inbox.received[0, 1].tokens) == before
    driver.step([(9, Resume(9))])
    driver.drain()
    assert driver.inbox.received[0, 1].tokens == expected_tokens(message, 1000)


def test_what_has_begun_finishes_under_a_pause_of_new_ones() -> None:
    """Preempted requests come back; queued ones do not start before the pause is over, and then in their order."""
    driver = Driver(small_config(9, max_num_seqs=3, watermark=0.0))
    driver.step([(0, add_message(number, [number] * 5, 20)) for number in range(3)])
    driver.step([(9, Pause(1, PauseMode.NEW)), (1, add_message(1, [5], 3)), (0, add_message(9, [6], 3))])
    while driver.engine.has_work:
        driver.step()
    assert driver.engine.statistics(0).num_preemptions > 0
    assert [len(driver.inbox.received[0, number].tokens) for number in range(3)] == [20] * 3
    assert driver.engine.statistics(0).num_unbegun == 2
    driver.step([(1, HoldClient()), (9, Pause(1, PauseMode.NEW))])
    assert driver.engine.statistics(0).num_unbegun == 1
    driver.step([(1, ReleaseClient()), (0, Abort(pack_numbers([9])))])
    assert driver.engine.count_waiting() == (1, 1)
    driver.step([(9, Resume(2))])
    driver.drain()
    assert len(driver.inbox.received[1, 1].tokens) == 3
