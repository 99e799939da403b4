"""Sessions whose connection is cut: what their clients may send again, however the engine learns of it."""

import pytest
import zmq

from core.border.accounts import Load
from core.border.inbox import Inbox
from core.border.sessions import Session, Sessions
from ipc.wire.messages import Outputs
from tests.placed import PREFIX


class PlayedSocket:
    """error: raised by every send."""

    def __init__(self) -> None:
        self.error: zmq.ZMQError | None = None

    def send(self, data: bytes, flags: int) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def socket() -> PlayedSocket:
    return PlayedSocket()


@pytest.fixture
def sessions(socket: PlayedSocket) -> Sessions:
    return Sessions(socket, Inbox(), {})  # type: ignore[arg-type]


def open_session(sessions: Sessions) -> Session:
    session = sessions.open(b"1", 5, "", is_owner=False, has_lease=True, lease_time=0.0)
    for number in (7, 9):
        session.requests.add(number, b"x", Load(1, 1, 1))
    return session


def outputs(finished: int) -> Outputs:
    return Outputs(0, 0, finished.to_bytes(4, "little"), bytes(4), bytes(2), b"", finish=b"\2")


@pytest.mark.parametrize("has_backlog", [False, True])
def test_a_loss_that_is_noticed_by_sending(socket: PlayedSocket, sessions: Sessions, has_backlog: bool) -> None:
    """Found by tests/simulation: the session was closed for good, and a full queue refused its requests
    when they were sent again."""
    session = open_session(sessions)
    if has_backlog:
        socket.error = zmq.Again()
        sessions.send(session, outputs(7), 0.0)
    socket.error = zmq.ZMQError(zmq.EHOSTUNREACH)
    sessions.flush(0.0) if has_backlog else sessions.send(session, outputs(7), 0.0)
    assert len(sessions) == 0
    assert sessions.resumable_after(session.token) == {7, 9}


def test_losses_in_a_row_keep_what_was_not_sent_again(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_session(sessions)
    first.requests.note(outputs(7))
    sessions.lose(first)
    second = open_session(sessions)
    second.resumable = {*sessions.resumable_after(first.token), 11}
    sessions.lose(second)
    assert sessions.resumable_after(second.token) == {7, 9, 11}
    monkeypatch.setattr(f"{PREFIX}core.border.sessions.MAX_FINISHED", 1)
    third = open_session(sessions)
    third.resumable = {1, 2}
    sessions.lose(third)
    assert sessions.resumable_after(third.token) == {7, 9}


def test_a_hello_whose_answer_is_lost_uses_nothing_up(sessions: Sessions) -> None:
    """Found by tests/simulation: a second loss before the Welcome arrived, and a full queue refused the requests of the
    client, which came with the token of its first session again."""
    first = open_session(sessions)
    sessions.lose(first)
    unheard, heard = open_session(sessions), open_session(sessions)
    for session in (unheard, heard):
        session.resumable = sessions.resumable_after(first.token)
    assert heard.resumable == {7, 9}
    heard.resumable.discard(7)
    assert unheard.resumable == {9}  # each is sent again once


def test_a_goodbye_is_for_good(sessions: Sessions) -> None:
    session = open_session(sessions)
    sessions.close(session)
    sessions.lose(session)
    assert sessions.resumable_after(session.token) == set()
