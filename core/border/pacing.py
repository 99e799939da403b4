"""Pacing: how much of what a client sends is handled while others have work; the rest is parked.

A flood of valid messages takes the IO thread's time, and with it Python's lock, which the steps of all others need. So
while more comes than one client's budget, each client has that budget for itself. Messages beyond it are parked as they
came, undecoded and in order, and handled as the budget allows. While a lot is full nothing is read, which lasts for
one message's share of the budget: then libzmq hands out one message of each client in turn. So others wait no longer
than that, and what a flooding client sends waits in its own system's buffers.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq

from core.border.busy import Busy
from core.border.sessions import Sessions
from ipc.wire.feature_messages import PutFeature

#: Units of one client a second, and at once. A message is one, and so is each KiB of it, whose lists take some 100 us
#: to read; 64 KiB of a feature, which is one piece of bytes. A request takes some 90 us of Python's lock until it ends.
UNITS_PER_S, BURST_UNITS = 4000.0, 128.0
#: Parked of one client, and one message more; and of all together, beyond which nothing is read either.
MAX_PARKED, MAX_PARKED_BYTES, MAX_ALL_BYTES = 256, 1 << 20, 64 << 20
_MAX_LOTS = 8192  # budgets that are kept; beyond it only those of clients with something parked
_FEATURE = bytes((0x90 | len(PutFeature.__struct_fields__) + 1, 7))  # the first bytes of a PutFeature


class Message(NamedTuple):
    """A message as the socket gave it: its peer, its first frame, and the number of its frames."""

    identity: bytes
    frame: zmq.Frame
    num_frames: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the first frame, which is all that is kept."""
        return len(self.frame.buffer)


class _Lot(msgspec.Struct, eq=False):
    """The budget of one peer, and what it has sent beyond it. at: when `units` was right."""

    at: float
    units: float = BURST_UNITS
    parked: deque[Message] = msgspec.field(default_factory=deque)
    num_bytes: int = 0

    def may_go(self, now: float) -> bool:
        """Return whether the budget allows a message now. A long one leaves a debt."""
        self.units, self.at = min(BURST_UNITS, self.units + (now - self.at) * UNITS_PER_S), now
        return self.units > 0

    @property
    def is_full(self) -> bool:
        """Return whether nothing more may be parked."""
        return len(self.parked) >= MAX_PARKED or self.num_bytes >= MAX_PARKED_BYTES


class Pacing:
    """The budgets of all peers of a socket. now: monotonic seconds, of the caller.

    is_on: messages have to be shown to parks() before they are handled. It is not while less comes than one budget, nor
    for a client that alone has work. num_parked: messages, of all.
    """

    def __init__(self, sessions: Sessions, busy: Busy, now: float) -> None:
        self.is_on = False
        self.num_parked = 0
        self._sessions, self._busy = sessions, busy
        self._lots: dict[bytes, _Lot] = {}  # the one that was served last comes last
        self._num_bytes = self._num_full = 0
        self._noted_at = now

    @property
    def is_full(self) -> bool:
        """Return whether nothing is to be read before something parked was handled."""
        return self._num_full > 0 or self._num_bytes >= MAX_ALL_BYTES

    def note(self, num_units: float, identity: bytes, now: float) -> None:
        """Take note of units that were read since the last call, last of this peer, and set is_on."""
        is_fast = num_units > (now - self._noted_at) * UNITS_PER_S
        self._noted_at = now
        if is_fast and self._others_have_work(identity, now):
            self.is_on = True
        elif not self.num_parked:
            self.is_on = False
            self._lots.clear()

    def parks(self, message: Message, now: float) -> bool:
        """Return whether a message was parked; else it is to be handled now, and was paid for."""
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
        """Yield the parked messages that are to be handled now, one of each peer in turn."""
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
        """Return whether a peer sends again what it had before its connection or its engine was lost: at once."""
        session = self._sessions.of_identity(identity)
        if session is None or session.returning_until <= now:
            return False
        return bool(session.resumable) or session.num_restorable > 0

    def _others_have_work(self, identity: bytes, now: float) -> bool:
        """Return whether another peer has requests. What is known of that may be 50 ms old."""
        self._busy.look(now)
        session = self._sessions.of_identity(identity)
        return self._busy.others_than(-1 if session is None else session.client)


def _units(message: Message) -> float:
    data = message.frame.buffer
    return 1 + len(data) / (64 << 10 if data[:2] == _FEATURE else 1 << 10)
