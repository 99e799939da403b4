"""Shares of the queue: what a greedy client leaves for those that come after it."""

from collections.abc import Callable

import msgspec

from ipc.wire.messages import CallDone, Pause, PauseMode, RequestFailed, Resume
from tests.core.running_engine import NUM_ROWS, Running, expected, owner, start_engine, wait_for
from tests.raw_client import RawClient, request

__all__ = ["start_engine"]  # a fixture
BOUND = 64


def fill(client: RawClient, before: int) -> int:
    """Send requests until all places are asked for; return how many were taken. before: that wait already."""
    for number in range(BOUND):
        client.add(number, [1, number])
    client.add(BOUND, [1] * 20_000)  # refused for another reason, after all others
    num_refused = 0
    while client.receive(RequestFailed).number < BOUND:
        num_refused += 1
    wait_for(client, lambda statistics: statistics.num_waiting == before + BOUND - num_refused)
    return BOUND - num_refused


def test_a_greedy_client_leaves_room(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_requests=BOUND, lease_ms=60_000)
    with owner(running) as first, RawClient(running.address) as second, RawClient(running.address) as third:
        first.send(Pause(1, PauseMode.NEW))
        first.receive(CallDone)
        taken = fill(first, 0)
        assert taken == (BOUND + NUM_ROWS) // 2
        taken += fill(second, taken)
        assert taken < BOUND
        third.add(0, [1, 1])
        third.statistics()
        first.add(BOUND + 1, [1])
        refused = first.receive(RequestFailed)
        assert refused.message.startswith(
            "36 of the requests that are waiting to start are this client's, and the last 9 places"
        )
        first.send(Resume(2))
        first.receive(CallDone)
        assert third.finish(0) == [expected([1, 1], 8)]
        first.finish(*range(30))
        second.finish(0)
        first.add(BOUND + 2, [1])  # what has begun takes no place
        first.finish(BOUND + 2)


def test_a_client_with_much_to_read_leaves_room_for_tokens(start: Callable[..., Running]) -> None:
    bound = 50_000
    running = start(max_num_queued_tokens=bound, lease_ms=60_000)
    with owner(running) as greedy, RawClient(running.address) as other:
        greedy.send(Pause(1, PauseMode.NEW))
        greedy.receive(CallDone)
        for number in range(5):
            greedy.add(number, [1] * 10_000)
        refused, last = greedy.receive(RequestFailed), greedy.receive(RequestFailed)
        assert (refused.number, last.number) == (3, 4)
        assert refused.message.startswith(
            "30000 of the tokens that are waiting to start are this client's, and the last"
        )
        other.add(1, [1] * 14_000)
        assert other.statistics().num_waiting == 4
        greedy.send(Resume(2))
        greedy.receive(CallDone)
        other.finish(1)


def test_a_greedy_tenant_leaves_room_within_its_client_too(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_requests=BOUND, lease_ms=60_000)
    with owner(running) as server, RawClient(running.address) as second:
        server.send(Pause(1, PauseMode.NEW))
        server.receive(CallDone)
        for number in range(BOUND):
            server.send(msgspec.structs.replace(request(number, [1, number]), tenant="greedy"))
        server.add(BOUND, [1] * 20_000)  # refused for another reason, after all others
        refused = [server.receive(RequestFailed)]
        while refused[-1].number < BOUND:
            refused.append(server.receive(RequestFailed))
        assert "are waiting to start are this tenant's, and the last" in refused[0].message
        taken = BOUND + 1 - len(refused)
        assert taken == (BOUND + 2 * NUM_ROWS) // 3 + 1
        second.send(msgspec.structs.replace(request(0, [1]), tenant="greedy"))  # it is the same in another session
        assert "are this tenant's" in second.receive(RequestFailed).message
        for number in range(3):
            server.send(msgspec.structs.replace(request(BOUND + 1 + number, [2, number]), tenant="polite"))
        server.send(Resume(2))
        server.receive(CallDone)
        server.finish(*range(BOUND + 1, BOUND + 4))
        server.finish(*range(taken))
        server.statistics()  # whoever is answered finds the ends before it noted
        assert [one.num_requests for one in running.io.sessions._tenants.values()] == [0, 0]
