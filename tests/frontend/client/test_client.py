"""EngineClient against a played engine: session, requests, calls, endings; and the ZeroMQ transport's own traps."""

import gc
import os
import signal
import socket as socket_module
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zmq

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import (
    AddressError,
    CallFailedError,
    EngineCoreError,
    EngineDeadError,
    HandshakeError,
    InvalidRequestError,
    RequestFailedError,
)
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    Abort,
    AddRequest,
    CallFailed,
    EngineStopping,
    ErrorCode,
    FinishReason,
    GetStatistics,
    Goodbye,
    Hello,
    Outputs,
    Refused,
    RequestFailed,
    decode_client_message,
    encode,
)
from tests.placed import PREFIX

PARAMS = SamplingParams()


def output(number, position, tokens, finish=FinishReason.NONE, epoch=1):
    """A row of one request."""
    return Outputs(
        epoch=epoch,
        step=0,
        numbers=np.array([number], "<u4").tobytes(),
        positions=np.array([position], "<u4").tobytes(),
        counts=np.array([len(tokens)], "<u2").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
        finish=bytes([finish]) if finish else b"",
    )


@pytest.fixture
def client(played_engine):
    with_engine = EngineClient(played_engine, name="test")
    yield with_engine
    with_engine.close()


def submit(client, *, streaming=False, prompt=(1, 2, 3), **arguments):
    return client.submit(prompt, PARAMS, seed=arguments.pop("seed", 0), streaming=streaming, **arguments)


def in_thread(function, *arguments):
    """Start it; returns a function that waits for its result or raises its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return lambda: future.result(5.0)


def test_a_session_begins_with_hello_and_ends_with_goodbye(played_engine):
    client = EngineClient(played_engine, name="me")
    assert client.welcome.model_name == "played"
    client.close()
    client.close()
    assert [type(message) for message in played_engine.received] == [Hello, Goodbye]
    assert played_engine.received[0].client_name == "me"
    assert played_engine.closed


def test_a_refusal_names_both_versions(played_engine):
    played_engine.answers[Hello] = lambda _: Refused(ErrorCode.VERSION_MISMATCH, "too old", 9, 4)
    with pytest.raises(HandshakeError, match=rf"too old.*9\.4, this client {PROTOCOL_MAJOR}\."):
        EngineClient(played_engine)
    assert played_engine.closed


def test_an_engine_of_another_major_is_refused_here(played_engine):
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, major=PROTOCOL_MAJOR + 1)
    with pytest.raises(HandshakeError, match=rf"protocol {PROTOCOL_MAJOR + 1}\.\d+, this client {PROTOCOL_MAJOR}\."):
        EngineClient(played_engine)


def test_an_engine_that_does_not_answer_hello(played_engine):
    played_engine.answers[Hello] = lambda _: None
    with pytest.raises(EngineDeadError, match=r"no engine answered within 0\.02 s"):
        EngineClient(played_engine, hello_timeout=0.02)
    assert played_engine.closed


def test_an_engine_that_dies_before_welcome(played_engine):
    played_engine.answers[Hello] = lambda _: played_engine.die("killed by signal 9")
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        EngineClient(played_engine)


def test_what_is_submitted_is_what_the_engine_gets(client, played_engine):
    number = submit(client, seed=lambda number: number + 70, priority=-3, cache_salt="s", deadline_ms=9)
    request = played_engine.received[-1]
    assert number == 0
    assert played_engine.prompts() == [[1, 2, 3]]
    assert (request.number, request.seed, request.priority, request.cache_salt) == (0, 70, -3, "s")
    assert (request.deadline_ms, request.delivered, request.params) == (9, [], PARAMS)


def test_waiting_wakes_for_the_end_only_unless_streaming(client, played_engine):
    final, streaming = submit(client), submit(client, streaming=True)
    both = np.array([final, streaming])
    played_engine.give(output(final, 0, [5]), output(streaming, 0, [6]))
    assert client.wait(both).tolist() == [streaming]
    assert client.wait(both, timeout=0.01).tolist() == []
    wait = in_thread(client.wait, both)
    played_engine.feed(final, 1, [7], FinishReason.STOP)
    assert wait().tolist() == [final]
    assert client.read(final).token_ids.tolist() == [5, 7]


def test_a_batch_is_one_wake_up(client, played_engine):
    wakes = []
    client.add_listener(lambda: wakes.append(client.take_ready().tolist()))
    first, second = submit(client, streaming=True), submit(client, streaming=True)
    played_engine.give(output(first, 0, [1]), output(second, 0, [2]), output(first, 1, [3]))
    assert wakes == [[first, second]]


def test_outputs_of_another_epoch_are_stale(client, played_engine):
    number = submit(client, streaming=True)
    played_engine.give(output(number, 0, [1], epoch=0))
    assert client.read(number).token_ids.tolist() == []


def test_discarding_aborts_what_runs(client, played_engine):
    numbers = [submit(client) for _ in range(3)]
    played_engine.feed(1, 0, [1], FinishReason.LENGTH)
    client.discard(numbers)
    (abort,) = played_engine.sent(Abort)
    assert np.frombuffer(abort.numbers, "<u4").tolist() == [0, 2]
    assert client.num_live == 0
    played_engine.feed(0, 0, [1], FinishReason.ABORT)
    client.discard(numbers)
    assert len(played_engine.sent(Abort)) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [(ErrorCode.INVALID_ARGUMENT, InvalidRequestError), (ErrorCode.RESOURCE_EXHAUSTED, RequestFailedError)],
)
def test_a_failed_request_carries_its_error(client, played_engine, code, kind):
    number = submit(client)
    played_engine.give(RequestFailed(number, code, "too many"))
    assert client.wait(np.array([number])).tolist() == [number]
    error = client.read(number).error
    assert type(error) is kind
    assert "too many" in str(error)


def test_a_request_too_long_for_a_message_is_not_submitted(client, played_engine):
    with pytest.raises(InvalidRequestError, match=r"120\d\d\d bytes \(prompt: 120000\).*accepts 100000"):
        submit(client, prompt=range(30_000))
    assert played_engine.sent(AddRequest) == []
    assert client.num_live == 0
    assert submit(client) == 0


def test_a_request_that_cannot_be_queued_leaves_nothing_behind(client, played_engine):
    def full(message):
        raise RequestFailedError("the queue is full")

    played_engine.answers[AddRequest] = full
    with pytest.raises(RequestFailedError):
        submit(client)
    assert client.num_live == 0


def test_calls(client, played_engine):
    assert client.statistics().num_steps == 1
    assert client.tokenizer_files().files == {}
    client.reset_prefix_cache()


def test_calls_that_fail(client, played_engine):
    played_engine.answers[GetStatistics] = lambda message: CallFailed(message.call, ErrorCode.INTERNAL, "broken")
    with pytest.raises(CallFailedError, match=r"GetStatistics: broken \(INTERNAL\)"):
        client.statistics()
    played_engine.answers[GetStatistics] = lambda _: None
    with pytest.raises(CallFailedError, match=r"did not answer GetStatistics within 0\.01 s"):
        client.statistics(timeout=0.01)


def test_a_late_answer_to_a_call_is_nobodys(client, played_engine):
    calls = []
    played_engine.answers[GetStatistics] = lambda message: calls.append(message.call)
    with pytest.raises(CallFailedError):
        client.statistics(timeout=0.01)
    played_engine.give(CallFailed(calls[0], ErrorCode.INTERNAL, "late"))
    played_engine.answers.pop(GetStatistics)
    assert client.error is None


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda engine, client: engine.die("the engine was killed"), "the engine was killed"),
        (lambda engine, client: engine.give(EngineStopping("disk full")), "the engine stopped: disk full"),
        (lambda engine, client: engine.give(EngineStopping()), "^the engine stopped$"),
        (
            lambda engine, client: engine.give(Refused(ErrorCode.INVALID_ARGUMENT, "no session")),
            "ended this.*no session",
        ),
        (lambda engine, client: client.close(), "closed"),
    ],
)
def test_the_end_fails_everyone_who_waits(client, played_engine, end, text):
    played_engine.answers[GetStatistics] = lambda _: None
    number = submit(client)
    wakes = []
    client.add_listener(lambda: wakes.append(1))
    waiting, calling = in_thread(client.wait, np.array([number])), in_thread(client.statistics)
    while not played_engine.sent(GetStatistics):
        time.sleep(0.001)
    end(played_engine, client)
    for result in (waiting, calling, client.statistics, lambda: submit(client)):
        with pytest.raises(EngineDeadError, match=text):
            result()
    assert wakes


def test_what_arrived_before_the_end_can_be_read(client, played_engine):
    number = submit(client)
    played_engine.feed(number, 0, [4], FinishReason.STOP)
    played_engine.die("gone")
    assert client.wait(np.array([number])).tolist() == [number]
    assert client.read(number).token_ids.tolist() == [4]
    client.discard([number])


def test_threads_submit_in_the_order_of_their_numbers(client, played_engine):
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: submit(client), range(200)))
    assert sorted(numbers) == list(range(200))
    assert [request.number for request in played_engine.sent(AddRequest)] == list(range(200))


def test_a_forked_child_is_told_to_make_its_own(client, played_engine, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(EngineCoreError, match=r"belongs to process \d+ and was used in 1; make a new one after a fork"):
        submit(client)
    client.close()
    assert not played_engine.closed


# --- the ZeroMQ transport ---------------------------------------------------------------------------------------


@pytest.fixture
def router(tmp_path):
    """A bound socket and its address; the tests play the engine by hand."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{tmp_path}/engine.sock"
        socket.bind(address)
        socket.rcvtimeo = 5000
        yield socket, address


def welcome_from(socket, welcome):
    identity, _ = socket.recv_multipart()
    socket.send_multipart([identity, encode(welcome)])
    return identity


def connected(router, played_engine, **arguments):
    """(client, identity) over ZeroMQ."""
    socket, address = router
    opened = in_thread(lambda: EngineClient(ZmqTransport(address, **arguments)))
    identity = welcome_from(socket, played_engine.welcome)
    return opened(), identity


def test_frames_travel(router, played_engine):
    socket, _ = router
    client, identity = connected(router, played_engine)
    number = submit(client, prompt=range(5000))
    assert len(socket.recv_multipart()[1]) > 20_000
    for position in range(300):
        socket.send_multipart([identity, encode(output(number, position, [position]))])
    socket.send_multipart([identity, encode(output(number, 300, [300], FinishReason.LENGTH))])
    client.wait(np.array([number]), timeout=5.0)
    assert client.read(number).token_ids.tolist() == list(range(301))
    client.close()
    assert decode_client_message(socket.recv_multipart()[1]) == Goodbye()


def test_nobody_listens(tmp_path):
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"no engine listens at ipc:///.*nobody\.sock"):
        EngineClient(ZmqTransport(f"ipc://{tmp_path}/nobody.sock"), hello_timeout=0.1)
    assert time.monotonic() - begin < 3.0


def test_an_engine_that_is_stopped_is_named_as_such(tmp_path):
    """The kernel takes connections for it; libzmq gives the handshake up after 2 s."""
    with socket_module.socket(socket_module.AF_UNIX) as stopped:
        stopped.bind(f"{tmp_path}/s")
        stopped.listen()
        with pytest.raises(
            EngineDeadError, match=r"closed the connection, on which nothing arrived for \d s: .* stopped"
        ):
            EngineClient(ZmqTransport(f"ipc://{tmp_path}/s"))


def test_an_address_that_is_none():
    with pytest.raises(AddressError):
        EngineClient(ZmqTransport("http://localhost"))


def test_the_connection_closes(router, played_engine):
    client, _ = connected(router, played_engine)
    number = submit(client)
    wait = in_thread(client.wait, np.array([number]))
    router[0].close()
    with pytest.raises(EngineDeadError, match="closed the connection"):
        wait()
    client.close()


def test_the_engine_process_dies_while_its_socket_lives(router, played_engine):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pidfd = os.pidfd_open(child.pid)
    try:
        client, identity = connected(router, played_engine, pidfd=pidfd, describe_exit=lambda: "killed by SIGKILL")
        number = submit(client)
        router[0].send_multipart([identity, encode(output(number, 0, [8], FinishReason.STOP))])
        unfinished = submit(client)
        wait = in_thread(client.wait, np.array([unfinished]))
        begin = time.monotonic()
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            wait()
        assert time.monotonic() - begin < 20.0  # the child would live for 60
        assert client.read(number).token_ids.tolist() == [8]
        client.close()
    finally:
        child.kill()
        child.wait()
        os.close(pidfd)


def test_garbage_from_the_engine_ends_the_session_with_its_reason(router, played_engine, caplog):
    client, identity = connected(router, played_engine)
    wait = in_thread(client.wait, np.array([submit(client)]))
    router[0].send_multipart([identity, b"\xc1garbage"])
    with pytest.raises(EngineDeadError, match="IO thread failed: MalformedMessageError"):
        wait()
    client.close()


def test_the_queue_is_bounded(router, played_engine, monkeypatch):
    monkeypatch.setattr(f"{PREFIX}frontend.client.send_queue.MAX_QUEUED_BYTES", 1000)
    client, _ = connected(router, played_engine)
    with pytest.raises(RequestFailedError, match=r"wait to be sent, the limit is 1000"):
        submit(client, prompt=range(1000))
    client.close()


def test_a_client_that_is_forgotten_leaves_no_thread(router, played_engine):
    others = set(threading.enumerate())
    client, _ = connected(router, played_engine)
    threads = [thread for thread in threading.enumerate() if thread.name == "engine-client-io" and thread not in others]
    assert len(threads) == 1
    client.close()
    assert not threads[0].is_alive()
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
