"""Frames that wait to be sent: their order, their bound, and a new connection."""

from typing import Any

import pytest
import zmq

from frontend.client import send_queue
from frontend.client.send_queue import SendQueue
from ipc.errors import RequestFailedError


class Socket:
    """A socket that takes so many frames."""

    def __init__(self, room: int) -> None:
        self.room, self.sent = room, list[bytes]()

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if len(self.sent) == self.room:
            raise zmq.Again
        self.sent.append(frame)


def test_what_the_socket_does_not_take_waits_in_order() -> None:
    queue = SendQueue()
    for number in range(5):
        queue.put(b"%d" % number)
    full: Any = Socket(3)
    assert not queue.flush(full)
    assert (full.sent, len(queue)) == ([b"0", b"1", b"2"], 2)
    other: Any = Socket(9)
    assert queue.flush(other)
    assert (other.sent, len(queue)) == ([b"3", b"4"], 0)


def test_the_bound_counts_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MAX_QUEUED_BYTES", 10)
    queue, socket = SendQueue(), Socket(99)
    queue.check(bytes(10), "ipc://x")
    queue.put(bytes(8))
    with pytest.raises(RequestFailedError, match=r"ipc://x does not read: 8 bytes wait to be sent, the limit is 10"):
        queue.check(bytes(3), "ipc://x")
    assert queue.flush(socket)  # type: ignore[arg-type]
    queue.check(bytes(10), "ipc://x")


def test_a_new_connection_begins_with_its_hello_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MAX_QUEUED_BYTES", 10)
    queue, socket = SendQueue(), Socket(99)
    queue.put(bytes(8))
    queue.restart(b"hello")
    assert queue.flush(socket)  # type: ignore[arg-type]
    assert socket.sent == [b"hello"]
    queue.check(bytes(10), "ipc://x")  # all of it is counted as gone
    with pytest.raises(RequestFailedError):
        queue.check(bytes(11), "ipc://x")
