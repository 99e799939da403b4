"""The ZeroMQ transport by itself: who sends, in what order, and that nothing waits for a thread that sleeps."""

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from frontend.client import transport as transports
from frontend.client.transport import ZmqTransport

PATIENCE_S = 60.0


class Peer:
    """A ROUTER, and a transport that is connected to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.set_hwm(0)  # else a ROUTER drops what a slow machine has not read yet
        self.socket.bind(address)
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        self.received: SimpleQueue[bytes] = SimpleQueue()
        self.transport = ZmqTransport(address)
        self.transport.start(self._take, lambda reason: None, lambda: b"")
        self.transport.send(b"hello")
        self.identity, _ = self.socket.recv_multipart()

    def _take(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.received.put(frame)

    def answer(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with zmq.Context() as context:
        peer = Peer(context, f"ipc://{tmp_path}/engine.sock")
        peer.answer(b"welcome")
        assert peer.received.get(timeout=PATIENCE_S) == b"welcome"  # the IO thread serves
        yield peer
        peer.transport.close()
        peer.socket.close()


class Frames:
    """A socket with frames to receive, in the place of one of ZeroMQ's."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = list(frames)

    def recv(self, flags: int) -> bytes:
        return self.frames.pop(0)


def test_a_batch_is_bounded_by_its_frames_and_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "pending_events", lambda socket: transports.READABLE if socket.frames else 0)
    many: Any = Frames(*[b""] * 70)
    assert [(len(frames), more) for frames, more in (transports.receive_batch(many) for _ in range(3))] == [
        (64, True), (6, False), (0, False),
    ]  # fmt: skip
    large: Any = Frames(b"x" * 60_000, b"x" * 500_000, b"x" * 70_000, b"", b"")
    assert [len(transports.receive_batch(large)[0]) for _ in range(3)] == [2, 1, 2]


def test_a_frame_is_sent_without_waking_the_io_thread(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(transports.os, "eventfd_write", lambda fd, count: woken.append(fd))
    for number in range(100):
        peer.transport.send(b"%d" % number)
    assert [int(peer.socket.recv_multipart()[1]) for _ in range(100)] == list(range(100))
    assert not woken
    monkeypatch.undo()


def test_frames_keep_their_order_when_the_socket_is_full(peer: Peer) -> None:
    """More than both queues hold: then some are queued here, and others come while these are sent."""
    count = 6000
    for number in range(count):
        peer.transport.send(b"%d" % number)
    got = [int(peer.socket.recv_multipart()[1]) for _ in range(count // 2)]
    for number in range(count, count + 500):
        peer.transport.send(b"%d" % number)
    got += [int(peer.socket.recv_multipart()[1]) for _ in range(count + 500 - count // 2)]
    assert got == list(range(count + 500))


def test_no_frame_is_left_lying(peer: Peer) -> None:
    """Frames come while others are sent: sending may take the signal of what came, and must pass it on."""
    echo = threading.Thread(target=lambda: [peer.answer(peer.socket.recv_multipart()[1]) for _ in range(3000)])
    echo.start()
    got = []
    for number in range(3000):
        peer.transport.send(b"%d" % number)
        if number % 3 == 0:
            got.append(int(peer.received.get(timeout=PATIENCE_S)))
    got += [int(peer.received.get(timeout=PATIENCE_S)) for _ in range(3000 - len(got))]
    echo.join()
    assert got == list(range(3000))


class _Interrupted:
    """A socket in the middle of whose use the garbage collector finds who owned the transport, or a signal comes."""

    def __init__(self, socket: zmq.Socket[bytes], name: str, finalize: Callable[[], None]) -> None:
        self._socket = socket
        self._name = name
        self._finalize = finalize

    def send(self, frame: bytes, flags: int) -> None:
        self._meet("send")
        self._socket.send(frame, flags)

    def get(self, option: int) -> object:
        self._meet("get")
        return self._socket.get(option)

    def _meet(self, name: str) -> None:
        if name == self._name:
            self._finalize()


@pytest.mark.parametrize("moment", ["send", "get"])
def test_a_finalizer_may_close_it_in_the_middle_of_send(peer: Peer, moment: str) -> None:
    def finalize() -> None:
        peer.transport.send(b"goodbye")
        peer.transport.close()

    socket = peer.transport._open_socket
    assert socket is not None
    peer.transport._open_socket = _Interrupted(socket, moment, finalize)  # type: ignore[assignment]
    peer.transport.send(b"last")
    assert [peer.socket.recv_multipart()[1] for _ in range(2)] == [b"last", b"goodbye"]
    threads = [thread for thread in threading.enumerate() if thread.name == "engine-client-io"]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_an_interrupt_after_sending_leaves_no_frame_lying(peer: Peer) -> None:
    def interrupt() -> None:
        peer.answer(b"answer")
        came = select.poll()
        came.register(int(socket.get(zmq.FD)), select.POLLIN)
        assert came.poll(PATIENCE_S * 1000)
        socket.get(zmq.EVENTS)  # takes the signal
        raise KeyboardInterrupt

    socket = peer.transport._open_socket
    assert socket is not None
    peer.transport._open_socket = _Interrupted(socket, "get", interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        peer.transport.send(b"frame")
    peer.transport._open_socket = socket
    assert peer.received.get(timeout=PATIENCE_S) == b"answer"
