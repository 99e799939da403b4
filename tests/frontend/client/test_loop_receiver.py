"""An event loop that receives in the place of the transport's thread: in its own thread, in order, without a loss."""

import asyncio
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from frontend.client.loop_receiver import LoopReceiver
from frontend.client.transport import ZmqTransport

PATIENCE_S = 60.0
REAL_POLL = select.poll


class Poll:
    """select.poll() of the transport's thread, which says whether the thread sleeps in it."""

    def __init__(self) -> None:
        self._poll, self._others = REAL_POLL(), REAL_POLL()
        self._is_inside = False

    def register(self, fd: int, events: int) -> None:
        self._poll.register(fd, events)
        self._others.register(fd, events)

    def unregister(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._others.unregister(fd)

    def poll(self, timeout: int | None) -> list[tuple[int, int]]:
        self._is_inside = timeout != 0
        try:
            return self._poll.poll(timeout)
        finally:
            self._is_inside = False

    def sleeps(self) -> bool:
        """Whether the thread sleeps, and nothing that it waits for has happened: until then it takes no lock."""
        return self._is_inside and not self._others.poll(0)


class Peer:
    """A ROUTER, and a transport that is connected to it, which notes what it receives and in which thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, polls: list[Poll]) -> None:
        self.polls = polls
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        self.received: list[tuple[bytes, bool]] = []  # the frame, and whether the loop's thread received it
        self.arrived = threading.Condition()
        self.reasons: list[str] = []
        self.transport = ZmqTransport(address)
        self.transport.start(self._take, self._end, lambda: b"")
        self.transport.send(b"hello")
        self.identity, _ = self.socket.recv_multipart()

    def _take(self, frames: list[bytes]) -> None:
        if b"broken" in frames:
            raise ValueError("a broken frame")
        with self.arrived:
            is_loop = threading.current_thread() is threading.main_thread()
            self.received += [(frame, is_loop) for frame in frames]
            self.arrived.notify_all()

    def _end(self, reason: str) -> None:
        with self.arrived:
            self.reasons.append(reason)
            self.arrived.notify_all()

    def answer(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    async def until(self, count: int) -> None:
        """Wait until so many frames were received."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.received) < count:
                await asyncio.sleep(0.001)

    async def until_its_thread_sleeps(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.polls[-1].sleeps():
                await asyncio.sleep(0.001)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    polls = list[Poll]()

    def new_poll() -> Poll:
        polls.append(Poll())
        return polls[-1]

    monkeypatch.setattr(select, "poll", new_poll)
    with zmq.Context() as context:
        peer = Peer(context, f"ipc://{tmp_path}/engine.sock", polls)
        yield peer
        peer.transport.close()
        peer.socket.close()


class Rest:
    """A timer that ends when a test says so."""

    def __init__(self, seconds: float, run: Callable[[], None]) -> None:
        self.seconds, self.run, self.is_cancelled = seconds, run, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """The running loop, except for its timers, which end when a test says so. watched: the descriptors it waits on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.watched = set[int]()
        self.due = list[Rest]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Rest:
        self.due.append(Rest(seconds, call))
        return self.due[-1]

    def add_reader(self, fd: int, call: Callable[[], None]) -> None:
        self.watched.add(fd)
        self.loop.add_reader(fd, call)

    def remove_reader(self, fd: int) -> bool:
        self.watched.discard(fd)
        return self.loop.remove_reader(fd)


async def lent(peer: Peer, timers: Timers | None = None) -> LoopReceiver:
    """A receiver whose loop has the socket: frames that the transport's thread still receives are taken out.

    That thread sleeps then. Otherwise it could send frames that are collected for the end of the loop's turn, or hold
    the socket while there are many of them, so that they stay queued.
    """
    loop: Any = timers or asyncio.get_running_loop()
    receiver = LoopReceiver(peer.transport, loop)
    while True:
        before = len(peer.received)
        peer.answer(b"begin")
        await peer.until(before + 1)
        if peer.received[-1][1]:
            peer.received.clear()
            await peer.until_its_thread_sleeps()
            return receiver


def test_the_loop_receives_all_in_order(peer: Peer) -> None:
    async def run() -> None:
        receiver = await lent(peer)
        for number in range(1000):  # more than a batch, and answers to frames that the loop's thread sends
            if number % 100 == 0:
                peer.transport.send(b"from the loop")
            peer.answer(b"%d" % number)
        await peer.until(1000)
        receiver.close()

    asyncio.run(run())
    assert peer.received == [(b"%d" % number, True) for number in range(1000)]
    assert [peer.socket.recv_multipart()[1] for _ in range(10)] == [b"from the loop"] * 10


def test_nothing_is_received_while_it_is_paused(peer: Peer) -> None:
    async def run() -> None:
        receiver = await lent(peer)
        receiver.resume()  # it was not paused
        receiver.pause()
        for number in range(100):
            peer.answer(b"%d" % number)
        await asyncio.sleep(0.05)
        assert peer.received == []
        receiver.resume()
        await peer.until(100)
        receiver.close()

    asyncio.run(run())
    assert peer.received == [(b"%d" % number, True) for number in range(100)]


def test_nothing_is_received_in_a_rest(peer: Peer) -> None:
    """And a frame that waits does not keep the loop busy."""

    async def run() -> None:
        timers = Timers()
        receiver = await lent(peer, timers)
        for number in range(2):
            receiver.rest(3600.0)
            receiver.rest(0.0)  # it rests already
            peer.answer(b"%d" % number)
            receiver.pause()
            receiver.resume()
            assert not timers.watched, "a frame that waits would wake the loop again and again"
            await asyncio.sleep(0.05)
            assert len(peer.received) == number
            (rest,) = timers.due
            assert (rest.seconds, rest.is_cancelled) == (3600.0, False)
            timers.due.clear()
            rest.run()
            await peer.until(number + 1)
        receiver.rest(3600.0)
        receiver.close()
        assert timers.due[0].is_cancelled

    asyncio.run(run())
    assert peer.received == [(b"%d" % number, True) for number in range(2)]


def test_the_socket_goes_to_another_loop_and_back_to_the_thread(peer: Peer) -> None:
    async def run() -> None:
        (await lent(peer)).close()
        receiver = await lent(peer)
        peer.answer(b"one")
        await peer.until(1)
        receiver.close()

    asyncio.run(run())
    asyncio.run(run())
    assert peer.received == [(b"one", True)]
    with peer.arrived:
        peer.answer(b"two")
        assert peer.arrived.wait_for(lambda: len(peer.received) == 2, PATIENCE_S)
    assert peer.received[1] == (b"two", False)


def test_an_error_in_the_loop_ends_the_transport(peer: Peer) -> None:
    async def run() -> None:
        receiver = await lent(peer)
        peer.answer(b"broken")
        async with asyncio.timeout(PATIENCE_S):
            while not peer.reasons:
                await asyncio.sleep(0.001)
        receiver.close()

    asyncio.run(run())
    assert peer.reasons == ["the client's IO thread failed: ValueError: a broken frame"]


def test_frames_of_a_turn_leave_together_behind_the_first(peer: Peer) -> None:
    """The first is sent at once; the others at the end of the turn, or when there are many; all in order."""
    count, received = 30, list[bytes]()

    async def run() -> None:
        receiver = await lent(peer)
        peer.transport.send(b"0")
        assert peer.socket.recv_multipart()[1] == b"0"  # within the turn
        for number in range(1, count):
            peer.transport.send(b"%d" % number)
        while peer.socket.poll(50):  # what has left within the turn, in eights
            received.append(peer.socket.recv_multipart()[1])
        assert len(received) == 24
        await asyncio.sleep(0)
        peer.transport.send(b"%d" % count)
        while len(received) < count:
            received.append(peer.socket.recv_multipart()[1])  # within the next turn
        other = threading.Thread(target=peer.transport.send, args=(b"of another thread",))
        other.start()
        other.join()
        receiver.close()

    asyncio.run(run())
    assert received == [b"%d" % number for number in range(1, count + 1)]
    assert peer.socket.recv_multipart()[1] == b"of another thread"


def test_what_a_loop_leaves_unsent_is_sent_by_the_thread(peer: Peer) -> None:
    async def run() -> None:
        receiver = await lent(peer)
        for number in range(4):
            peer.transport.send(b"%d" % number)
        assert peer.socket.recv_multipart()[1] == b"0"
        assert not peer.socket.poll(50)
        receiver.close()  # before the end of this turn

    asyncio.run(run())
    assert [peer.socket.recv_multipart()[1] for _ in range(3)] == [b"1", b"2", b"3"]
