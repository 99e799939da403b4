"""Request events: each request's story in engine time, whatever happens to it; none where nothing happens."""

import pytest

from core.border.backlog import merge_outputs
from core.engine import EngineCore
from core.executors.fake import create
from core.inputs import HoldClient, ReleaseClient, SetClientWeight
from core.scheduling.decisions import Cause, Verdict
from frontend.client.request_events import RequestEvent, read_events, time_in_queue
from ipc.errors import MalformedMessageError
from ipc.wire.messages import Outputs
from ipc.wire.scheduling_messages import EventCause, EventKind, Reason, RequestEvents
from tests.core.driving import Driver, add_message, small_config

QUEUED, SCHEDULED, PREEMPTED, RESUMED = EventKind


def stories(driver: Driver) -> dict[int, list[RequestEvent]]:
    """Events of all messages sent, by request number."""
    found: dict[int, list[RequestEvent]] = {}
    for _, _, replies in driver.log:
        for _, reply in replies:
            if isinstance(reply, Outputs) and reply.events is not None:
                for number, event in read_events(reply.events):
                    found.setdefault(number, []).append(event)
    return found


def run(driver: Driver, limit: int = 400) -> None:
    """Until nothing is left; a step takes a second."""
    now_s = 10
    while driver.engine.has_work:
        driver.step(now_ns=now_s * 10**9)
        now_s += 1
        assert now_s < limit


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_and_resumed(mode: str) -> None:
    num_swap_blocks = 20 if mode == "swap" else 0
    config = small_config(9, max_num_seqs=3, watermark=0.0, preemption_mode=mode, num_swap_blocks=num_swap_blocks)
    driver = Driver(config)
    executor = create(config)  # which does not look at blocks, so that nothing need be copied
    executor.initialize_cache(config)
    driver.engine = EngineCore(config, executor)
    driver.scheduler = driver.engine.scheduler
    driver.step([(0, add_message(number, [number] * 5, 20)) for number in range(3)], now_ns=5 * 10**9)
    run(driver)
    found = stories(driver)
    assert sorted(found) == [0, 1, 2]
    num_preempted = 0
    for events in found.values():
        assert [event.kind for event in events[:2]] == [QUEUED, SCHEDULED]
        assert events[0].time == 5.0
        assert [event.kind for event in events[2:]] == [PREEMPTED, RESUMED] * (len(events) // 2 - 1)
        times = [event.time for event in events]
        assert times == sorted(times)
        for event in events[2::2]:
            assert event.cause is EventCause.OLDER
            assert (event.amount > 0) == (mode == "swap")
            num_preempted += 1
    assert num_preempted == driver.engine.statistics(0).num_preemptions > 0
    assert driver.engine.statistics(0).num_swapped == 0
    assert driver.engine.statistics(0).num_free_swap_blocks == num_swap_blocks
    assert time_in_queue(tuple(found[0])) == 0.0


def test_a_hold_preempts() -> None:
    driver = Driver(small_config())
    driver.step([(0, add_message(1, [1] * 8, 9))], now_ns=10**9)
    driver.step([(0, HoldClient())], now_ns=2 * 10**9)
    assert driver.engine.statistics(0).num_on_hold == 1
    driver.step([(0, ReleaseClient())], now_ns=3 * 10**9)
    driver.drain()
    (events,) = stories(driver).values()
    assert [(event.kind, event.time, event.cause) for event in events[2:]] == [
        (PREEMPTED, 2.0, EventCause.HOLD),
        (RESUMED, 3.0, EventCause.NONE),
    ]
    assert events[3].amount == 8  # tokens found in the prefix cache


def test_steady_steps_tell_nothing() -> None:
    driver = Driver(small_config())
    driver.step([(0, add_message(1, [1], 9))])
    for _ in range(5):
        ((_, reply),) = driver.step()
        assert isinstance(reply, Outputs)
        assert reply.events is None


def test_merged_outputs_keep_all_events() -> None:
    driver = Driver(small_config(9, max_num_seqs=3, watermark=0.0))
    driver.step([(0, add_message(number, [number] * 5, 20)) for number in range(3)])
    run(driver)
    sent = [reply for _, _, replies in driver.log for _, reply in replies if isinstance(reply, Outputs)]
    merged = merge_outputs(sent)
    assert merged.events is not None
    single = [event for one in sent if one.events is not None for event in read_events(one.events)]
    assert read_events(merged.events) == single
    assert len(single) > 8


def test_torn_columns_are_an_error() -> None:
    whole = RequestEvents(bytes(4), bytes(2), b"\1", bytes(1), bytes(4), bytes(8))
    assert len(read_events(whole)) == 1
    for bad in (
        RequestEvents(b"", *[bytes(1)] * 5),
        RequestEvents(bytes(4), bytes(2), b"\x63", b"\0", bytes(4), bytes(8)),
    ):
        with pytest.raises(MalformedMessageError, match="request events"):
            read_events(bad)


def test_the_wires_codes_are_the_schedulers() -> None:
    assert all(EventCause[cause.name] == cause for cause in Cause)
    assert all(Reason[verdict.name] == verdict for verdict in Verdict if verdict is not Verdict.HOLDS_THE_REST)


def test_heads_are_counted_by_what_they_lack() -> None:
    driver = Driver(small_config(30, max_num_seqs=1))
    driver.step([(0, add_message(number, [number] * 4, 6)) for number in range(2)])
    driver.drain()
    statistics = driver.engine.statistics(0, 77)
    assert statistics.num_head_no_row == 6
    assert statistics.engine_ns == 77
    full = Driver(small_config(9, max_num_seqs=3, watermark=0.0))
    full.step([(0, add_message(number, [number] * 13, 9)) for number in range(3)])
    full.drain()
    assert full.engine.statistics(0).num_head_no_blocks > 0


def test_a_weight_is_a_share() -> None:
    driver = Driver(small_config(200, max_num_seqs=2, budget=1, scheduling_policy="fair", fair_quantum=0))
    driver.step([(1, SetClientWeight(3.0)), (1, add_message(1, [1], 60)), (2, add_message(1, [2], 60))])
    while not driver.inbox.received[1, 1].is_over:
        driver.step()
    assert 17 <= len(driver.inbox.received[2, 1].tokens) <= 23
    driver.drain()
