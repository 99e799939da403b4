"""What the engine owes its sessions: slow, silent, lost and rude clients, and the others beside them."""

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from core.border import sessions
from core.border.reception import MAX_MALFORMED
from core.border.zap import is_allowed
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CallDone,
    ErrorCode,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    encode,
)
from tests.core.running_engine import (
    LEASE_MS,
    LONG,
    NUM_ROWS,
    Running,
    expected,
    is_free,
    owner,
    start_engine,
    wait_for,
)
from tests.placed import placed
from tests.raw_client import PATIENCE_S, RawClient

ROOT = Path(__file__).resolve().parents[3]
__all__ = ["start_engine"]  # a fixture


# --- clients that do not read ------------------------------------------------------------------------------------

#: A client of its own process; prints "started", and when it has everything, a checksum of its tokens.
STALLED = """
import sys, zlib, threading, time
from ipc.wire.messages import Heartbeat
from tests.raw_client import RawClient
client = RawClient(sys.argv[1])
for number in range(int(sys.argv[2])):
    client.add(number, [number, 5], max_tokens=int(sys.argv[3]))
client.receive_any()
print("started", flush=True)
tokens = client.finish(*range(int(sys.argv[2])))
print([zlib.crc32(repr(one).encode()) for one in tokens], flush=True)
client.close()
"""


def run_stalled(address: str, num_requests: int, num_tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", placed(STALLED), address, str(num_requests), str(num_tokens)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    os.kill(child.pid, signal.SIGSTOP)
    return child


def read_end(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    text = child.stdout.read()
    child.stdout.close()
    child.wait(PATIENCE_S)
    return text


def test_a_stopped_client_is_held_then_gets_everything(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HOLD_BYTES", 20_000)
    monkeypatch.setattr(sessions, "RELEASE_BYTES", 5_000)
    running = start(lease_ms=60_000)
    with RawClient(running.address) as witness:
        child = run_stalled(running.address, NUM_ROWS, 6000)
        held = wait_for(witness, lambda statistics: statistics.num_waiting == NUM_ROWS)
        assert (held.num_running, held.num_free_blocks) == (0, held.num_blocks - 1)  # it takes nothing from anybody
        (session,) = [one for one in running.io.sessions.all if one.held_since is not None]
        witness.add(20, [20, 6], max_tokens=1)
        witness.finish(20)  # in a later step than the last of the held requests, whose outputs are in the backlog
        before = session.backlog.num_bytes
        for number in range(20):  # every row is theirs
            witness.add(number, [number, 6], max_tokens=300)
        assert witness.finish(*range(20)) == [expected([number, 6], 300) for number in range(20)]
        assert session.backlog.num_bytes == before < 100_000
        assert witness.statistics().num_waiting == NUM_ROWS
        os.kill(child.pid, signal.SIGCONT)
        tokens = [expected([number, 5], 6000) for number in range(NUM_ROWS)]
        assert read_end(child) == f"{[zlib.crc32(repr(one).encode()) for one in tokens]}\n"
        wait_for(witness, is_free)
        assert running.io.sessions.num_dropped == 0


def test_a_client_on_hold_for_too_long_is_ended(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HOLD_BYTES", 20_000)
    monkeypatch.setattr(sessions, "RELEASE_BYTES", 5_000)
    monkeypatch.setattr(sessions, "HOLD_S", 0.1)
    running = start(lease_ms=60_000)
    with RawClient(running.address) as witness, RawClient(running.address) as stalled:
        for number in range(NUM_ROWS):
            stalled.add(number, [number], max_tokens=LONG)
        wait_for(witness, lambda statistics: statistics.num_running == NUM_ROWS)
        wait_for(witness, is_free)
        refused = stalled.receive(Refused)
        assert refused.code == ErrorCode.RESOURCE_EXHAUSTED
        assert (
            refused.message == "this client did not read for 0.1 s while output was waiting; its requests were aborted"
        )
        assert all(
            stalled.tokens[number] == expected([number], LONG)[: len(stalled.tokens[number])] for number in (0, 7)
        )


def test_an_engine_faster_than_its_socket_keeps_nobody_out(start: Callable[..., Running]) -> None:
    """Results that never run out kept the IO thread from reading what clients send."""
    running = start(lease_ms=60_000)
    ended = threading.Event()

    def produce() -> None:
        while not ended.is_set():
            running.io.put([(0, CallDone(0))] * 2000)

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        with RawClient(running.address) as witness:
            witness.add(1, [7])
            assert witness.finish(1) == [expected([7], 8)]
    finally:
        ended.set()
        producer.join()


# --- leases ------------------------------------------------------------------------------------------------------


def test_a_silent_client_is_ended_and_told_and_a_beating_one_lives_for_ever(start: Callable[..., Running]) -> None:
    running = start()
    with RawClient(running.address) as silent, RawClient(running.address) as beating:
        assert (beating.welcome.limits.heartbeat_ms, beating.welcome.limits.lease_ms) == (LEASE_MS // 3, LEASE_MS)
        silent.add(1, [1], max_tokens=LONG)
        deadline = time.monotonic() + 2.5 * LEASE_MS / 1000
        while time.monotonic() < deadline:
            beating.send(Heartbeat())
            time.sleep(LEASE_MS / 3000)
        wait_for(beating, is_free)
        refused = silent.receive(Refused)
        assert refused.code == ErrorCode.DEADLINE_EXCEEDED
        seconds = LEASE_MS / 1000
        assert (
            refused.message
            == f"nothing arrived from this client for {seconds} s (its lease); its requests were aborted"
        )
        silent.add(2, [1])
        assert "send Hello first" in silent.receive(Refused).message
        beating.add(1, [7])
        assert beating.finish(1) == [expected([7], 8)]


def test_owners_need_no_heartbeats(start: Callable[..., Running]) -> None:
    with owner(start()) as one:
        assert (one.welcome.limits.heartbeat_ms, one.welcome.limits.lease_ms) == (0, 0)
        time.sleep(1.5 * LEASE_MS / 1000)
        one.add(1, [7])
        assert one.finish(1) == [expected([7], 8)]


def test_the_lower_minor_is_spoken(start: Callable[..., Running]) -> None:
    running = start()
    for theirs in (-1, 0, PROTOCOL_MINOR, PROTOCOL_MINOR + 3):
        with RawClient(running.address, hello=False) as client:
            client.send(Hello(PROTOCOL_MAJOR, theirs, "other"))
            assert client.receive(Welcome).minor == max(0, min(theirs, PROTOCOL_MINOR))


def test_a_lost_session_ends_when_its_client_is_back(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as lost, RawClient(running.address, hello=False) as back:
        lost.add(1, [1], max_tokens=LONG)
        lost.receive_any()
        back.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "back", lost.welcome.session_token))
        assert back.receive(Welcome).session_token != lost.welcome.session_token
        wait_for(back, is_free)
        back.add(1, [1])  # the number is free: it is another session
        assert back.finish(1) == [expected([1], 8)]


# --- rude clients ------------------------------------------------------------------------------------------------


def test_ten_malformed_messages_end_the_session(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as rude, RawClient(running.address) as witness:
        witness.add(1, [1], max_tokens=500)
        rude.add(1, [1], max_tokens=LONG)
        for _ in range(MAX_MALFORMED):
            rude.send(b"\xc1 no message")
        texts = [rude.receive(Refused).message for _ in range(MAX_MALFORMED)]
        assert texts[-1].startswith("10 malformed messages within 10 s; the last: not a client message")
        assert witness.finish(1) == [expected([1], 500)]
        wait_for(witness, is_free)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("localhost:1000:50:77", True),
        ("localhost:0:0:77", True),
        ("localhost:1001:50:77", False),
        ("localhost:1001:1000:1000", False),
        ("localhost:", False),
        ("127.0.0.1", True),
        ("::1", True),
        ("192.168.0.1", False),
        ("", False),
    ],
)
def test_who_may_connect(address: str, allowed: bool) -> None:
    assert is_allowed(address, 1000) is allowed


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_cannot_connect(start: Callable[..., Running]) -> None:
    running = start()
    path = running.address.removeprefix("ipc://")
    os.chmod(path, 0o777)  # the file's mode is the first lock; this is about the second
    os.chmod(os.path.dirname(path), 0o755)
    os.chmod(os.environ["TMPDIR"], 0o755)
    code = """
import os, sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
os.setuid(int(sys.argv[2]))
socket.connect(sys.argv[1])
socket.send(bytes.fromhex(sys.argv[3]))
print(bool(socket.poll(int(sys.argv[4]))))
socket.close(0)
"""
    hello = encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "other")).hex()

    def answered(uid: int, wait_ms: int) -> str:
        command = [sys.executable, "-c", code, running.address, str(uid), hello, str(wait_ms)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert answered(0, 5000) == "True\n"
    assert answered(65534, 300) == "False\n"
