"""Requests that a lost engine had accepted: no bound refuses them, and nobody gets more of them than there can be."""

import time
from collections.abc import Callable

import pytest

from core.border import reception
from core.border.ledger import MAX_UNCONFIRMED
from core.border.reception import Restorable
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    BeginDrain,
    CallDone,
    CallFailed,
    EngineStopping,
    ErrorCode,
    Hello,
    Refused,
    RequestFailed,
    Welcome,
)
from tests.columns import pack_numbers
from tests.core.running_engine import LONG, Running, expected, limits, owner, start_engine
from tests.raw_client import RawClient

__all__ = ["start_engine"]


def come_back(running: Running, num_resumed: int) -> RawClient:
    client = RawClient(running.address, hello=False)
    client.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "back", b"x" * 16, b"", num_resumed))
    client.welcome = client.receive(Welcome)
    return client


def test_as_many_as_were_announced_pass_every_bound(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_requests=2, max_client_bytes=400, max_num_queued_tokens=100)
    with come_back(running, 30) as client:
        for number in range(32):
            client.add(number, [number] * 20, max_tokens=12_000)
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (30, ErrorCode.RESOURCE_EXHAUSTED)


def test_an_engine_that_begins_to_drain_waits_for_what_was_announced(start: Callable[..., Running]) -> None:
    """Two of three come after the drain has begun, and are not new; a fourth is, and is refused at once."""
    running = start(lease_ms=60_000)
    with come_back(running, 3) as client, owner(running) as asking:
        client.add(0, [10], max_tokens=LONG)
        asking.send(BeginDrain(5))
        asking.receive(CallDone)
        for number in (1, 2, 3):
            client.add(number, [10 + number], max_tokens=8)
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (3, ErrorCode.UNAVAILABLE)
        assert client.finish(1, 2) == [expected([11], 8), expected([12], 8)]
        client.send(Abort(pack_numbers([0])))
        client.finish(0)
        client.receive(EngineStopping)


def test_a_new_request_waits_for_the_engine_that_follows(start: Callable[..., Running]) -> None:
    """It is neither begun nor refused: its client sends it again, as all that has not finished."""
    running = start(resume_ms=60_000)
    with RawClient(running.address) as client, owner(running) as asking:
        client.add(0, [10], max_tokens=LONG)
        asking.send(BeginDrain(5, 60_000, True))
        asking.receive(CallDone)
        client.add(1, [11])
        client.send(Abort(pack_numbers([0])))
        assert client.receive(EngineStopping).comes_back
        assert 1 not in client.tokens


def test_an_announcement_that_is_not_kept_delays_a_drain_only_for_a_while(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "RETURN_S", 0.2)
    running = start(lease_ms=60_000)  # so that it is not the lease that ends the wait
    with come_back(running, 3) as client, owner(running) as asking:
        asking.send(BeginDrain(5))
        asking.receive(CallDone)
        client.receive(EngineStopping)


def test_who_comes_back_to_an_engine_that_drains_already_is_told(start: Callable[..., Running]) -> None:
    """It follows another one, whose clients look for it, and has nobody yet."""
    running = start(epoch=1)
    with owner(running) as asking:
        asking.send(BeginDrain(5))
        asking.receive(CallDone)
        with RawClient(running.address, hello=False) as client:
            client.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "back", b"x" * 16, b"", 1))
            assert client.receive(Refused).code == ErrorCode.UNAVAILABLE
        asking.receive(EngineStopping)


@pytest.mark.parametrize("later_s", [0.0, 0.001, 0.005, 0.05])
def test_a_new_request_is_refused_at_once_while_a_drain_lasts(later_s: float, start: Callable[..., Running]) -> None:
    """Also after the inbox has ended: the engine thread takes nothing from it any more and only the IO thread reads."""
    running = start()
    with RawClient(running.address) as client, owner(running) as asking:
        client.add(0, [10], max_tokens=LONG)
        client.statistics()  # so it was read
        asking.send(BeginDrain(5))
        asking.receive(CallDone)
        time.sleep(later_s)
        for number in range(1, 20):
            client.add(number, [10 + number])
            failed = client.receive(RequestFailed)
            assert (failed.number, failed.code) == (number, ErrorCode.UNAVAILABLE)
        assert 0 not in client.finished, "it was refused at the end"
        client.send(Abort(pack_numbers([0])))
        client.receive(EngineStopping)


def test_the_stock_is_one_for_all() -> None:
    stock = Restorable(limits(max_num_seqs=3, max_num_queued_requests=5))
    assert stock.grant(10) == 10
    assert stock.grant(-1) == 0
    assert stock.grant(10**9) == 2 * 8 + MAX_UNCONFIRMED - 10
    assert stock.grant(1) == 0


def test_an_engine_that_nobody_starts_again_makes_no_room(start: Callable[..., Running]) -> None:
    with owner(start()) as client:
        client.send(BeginDrain(5, 0, True))
        failed = client.receive(CallFailed)
        assert failed.code == ErrorCode.INVALID_ARGUMENT
        assert "this engine will not be restarted" in failed.message
        client.add(1, [1])
        assert client.finish(1) == [expected([1], 8)]
