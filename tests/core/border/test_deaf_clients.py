"""Clients that do not read what is large: what the socket holds for them, and how long an engine waits to end."""

import socket as sockets
from collections.abc import Callable

import pytest
import zmq

from core.border import sessions as border_sessions
from core.border.inbox import Inbox
from core.border.sessions import MAX_UNREAD_BYTES, Session, Sessions, has_read_all
from core.inputs import HoldClient
from ipc.wire.messages import CallDone, Refused, TokenizerFiles, decode_server_message
from tests.core.running_engine import LONG, NUM_ROWS, Running, start_engine, wait_for
from tests.raw_client import RawClient

__all__ = ["start_engine"]  # a fixture
FILES = {"tokenizer.json": b"x" * (3 * MAX_UNREAD_BYTES)}


class PlayedSocket:
    """A socket that takes everything; what it was given is kept."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int) -> None:
        if not flags & zmq.SNDMORE:
            self.sent.append(data)


def deaf() -> tuple[PlayedSocket, Inbox, Sessions, Session]:
    """Return sessions with one that reads nothing."""
    socket, inbox = PlayedSocket(), Inbox()
    sessions = Sessions(socket, inbox, {})  # type: ignore[arg-type]
    sessions.has_read_all = lambda fd: False
    return socket, inbox, sessions, sessions.open(b"1", 5, "", is_owner=False, has_lease=True, lease_time=0.0)


def test_the_socket_holds_one_tokenizer_for_a_client_that_does_not_read() -> None:
    socket, inbox, sessions, session = deaf()
    for call in range(3):
        sessions.send(session, TokenizerFiles(call, "", FILES), 0.0)
    sessions.send(session, CallDone(3), 0.0)
    assert len(socket.sent) == 1
    assert all(not isinstance(frame, bytes) or len(frame) < 100 for frame in session.backlog._frames), (
        "files are shared"
    )
    assert inbox.drain() == [(session.client, HoldClient())]  # they count, though they take nothing
    assert not sessions.flush(1.0)
    sessions.has_read_all = lambda fd: True
    assert sessions.flush(2.0)
    calls = [decode_server_message(frame) for frame in socket.sent]
    assert [one.call for one in calls if isinstance(one, (TokenizerFiles, CallDone))] == [0, 1, 2, 3]
    assert session.backlog.num_bytes == 0
    assert session.held_since is None


def test_a_client_that_asks_for_too_much_and_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    socket, _, sessions, session = deaf()
    for call in range(5):
        sessions.send(session, TokenizerFiles(call, "", FILES), 0.0)
    assert sessions.num_dropped == 1
    assert [type(decode_server_message(frame)) for frame in socket.sent] == [TokenizerFiles, Refused]


def test_small_messages_are_never_asked_about() -> None:
    socket, _, sessions, session = deaf()
    sessions.has_read_all = lambda fd: pytest.fail("a system call for each message")
    for call in range(1000):
        sessions.send(session, CallDone(call), 0.0)
    assert len(socket.sent) == 1000


def test_what_is_unread_is_known_of_the_system() -> None:
    ours, theirs = sockets.socketpair()
    with ours, theirs:
        assert has_read_all(ours.fileno())
        ours.send(b"four")
        assert not has_read_all(ours.fileno())
        theirs.recv(2)
        assert not has_read_all(ours.fileno())
        theirs.recv(2)
        assert has_read_all(ours.fileno())
        fd = ours.fileno()
    assert has_read_all(fd)  # it is closed


def test_a_drain_does_not_wait_for_a_client_that_does_not_read(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager kills what has not ended after half a minute, which is what a hold may last."""
    monkeypatch.setattr(border_sessions, "HOLD_BYTES", 20_000)
    monkeypatch.setattr(border_sessions, "RELEASE_BYTES", 5_000)
    monkeypatch.setattr(border_sessions, "DRAIN_HOLD_S", 0.2)
    running = start(lease_ms=60_000)
    with RawClient(running.address) as witness, RawClient(running.address) as stalled:
        for number in range(NUM_ROWS):
            stalled.add(number, [number], max_tokens=LONG)
        wait_for(witness, lambda statistics: statistics.num_on_hold == NUM_ROWS)
        running.io.drain()
        running.wait_end(5)
        assert running.io.sessions.num_dropped == 1
