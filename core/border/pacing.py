"""Pacing: limits how many of a client's messages are handled while others have work; the rest is parked.

A flood of valid messages takes the IO thread's time, and with it the GIL, which the steps of all others need. So while
more arrives than one client's budget, each client has its own budget. Messages beyond it are parked as they arrived,
undecoded and in order, and are handled as the budget allows. While a client's lot is full, nothing is read. This lasts
for one message's share of the budget, after which libzmq delivers one message of each client in turn. So others wait no
longer than that, and what a flooding client sends waits in the buffers of its own machine.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq

from core.border.busy import Busy
from core.border.sessions import Sessions
from ipc.wire.feature_messages import PutFeature

#: One client's units per second, and at once. A message is one unit, and so is each KiB of it, because reading its
#: lists takes about 100 us; for a feature, which is a single piece of bytes, each 64 KiB. A request takes about 90 us
#: of GIL time until it ends.
UNITS_PER_S, BURST_UNITS = 4000.0, 128.0
#: The most parked messages of one client, and bytes before one more; and the most of all, above which nothing is read.
MAX_PARKED, MAX_PARKED_BYTES, MAX_ALL_BYTES = 256, 1 << 20, 64 << 20
_MAX_LOTS = 8192  # budgets that are kept; beyond it only those of clients with parked messages
_FEATURE = bytes((0x90 | len(PutFeature.__struct_fields__) + 1, 7))  # the first bytes of a PutFeature


class Message(NamedTuple):
    """A message as received from the socket: its peer, its first frame, and its number of frames."""

    identity: bytes
    frame: zmq.Frame
    num_frames: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the first frame, which is all that is kept."""
        return len(self.frame.buffer)


class _Lot(msgspec.Struct, eq=False):
    """The budget of one peer, and its messages beyond it. at: the time for which `units` is valid."""

    at: float
    units: float = BURST_UNITS
    parked: deque[Message] = msgspec.field(default_factory=deque)
    num_bytes: int = 0

    def may_go(self, now: float) -> bool:
        """Return whether the budget allows a message now. A long message leaves a debt."""
        self.units, self.at = min(BURST_UNITS, self.units + (now - self.at) * UNITS_PER_S), now
        return self.units > 0

    @property
    def is_full(self) -> bool:
        """Return whether no more may be parked."""
        return len(self.parked) >= MAX_PARKED or self.num_bytes >= MAX_PARKED_BYTES


class Pacing:
    """The budgets of all peers of a socket. now: monotonic seconds, from the caller.

    is_on: whether parks() must be called before a message is handled. It is False while less than one budget arrives,
    and for a client that is the only one with work. num_parked: messages, over all peers.
    """

    def __init__(self, sessions: Sessions, busy: Busy, now: float) -> None:
        self.is_on = False
        self.num_parked = 0
        self._sessions, self._busy = sessions, busy
        self._lots: dict[bytes, _Lot] = {}  # least recently served first
        self._num_bytes = self._num_full = 0
        self._noted_at = now

    @property
    def num_bytes(self) -> int:
        """Return the bytes of parked messages, over all peers."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Return whether nothing may be read before parked messages are handled."""
        return self._num_full > 0 or self._num_bytes >= MAX_ALL_BYTES

    def note(self, num_units: float, identity: bytes, now: float) -> None:
        """Count units read since the last call, the last of them from this peer, and set is_on."""
        is_fast = num_units > (now - self._noted_at) * UNITS_PER_S
        self._noted_at = now
        if is_fast and self._others_have_work(identity, now):
            self.is_on = True
        elif not self.num_parked:
            self.is_on = False
            self._lots.clear()

    def parks(self, message: Message, now: float) -> bool:
        """Return whether a message was parked. If not, it is paid for and must be handled now."""
        lot = self._lots.get(message.identity)
        if lot is None:
            if len(self._lots) >= _MAX_LOTS:
                self._lots = {peer: one for peer, one in self._lots.items() if one.parked}
            lot = self._lots[message.identity] = _Lot(now)
        if not lot.parked and self._may_go(message.identity, lot, now):
            lot.units -= _units(message)
            return False
        was_full = lot.is_full
        lot.parked.append(message)
        self._count(lot, message, 1, was_full=was_full)
        return True

    def due(self, now: float) -> Iterator[Message]:
        """Yield the parked messages to be handled now, one from each peer in turn."""
        waiting = [(identity, lot) for identity, lot in self._lots.items() if lot.parked]
        while waiting := [(peer, lot) for peer, lot in waiting if lot.parked and self._may_go(peer, lot, now)]:
            for identity, lot in waiting:
                was_full, message = lot.is_full, lot.parked.popleft()
                lot.units -= _units(message)
                self._count(lot, message, -1, was_full=was_full)
                self._lots[identity] = self._lots.pop(identity)
                yield message

    def _count(self, lot: _Lot, message: Message, sign: int, *, was_full: bool) -> None:
        num_bytes = sign * message.num_bytes
        lot.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self.num_parked += sign
        self._num_full += lot.is_full - was_full

    def _may_go(self, identity: bytes, lot: _Lot, now: float) -> bool:
        return lot.may_go(now) or not self._others_have_work(identity, now) or self._comes_back(identity, now)

    def _comes_back(self, identity: bytes, now: float) -> bool:
        """Return whether a peer resends what it had before it lost its connection or engine. It does so at once."""
        session = self._sessions.of_identity(identity)
        if session is None or session.returning_until <= now:
            return False
        return bool(session.resumable) or session.num_restorable > 0

    def _others_have_work(self, identity: bytes, now: float) -> bool:
        """Return whether another peer has requests. The information may be 50 ms old."""
        self._busy.look(now)
        session = self._sessions.of_identity(identity)
        return self._busy.others_than(-1 if session is None else session.client)


def _units(message: Message) -> float:
    data = message.frame.buffer
    return 1 + len(data) / (64 << 10 if data[:2] == _FEATURE else 1 << 10)
