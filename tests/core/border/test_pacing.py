"""What a client that floods has handled while another has work, and what is kept of the rest: counted in messages."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import zmq

from core.border.pacing import BURST_UNITS, MAX_PARKED, MAX_PARKED_BYTES, UNITS_PER_S
from core.border.socket_rounds import Border
from ipc.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Abort, AddRequest, Heartbeat, Hello, encode
from tests.core.border.test_bounded_work import PlayedFrame, PlayedSocket
from tests.core.running_engine import CONFIG
from tests.raw_client import request
from tests.simulation.engine_parts import ready_executor, served

TICK = 0.001
PER_TICK = round(UNITS_PER_S * TICK)
HELLO = encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, ""))
HEARTBEAT = encode(Heartbeat())


class Peers(PlayedSocket):
    """The socket with messages of several peers, of which it hands out one of each in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: OrderedDict[bytes, deque[bytes]] = OrderedDict()

    def add(self, peer: bytes, *messages: bytes) -> None:
        self.queues.setdefault(peer, deque()).extend(messages)

    def left(self, peer: bytes) -> int:
        return len(self.queues.get(peer, ()))

    def recv(self, flags: int = 0, copy: bool = True) -> bytes | PlayedFrame:
        if copy:
            peer = next((one for one, queue in self.queues.items() if queue), None)
            if peer is None:
                raise zmq.Again
            self.queues.move_to_end(peer)
            return peer
        return PlayedFrame(next(reversed(self.queues.values())).popleft(), more=False)

    def get(self, option: int) -> int:
        return zmq.POLLIN if any(self.queues.values()) else 0


class Rounds:
    """A border whose rounds are 1 ms apart. A witness has a request; a second client has none."""

    def __init__(self) -> None:
        self.socket, self.now = Peers(), 1.0
        parts = (self.socket, Peers(), served(CONFIG, ready_executor(CONFIG).info, 0, 60_000), self.now)
        self.border = Border(*parts, on_drain=lambda: None, on_shutdown=lambda: None)  # type: ignore[arg-type]
        self.handled: list[tuple[bytes, bytes]] = []
        handle = self.border.reception.receive

        def receive(identity: bytes, frame: PlayedFrame, num_frames: int, now: float) -> None:
            self.handled.append((identity, frame.buffer))
            handle(identity, frame, num_frames, now)  # type: ignore[arg-type]

        self.border.reception.receive = receive  # type: ignore[method-assign, assignment]
        self.socket.add(b"witness", HELLO, encode(request(1, [1])))
        self.socket.add(b"flood", HELLO)
        self.run(100)
        self.handled.clear()

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK
            self.border.round(self.now)

    def count(self, peer: bytes) -> int:
        return sum(identity == peer for identity, _ in self.handled)

    @property
    def num_parked(self) -> int:
        return self.border.pacing.num_parked


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def test_a_flood_has_its_budget_and_no_more(rounds: Rounds) -> None:
    rounds.socket.add(b"flood", *[HEARTBEAT] * 5000)
    rounds.run(400)
    at_once = 3 * BURST_UNITS  # until it is noticed, and then
    assert 400 * PER_TICK * 0.9 <= rounds.count(b"flood") <= at_once + 400 * PER_TICK
    assert rounds.num_parked <= MAX_PARKED
    assert rounds.socket.left(b"flood") > 2000  # the client keeps the rest
    rounds.run(2000)
    assert rounds.count(b"flood") == 5000
    assert rounds.num_parked == 0


def test_others_are_not_kept_waiting(rounds: Rounds) -> None:
    rounds.socket.add(b"flood", *[HEARTBEAT] * 50_000)
    rounds.run(100)  # its lot is full
    for number in range(2, 50):
        rounds.socket.add(b"witness", encode(request(number, [1])))
        before = rounds.count(b"witness")
        rounds.run(2)
        assert rounds.count(b"witness") == before + 1
    rounds.socket.add(b"witness", *[HEARTBEAT] * 200)  # what comes at once
    rounds.run(60)
    assert rounds.socket.left(b"witness") == 0
    assert rounds.count(b"witness") == 48 + 200


def test_messages_keep_their_order(rounds: Rounds) -> None:
    aborts = [encode(Abort(np.array([number], "<u4").tobytes())) for number in range(3000)]
    rounds.socket.add(b"flood", *aborts)
    rounds.socket.add(b"other", HELLO, *aborts[:1500])
    rounds.run(1000)
    assert [data for peer, data in rounds.handled if peer == b"flood"] == aborts
    assert [data for peer, data in rounds.handled if peer == b"other"] == [HELLO, *aborts[:1500]]


def test_who_alone_has_work_is_not_paced() -> None:
    rounds = Rounds()
    rounds.border.sessions.close(rounds.border.sessions.of_identity(b"witness"))  # type: ignore[arg-type]
    rounds.run(100)
    rounds.socket.add(b"flood", *(encode(request(number, [1])) for number in range(960)))
    rounds.run(30)  # 32 messages each
    assert rounds.count(b"flood") == 960
    assert not rounds.border.pacing.is_on


def test_the_end_of_the_others_work_ends_the_pacing(rounds: Rounds) -> None:
    rounds.socket.add(b"flood", *[HEARTBEAT] * 2000)
    rounds.run(50)
    assert rounds.num_parked
    rounds.border.sessions.close(rounds.border.sessions.of_identity(b"witness"))  # type: ignore[arg-type]
    rounds.run(50 + 2000 // 32)
    assert rounds.count(b"flood") == 2000


def test_what_is_parked_is_bounded_by_bytes_too(rounds: Rounds) -> None:
    long = encode(request(7, [1] * 50_000))  # 200 KB, and wrong: its prompt is too long
    rounds.socket.add(b"flood", *[HEARTBEAT] * 200, *[long] * 100)
    most = 0
    for _ in range(6000):
        rounds.run(1)
        most = max(most, rounds.border.pacing.num_bytes)
    assert MAX_PARKED_BYTES / 2 < most <= MAX_PARKED_BYTES + len(long)
    assert rounds.count(b"flood") == 300


def test_a_client_that_leaves_takes_nothing_with_it(rounds: Rounds) -> None:
    rounds.socket.add(b"flood", *(encode(request(number, [1])) for number in range(600)))
    rounds.run(16)
    assert rounds.num_parked
    session = rounds.border.sessions.of_identity(b"flood")
    assert session is not None
    rounds.border.sessions.lose(session)
    rounds.run(200)
    assert rounds.num_parked == 0
    taken = []
    while part := rounds.border.inbox.drain():
        taken += [
            message.number for client, message in part if client == session.client and isinstance(message, AddRequest)
        ]
    assert taken == list(range(len(taken)))
    assert len(taken) < 600  # those that were parked are the client's to send again


def test_what_a_lost_session_had_comes_back_at_once(rounds: Rounds) -> None:
    aborts = [HEARTBEAT] * 400  # the flood is noticed
    rounds.socket.add(b"flood", *aborts)
    rounds.socket.add(b"back", encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "", num_resumed=300)))
    rounds.run(16)
    assert rounds.border.pacing.is_on
    rounds.socket.add(b"back", *(encode(request(number, [1])) for number in range(300)), *[HEARTBEAT] * 200)
    rounds.run(24)
    assert rounds.count(b"back") >= 300
    rounds.run(4)
    assert rounds.num_parked, "what it sends beyond that is paced"


def test_few_messages_never_come_to_it(rounds: Rounds) -> None:
    for _ in range(500):
        rounds.socket.add(b"flood", *[HEARTBEAT] * (PER_TICK - 2))
        rounds.run(1)
        assert not rounds.border.pacing.is_on
