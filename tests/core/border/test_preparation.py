"""Requests that need preparation: they wait outside the engine, and end in each way that a request can end there."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from core.border import preparation
from core.border.inbox import Inbox
from core.border.turns import BURST_S, Turns
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    Abort,
    AddRequest,
    ErrorCode,
    FinishReason,
    Goodbye,
    Outputs,
    RequestFailed,
    decode_server_message,
    encode,
)
from tests.columns import pack_numbers
from tests.core.border.test_restorable import come_back
from tests.core.running_engine import LONG, Running, expected, is_free, start_engine, wait_for
from tests.raw_client import PATIENCE_S, RawClient, request

__all__ = ["start_engine"]

Start = Callable[..., Running]
PATIENT = {"heartbeat_ms": 20_000, "lease_ms": 60_000}  # a RawClient sends no heartbeats


class Gate:
    """A test-only preparer: prompts that begin with 7 wait until the gate opens, those with 8 fail, with 9 crash."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun: list[int] = []  # request numbers
        self.num_starts = 0

    share = 1.0

    def start(self) -> None:
        self.num_starts += 1

    def needs(self, message: AddRequest) -> bool:
        return message.prompt_token_ids[0] in (7, 8, 9)

    def prepare(self, message: AddRequest) -> None:
        self.begun.append(message.number)
        kind = message.prompt_token_ids[0]
        if kind == 8:
            raise InvalidRequestError("8 is no grammar: write one that is")
        if kind == 9:
            raise KeyError("nine")
        assert self.opened.wait(PATIENCE_S)

    def close(self) -> None:
        pass


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_prepared_request_runs_and_others_pass_it_meanwhile(start: Start, gate: Gate) -> None:
    with RawClient(start(gate, **PATIENT).address) as client:
        client.add(1, [7, 1])
        client.add(2, [1, 2])
        assert client.finish(2) == [expected([1, 2], 8)]
        assert 1 not in client.tokens
        gate.opened.set()
        assert client.finish(1) == [expected([7, 1], 8)]


def test_prepared_requests_of_a_client_keep_their_order(start: Start, gate: Gate) -> None:
    gate.opened.set()
    with RawClient(start(gate, **PATIENT).address) as client:
        for number in range(30):
            client.add(number, [7, number])
        assert client.finish(*range(30)) == [expected([7, number], 8) for number in range(30)]
    assert gate.begun == list(range(30))


def test_work_is_started_once_and_before_the_first_request(start: Start, gate: Gate) -> None:
    gate.opened.set()
    with RawClient(start(gate, **PATIENT).address) as client:
        client.add(1, [1])
        client.finish(1)
        assert gate.num_starts == 0
        for number in (2, 3):
            client.add(number, [7])
            client.finish(number)
        assert gate.num_starts == 1


class Unstartable(Gate):
    """A test-only preparer that cannot be started."""

    def start(self) -> None:
        raise KeyError("no start")


def test_requests_are_answered_where_the_work_cannot_be_started(start: Start, logged: Callable[[], str]) -> None:
    preparer = Unstartable()
    preparer.opened.set()
    with RawClient(start(preparer, **PATIENT).address) as client:
        for number in (2, 3):
            client.add(number, [7, number])
            assert client.finish(number) == [expected([7, number], 8)]
    assert logged().count("Traceback") == 1


class Slow(Gate):
    """A test-only preparer whose work takes 5 ms."""

    share = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0  # when its last work ended

    def prepare(self, message: AddRequest) -> None:
        time.sleep(0.005)
        self.last = time.monotonic()
        self.begun.append(message.number)


def test_beside_others_a_client_has_its_share_and_keeps_nobody_else_waiting(start: Start) -> None:
    slow = Slow()
    address = start(slow, **PATIENT).address
    with RawClient(address) as many, RawClient(address) as other:
        other.add(1, [1], LONG)
        other.receive(Outputs)
        begin = time.monotonic()
        for number in range(100, 140):
            many.add(number, [7])
        wait_until(lambda: len(slow.begun) == 30)
        other.add(2, [7])
        other.finish(2)
        assert slow.begun[-1] == 2 or slow.begun.index(2) < 35, "it pays for its own work alone"
        many.finish(*range(100, 140))
        other.send(Abort(pack_numbers([1])))
    assert sorted(slow.begun) == [2, *range(100, 140)]
    assert slow.last - begin > (39 * 0.005 - BURST_S) / 0.25, "39 before the last"


def test_what_a_client_sends_again_after_its_engine_was_lost_is_free(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged = list[tuple[int, str]]()
    monkeypatch.setattr(Turns, "charge", lambda turns, owner, seconds: charged.append(owner))
    running = start(Slow(), **PATIENT)
    with RawClient(running.address) as other, come_back(running, 2) as client:
        other.add(0, [1], LONG)
        other.receive(Outputs)
        client.add(1, [7])
        client.finish(1)
        time.sleep(0.06)  # who has work is looked at every 50 ms
        client.add(2, [7])
        client.finish(2)
        assert not charged
        client.add(3, [7])
        client.finish(3)
        assert len(charged) == 1


def test_a_client_alone_does_not_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    charged = list[tuple[int, str]]()
    monkeypatch.setattr(Turns, "charge", lambda turns, owner, seconds: charged.append(owner))
    address = start(Slow(), **PATIENT).address
    with RawClient(address) as client, RawClient(address):
        client.add(0, [1], LONG)
        client.receive(Outputs)
        for number in range(1, 8):
            client.add(number, [7])
        client.finish(*range(1, 8))
        assert not charged, "its own requests are the only ones"
        client.send(msgspec.structs.replace(request(8, [1], LONG), tenant="a"))
        client.receive(Outputs)
        end = time.monotonic() + PATIENCE_S
        for number in itertools.count(9):  # who has work is looked at every 50 ms
            client.send(msgspec.structs.replace(request(number, [7]), tenant="b"))
            client.finish(number)
            if charged:
                break
            assert time.monotonic() < end, "tenants are not alone"
        assert {owner[1] for owner in charged} == {"b"}


def test_clients_take_turns(start: Start, gate: Gate) -> None:
    address = start(gate, **PATIENT).address
    with RawClient(address) as many, RawClient(address) as other:
        for number in range(1, 5):
            many.add(number, [7])
        wait_until(lambda: gate.begun == [1])
        many.statistics()  # all of its requests have arrived
        other.add(10, [7])
        other.statistics()
        gate.opened.set()
        many.finish(1, 2, 3, 4)
        other.finish(10)
    assert gate.begun == [1, 2, 10, 3, 4]


@pytest.mark.parametrize(("kind", "text"), [(8, "8 is no grammar: write one that is"), (9, "KeyError: 'nine'")])
def test_a_failure_is_its_client_s_alone(start: Start, gate: Gate, kind: int, text: str) -> None:
    with RawClient(start(gate, **PATIENT).address) as client:
        client.add(1, [kind])
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (1, ErrorCode.INVALID_ARGUMENT)
        assert text in failed.message
        client.add(2, [1])
        assert client.finish(2) == [expected([1], 8)]
        client.add(1, [1])  # the number was used
        assert client.receive(RequestFailed).code is ErrorCode.ALREADY_EXISTS


def test_an_abort_finds_it(start: Start, gate: Gate) -> None:
    """One under way, one behind it in the queue, and one in the engine, in one Abort; all get their last rows."""
    with RawClient(start(gate, **PATIENT).address) as client:
        client.add(1, [7])
        client.add(2, [7])
        client.add(3, [1], LONG)
        wait_until(lambda: gate.begun == [1])
        client.send(Abort(pack_numbers([1, 2, 3])))
        assert client.finish(1, 2)[:2] == [[], []]
        client.finish(3)
        assert {client.finished[number] for number in (1, 2, 3)} == {FinishReason.ABORT}
        gate.opened.set()
        client.add(4, [7, 7])
        assert client.finish(4) == [expected([7, 7], 8)]
        assert gate.begun == [1, 4]  # what was aborted in the queue is not prepared
        wait_for(client, is_free)


def test_of_several_choices_one_is_aborted(start: Start, gate: Gate) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=8, ignore_eos=True)
    message = AddRequest(1, np.array([7], "<i4").tobytes(), params, 0)
    finish: dict[int, int] = {}
    with RawClient(start(gate, **PATIENT).address) as client:
        client.send(message, Abort(pack_numbers([1]), np.array([1], "<u2").tobytes()))
        client.statistics()  # both have arrived
        gate.opened.set()
        while len(finish) < 2:
            client.socket.poll(int(PATIENCE_S * 1000))
            outputs = decode_outputs(client.socket.recv())
            choices = np.frombuffer(outputs.choices, "<u2").tolist() or [0] * len(outputs.finish)
            finish |= {choice: code for choice, code in zip(choices, outputs.finish, strict=False) if code}
    assert finish == {0: FinishReason.LENGTH, 1: FinishReason.ABORT}


def decode_outputs(frame: bytes) -> Outputs:
    message = decode_server_message(frame)
    assert isinstance(message, Outputs), message
    return message


def test_it_counts_as_queued(start: Start, gate: Gate) -> None:
    with RawClient(start(gate, max_num_queued_requests=2, **PATIENT).address) as client:
        for number in range(3):
            client.add(number, [7])
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (2, ErrorCode.RESOURCE_EXHAUSTED)
        assert "2 requests are waiting to start" in failed.message
        client.send(encode(request(0, [7])))  # sent twice: it is one request
        client.statistics()  # it has arrived
        gate.opened.set()
        assert client.finish(0, 1) == [expected([7], 8)] * 2
        client.add(3, [7])
        assert client.finish(3) == [expected([7], 8)]


def test_the_queue_is_bounded(start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_PREPARING", 2)
    with RawClient(start(gate, **PATIENT).address) as client:
        for number in range(3):
            client.add(number, [7])
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code, failed.retry_after_ms > 0) == (2, ErrorCode.RESOURCE_EXHAUSTED, True)
        gate.opened.set()
        assert client.finish(0, 1) == [expected([7], 8)] * 2


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_client_that_is_gone_is_dropped(start: Start, gate: Gate, says_goodbye: bool) -> None:
    running = start(gate, **PATIENT)
    with RawClient(running.address) as other:
        with RawClient(running.address) as client:
            for number in range(3):
                client.add(number, [7], LONG)
            wait_until(lambda: gate.begun == [0])
            client.statistics()
            assert running.io.inbox.num_queued_requests == 3
            if says_goodbye:
                client.send(Goodbye())
                wait_until(lambda: running.io.inbox.num_queued_requests == 0)
        wait_until(lambda: running.io.inbox.num_queued_requests == 0)
        gate.opened.set()
        other.add(5, [7, 5])
        assert other.finish(5) == [expected([7, 5], 8)]
        assert gate.begun == [0, 5]
        wait_for(other, is_free)


def test_a_drain_waits_for_what_is_in_preparation(start: Start, gate: Gate) -> None:
    running = start(gate, **PATIENT)
    with RawClient(running.address) as client:
        client.add(1, [7])
        wait_until(lambda: gate.begun == [1])
        running.io.drain()
        wait_until(lambda: running.io.border.reception.is_draining)
        client.add(2, [1])
        assert client.receive(RequestFailed).code is ErrorCode.UNAVAILABLE
        gate.opened.set()
        assert client.finish(1) == [expected([7], 8)]


def test_a_stop_joins_the_thread(start: Start, gate: Gate) -> None:
    gate.opened.set()
    running = start(gate, **PATIENT)
    assert any(thread.name == "preparation" for thread in threading.enumerate())
    running.close()
    assert not any(thread.name == "preparation" for thread in threading.enumerate())


def test_each_kind_of_work_has_its_thread_and_a_request_may_need_several() -> None:
    grammars, images, inbox, woken = Gate(), Gate(), Inbox(), threading.Semaphore(0)
    images.needs = lambda message: message.seed == 1  # type: ignore[method-assign]
    images.prepare = lambda message: images.begun.append(message.number)  # type: ignore[method-assign]
    busy: Any = SimpleNamespace(others_than=lambda client, tenant: False)
    both = preparation.Preparation([grammars, images], inbox, busy, 0, wake=woken.release)
    try:
        for number, first, seed in ((1, 7, 0), (2, 7, 1), (3, 1, 1)):
            message = AddRequest(number, bytes([first, 0, 0, 0]), SamplingParams(), seed)
            assert both.needs(message)
            both.begin(1, message, is_free=False)
        assert not both.needs(AddRequest(4, b"\1\0\0\0", SamplingParams(), 0))
        assert woken.acquire(timeout=PATIENCE_S)
        assert not both.take_done()
        assert images.begun == [3], "an image waits for a grammar"
        assert len(both) == 2
        grammars.opened.set()
        for _ in range(2):
            assert woken.acquire(timeout=PATIENCE_S)
        assert not both.take_done()
        assert (grammars.begun, images.begun) == ([1, 2], [3, 2])
        assert not len(both)
    finally:
        grammars.opened.set()
        both.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "preparation"]
