"""Isolation: parked requests wait, and go on, end or are refused as the supervisor and their clients say."""

import msgspec
import numpy as np

from core.border.inbox import Inbox
from core.border.isolation import Isolation
from ipc.records.black_box import request_digest
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, RequestFailed
from ipc.wire.start_messages import Isolate
from tests.raw_client import request

CLIENT = 3
NOW = 100.0


def digest(message: AddRequest) -> bytes:
    return request_digest(message.prompt_token_ids, message.params)


def parked(*messages: AddRequest) -> tuple[Isolation, Inbox]:
    """These requests of one client, all of them parked."""
    inbox = Inbox()
    isolation = Isolation(inbox, 0, Isolate([digest(message) for message in messages]))
    for message in messages:
        assert isolation.is_parked(message)
        isolation.park(CLIENT, message, NOW)
    return isolation, inbox


def released(isolation: Isolation, isolate: Isolate, now: float = NOW) -> list[AddRequest]:
    begun: list[AddRequest] = []
    isolation.change(isolate, now, lambda client, message: begun.append(message))
    return begun


def test_without_suspects_nobody_waits() -> None:
    isolation = Isolation(Inbox(), 0, Isolate())
    assert not isolation.is_parked(request(1, [1]))
    assert not isolation.is_quarantined(request(1, [1]))


def test_what_is_released_begins_and_the_rest_waits() -> None:
    one, two = request(1, [1]), request(2, [2])
    isolation, inbox = parked(one, two)
    assert inbox.num_queued_requests == 2
    assert released(isolation, Isolate([digest(two)])) == [one]
    assert len(isolation) == inbox.num_queued_requests == 1
    assert released(isolation, Isolate()) == [two]
    assert inbox.num_queued_requests == 0


def test_a_quarantined_one_fails_with_its_code() -> None:
    one, two = request(1, [1]), request(2, [2])
    isolation, _ = parked(one, two)
    assert released(isolation, Isolate([], [digest(one)])) == [two]
    ((client, failed),) = isolation.take_done()
    assert isinstance(failed, RequestFailed)
    assert (client, failed.number, failed.code) == (CLIENT, 1, ErrorCode.QUARANTINED)
    assert isolation.is_quarantined(one)


def test_the_deadline_runs_while_it_waits() -> None:
    one = msgspec.structs.replace(request(1, [1]), deadline_ms=5000)
    isolation, _ = parked(one)
    (again,) = released(isolation, Isolate(), NOW + 2)
    assert again.deadline_ms == 3000


def test_an_abort_and_the_end_of_a_client() -> None:
    isolation, inbox = parked(request(1, [1]), request(2, [2]), request(3, [3]))
    rest, last = isolation.abort(CLIENT, Abort(np.array([1, 9], "<u4").tobytes()))
    assert rest is not None
    assert last is not None
    assert np.frombuffer(rest.numbers, "<u4").tolist() == [9]
    assert list(last.finish) == [FinishReason.ABORT]
    isolation.forget(CLIENT)
    assert len(isolation) == inbox.num_queued_requests == 0
    assert released(isolation, Isolate()) == []
