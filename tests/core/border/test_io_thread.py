"""The IO thread and the engine thread around one socket: who serves it when, and that no message is left lying."""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import zmq

from core.border import inbox, sessions
from core.border.io_thread import IOThread
from core.border.reception import MAX_CALLS, Served
from core.inputs import HoldClient, ReleaseClient
from core.process import loop as process
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    AddRequest,
    CallDone,
    CallFailed,
    EngineStopping,
    ErrorCode,
    GetTokenizer,
    Goodbye,
    Hello,
    Limits,
    ModelInformation,
    Refused,
    RequestFailed,
    ResetPrefixCache,
    ServerMessage,
    TokenizerFiles,
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.sockets import Context, bind_router, connect_dealer, private_ipc_address, remove_private_address
from tests.placed import PREFIX
from tests.raw_client import PATIENCE_S, RawClient, request

VOCAB = 1000
SOON_S = 3.0  # less than what a thread sleeps that nobody wakes: a tick of the lease clock

LIMITS = Limits(1000, 8, 8 << 20, 2**16, 2**26, 2**28, 20_000, 60_000)
WELCOME = Welcome(PROTOCOL_MAJOR, 0, "test", "id", 0, b"", "none", "00", "", "L2", VOCAB, LIMITS)
MODEL = ModelInformation(0, "none", "00", "L2", "fake", "float32", VOCAB, [2], 1000, 8, 512, 100, 16, True)
OWNER_TOKEN = b"o" * 16


class Harness:
    """The IO thread and the loop in this process, around an engine made to order."""

    def __init__(self, lease_ms: int = LIMITS.lease_ms) -> None:
        self.address = private_ipc_address()
        context: Context = zmq.Context()
        limits = msgspec.structs.replace(LIMITS, lease_ms=lease_ms)
        served = Served(msgspec.structs.replace(WELCOME, limits=limits), TokenizerFiles(0, "", {}), MODEL, OWNER_TOKEN)
        self.io = IOThread(context, bind_router(context, self.address), served)
        self.io.start()

    def close(self) -> None:
        self.io.finish(EngineStopping(), PATIENCE_S)
        assert "io" not in {thread.name for thread in threading.enumerate()}
        remove_private_address(self.address)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


class Broken:
    """Fails in its first step."""

    has_work = has_unfinished = False

    def step(self, inbox: Sequence[tuple[int, object]], now_ns: int) -> list[tuple[int, ServerMessage]]:
        raise RuntimeError("matrix is singular\nsecond line")


@pytest.mark.parametrize("has_preparations", [False, True])
def test_exception_in_a_step_ends_the_engine_and_tells_every_client(
    harness: Harness, logged: Callable[[], str], has_preparations: bool
) -> None:
    """An engine without work takes in messages though there is always more to prepare."""
    codes: list[int] = []

    def run() -> None:
        codes.append(process.run(Broken(), harness.io, lambda: has_preparations))  # type: ignore[arg-type]

    engine = threading.Thread(target=run)
    engine.start()
    with RawClient(harness.address) as client, RawClient(harness.address) as other:
        client.add(1, [1])
        for one in (client, other):
            assert one.receive(EngineStopping) == EngineStopping("RuntimeError: matrix is singular")
    engine.join(PATIENCE_S)
    assert codes == [process.EXIT_FAILED]
    error_text = logged()
    assert "Traceback" in error_text
    assert "a step failed and the engine ends: RuntimeError: matrix is singular" in error_text


@pytest.mark.parametrize("stands_still", [False, True])
def test_the_end_is_waited_for_while_the_thread_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stands_still: bool
) -> None:
    """Each turn of the thread takes long, as on a machine that is very busy."""
    border, turns, released = harness.io.border, list[float](), threading.Event()
    turn = border.round

    def slow(now: float) -> float | None:
        turns.append(now)
        released.wait(PATIENCE_S if stands_still else 0.25)
        due_s = turn(now)
        if len(turns) < 6:
            border.outbox.put([])
        return due_s

    with RawClient(harness.address) as client:
        monkeypatch.setattr(border, "round", slow)
        client.send(GetTokenizer(1))
        while not turns:
            time.sleep(0.001)
        begun = time.monotonic()
        harness.io.finish(EngineStopping("soon"), 1.0)
        if stands_still:
            assert time.monotonic() - begun < PATIENCE_S
            assert len(turns) == 1
            released.set()
            harness.io.finish(EngineStopping(), PATIENCE_S)
        assert len(turns) >= 6
        assert "io" not in {thread.name for thread in threading.enumerate()}
        client.receive(TokenizerFiles)
        assert client.receive(EngineStopping) == EngineStopping("soon")


def test_overfull_inbox_is_not_filled_further(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 200)
    with RawClient(harness.address) as client:
        requests = [request(number, [1]) for number in range(500)]
        client.send(*requests)
        client.send(GetTokenizer(1))
        assert not client.socket.poll(100)  # its messages stay where they are ...
        received: list[object] = []
        while len(received) < 500:
            received += [message for _, message in harness.io.take(PATIENCE_S)]
        assert received == requests  # ... and none is lost
        client.receive(TokenizerFiles)


def test_client_that_never_reads_is_dropped_and_others_are_not(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HOLD_BYTES", 50_000)
    monkeypatch.setattr(sessions, "RELEASE_BYTES", 10_000)
    monkeypatch.setattr(sessions, "MAX_BACKLOG_BYTES", 100_000)
    context: Context = zmq.Context()
    stalled = connect_dealer(context, harness.address)
    stalled.rcvtimeo = int(PATIENCE_S * 1000)
    stalled.send(encode(Hello(PROTOCOL_MAJOR, 0, "stalled")))
    assert stalled.poll(int(PATIENCE_S * 1000))  # it has session 1, and reads no more
    with RawClient(harness.address) as witness:
        text = RequestFailed(1, ErrorCode.INTERNAL, "x" * 1000)
        for number in range(5000):
            harness.io.put([(1, text), (2, RequestFailed(number, ErrorCode.INTERNAL, ""))])
            assert witness.receive(RequestFailed).number == number
        assert harness.io.sessions.num_dropped == 1
        *before, last = harness.io.take(0)
        assert last == (1, Goodbye())
        pacing = [(1, HoldClient()), (1, ReleaseClient())]  # more than once where its queues filled up slowly
        assert before == [pacing[index % 2] for index in range(len(before))]
        assert before
        messages = []
        while not isinstance(messages[-1:] and messages[-1], Refused):  # it finds out when it reads again
            messages.append(decode_server_message(stalled.recv()))
        assert messages[-1].code == ErrorCode.RESOURCE_EXHAUSTED
        assert "were waiting for this client, which did not read" in messages[-1].message
    context.destroy(linger=0)


def test_a_slow_client_gets_everything_in_order(harness: Harness) -> None:
    with RawClient(harness.address) as slow:
        for number in range(5000):  # more than the queues of both sockets hold
            harness.io.put([(1, RequestFailed(number, ErrorCode.INTERNAL, "x" * 100))])
        assert [slow.receive(RequestFailed).number for _ in range(5000)] == list(range(5000))


class Counted:
    """Sleeps of the IO thread that ended."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = 0
        serve_once = harness.io.border.round

        def count(now: float) -> float | None:
            self.rounds += 1
            return serve_once(now)

        monkeypatch.setattr(harness.io.border, "round", count)


def answers(messages: Sequence[tuple[int, object]]) -> list[tuple[int, ServerMessage]]:
    return [
        (client, RequestFailed(message.number, ErrorCode.INTERNAL, ""))
        for client, message in messages
        if isinstance(message, AddRequest)
    ]


def test_a_request_to_an_idle_engine_wakes_the_engine_thread_only(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(harness, monkeypatch)
    with RawClient(harness.address) as client:
        threading.Thread(target=lambda: [time.sleep(0.05), client.add(1, [1])]).start()
        first = counted.rounds
        harness.io.put(answers(harness.io.take(PATIENCE_S)))
        assert client.receive(RequestFailed).number == 1
        time.sleep(0.05)  # the other thread would come late
        assert counted.rounds == first


def test_while_the_engine_thread_computes_the_other_serves(harness: Harness) -> None:
    assert harness.io.take(0.01) == []
    with RawClient(harness.address) as client:
        client.send(GetTokenizer(1))
        client.receive(TokenizerFiles, SOON_S)
    assert harness.io.take(PATIENCE_S) == [(1, Goodbye())]


def test_a_client_that_leaves_wakes_an_idle_engine(harness: Harness) -> None:
    client = RawClient(harness.address)
    threading.Timer(0.05, client.context.destroy, kwargs={"linger": 0}).start()
    before = time.monotonic()
    assert harness.io.take(PATIENCE_S) == [(1, Goodbye())]
    assert time.monotonic() - before < SOON_S


def test_a_session_that_the_engine_thread_opened_has_a_lease_too() -> None:
    harness = Harness(lease_ms=200)
    opened: list[RawClient] = []
    connect = threading.Thread(target=lambda: opened.append(RawClient(harness.address)))
    connect.start()
    before = time.monotonic()
    assert harness.io.take(PATIENCE_S) == [(1, Goodbye())]
    assert time.monotonic() - before < SOON_S
    connect.join()
    assert opened[0].receive(Refused).code == ErrorCode.DEADLINE_EXCEEDED
    opened[0].close()
    harness.close()


def test_a_message_whose_signal_was_taken_by_sending_is_read(harness: Harness) -> None:
    with RawClient(harness.address) as client:
        with harness.io._using:
            harness.io._sources.modify(harness.io._socket_fd, 0)  # the IO thread comes too late to see the signal
            client.send(GetTokenizer(1))
            came = select.poll()
            came.register(harness.io._socket_fd, select.POLLIN)
            assert came.poll(PATIENCE_S * 1000)
        harness.io.put([(1, CallDone(7))])
        assert client.receive(CallDone).call == 7
        client.receive(TokenizerFiles, SOON_S)


def test_a_drain_wakes_an_idle_engine(harness: Harness) -> None:
    threading.Timer(0.05, harness.io.drain).start()
    harness.io.take(PATIENCE_S)
    assert harness.io.inbox.has_ended


def test_waiting_in_vain_ends_in_time(harness: Harness) -> None:
    before = time.monotonic()
    assert harness.io.take(0.05) == []
    assert 0.05 <= time.monotonic() - before < PATIENCE_S


def test_no_message_is_left_lying(harness: Harness) -> None:
    """Clients that wait for each answer, beside an engine thread that waits for them, looks in passing, or does not
    look at all for a while: whichever thread reads, a signal that got lost would stop a client for ever."""
    num_clients, num_each = 3, 400
    numbers: list[list[int]] = [[] for _ in range(num_clients)]

    def ask(index: int) -> None:
        with RawClient(harness.address) as client:
            for number in range(num_each):
                client.add(number, [1])
                numbers[index].append(client.receive(RequestFailed).number)

    clients = [threading.Thread(target=ask, args=(index,)) for index in range(num_clients)]
    for thread in clients:
        thread.start()
    num_left, turn = num_clients, 0
    while num_left:
        turn += 1
        if turn % 7 == 0:
            time.sleep(0.0005)
        messages = harness.io.take((None, 0, 0.001)[turn % 3] if turn % 5 else 0)
        num_left -= sum(isinstance(message, Goodbye) for _, message in messages)
        harness.io.put(answers(messages))
    for thread in clients:
        thread.join(PATIENCE_S)
    assert numbers == [list(range(num_each))] * num_clients


@pytest.mark.parametrize("num_clients", [1, 5])
def test_answers_keep_their_order_whoever_sends_them(harness: Harness, num_clients: int) -> None:
    """The engine thread itself sends to few clients, unless its earlier messages are still in the outbox."""
    clients = [RawClient(harness.address) for _ in range(num_clients)]
    everybody = range(1, num_clients + 1)
    for number in range(200):
        to = everybody if number % 3 else everybody[:1]
        harness.io.put([(client, RequestFailed(number, ErrorCode.INTERNAL, "")) for client in to])
    for client, raw in zip(everybody, clients, strict=True):
        due = [number for number in range(200) if number % 3 or client == 1]
        assert [raw.receive(RequestFailed).number for _ in due] == due
        raw.close()


def test_calls_that_the_engine_has_not_answered_are_bounded(harness: Harness) -> None:
    with RawClient(harness.address) as client:
        for _ in range(2):  # they count until they are answered
            client.send(*[ResetPrefixCache(call) for call in range(MAX_CALLS + 3)])
            failed = [client.receive(CallFailed) for _ in range(3)]
            assert {one.code for one in failed} == {ErrorCode.RESOURCE_EXHAUSTED}
            waiting = harness.io.take(0)
            assert [message for _, message in waiting] == [ResetPrefixCache(call) for call in range(MAX_CALLS)]
            harness.io.put([(1, CallDone(call)) for call in range(MAX_CALLS)])
            assert [client.receive(CallDone).call for _ in range(MAX_CALLS)] == list(range(MAX_CALLS))


class _EndOfProcess(BaseException):
    pass


def test_an_engine_thread_that_fails_at_the_socket_ends_the_process(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    def leave(code: int) -> None:
        raise _EndOfProcess(code)

    monkeypatch.setattr(f"{PREFIX}core.border.io_thread.os._exit", leave)
    engine_thread, receive = threading.current_thread(), harness.io.border.receive

    def fail_here(now: float) -> bool:
        return 1 // 0 > 0 if threading.current_thread() is engine_thread else receive(now)

    monkeypatch.setattr(harness.io.border, "receive", fail_here)
    with pytest.raises(_EndOfProcess, match="1"):
        harness.io.take(PATIENCE_S)
    monkeypatch.undo()
    assert "ZeroDivisionError" in logged()


def test_an_overfull_inbox_lets_the_io_thread_sleep(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 1)
    counted = Counted(harness, monkeypatch)
    with RawClient(harness.address) as client, RawClient(harness.address) as other:
        client.add(1, [1])
        wait = time.monotonic() + PATIENCE_S
        while harness.io.inbox.is_empty and time.monotonic() < wait:
            time.sleep(0.01)
        other.add(1, [1])
        before = counted.rounds
        time.sleep(0.3)
        assert counted.rounds - before < 100  # it looks again a hundred times a second, not always
        while len(harness.io.take(PATIENCE_S)) < 1:
            pass


def test_an_engine_thread_that_comes_back_to_a_closed_socket_waits_for_the_end(harness: Harness) -> None:
    """The process ends with the code of who ends it, not with the engine thread's error."""
    harness.io.finish(EngineStopping(), PATIENCE_S)

    def wait() -> None:
        with contextlib.suppress(OSError):  # once the lock is released, which no product does
            harness.io._receive_for_engine(None)

    engine = threading.Thread(target=wait)
    engine.start()
    engine.join(0.2)
    assert engine.is_alive()
    harness.io._using.release()
    engine.join(PATIENCE_S)
    assert not engine.is_alive()
