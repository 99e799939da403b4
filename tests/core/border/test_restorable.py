"""Requests that a lost engine had accepted: no bound refuses them, and nobody gets more of them than there can be."""

from collections.abc import Callable

from core.border.ledger import MAX_UNCONFIRMED
from core.border.restorable import Restorable
from ipc.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    BeginDrain,
    CallFailed,
    ErrorCode,
    Hello,
    RequestFailed,
    Welcome,
)
from tests.core.running_engine import Running, expected, limits, owner, start_engine
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
        assert "nobody starts this engine again" in failed.message
        client.add(1, [1])
        assert client.finish(1) == [expected([1], 8)]
