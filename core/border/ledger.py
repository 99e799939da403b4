"""RequestLedger: the request numbers that a session uses, so that a request sent twice is one request."""

from collections import OrderedDict
from enum import Enum
from hashlib import blake2b
from itertools import islice

import msgspec
import numpy as np

from core.border.accounts import Account, Load
from ipc.tables.arrays import UInt32s
from ipc.wire.messages import Abort, Outputs, RequestFailed, ServerMessage

#: Numbers of finished requests that a session remembers. This is more than the number of rows, of at least 10 bytes
#: each, that core/border/backlog.py merges into one message: a number's second use must not be merged with its first.
MAX_FINISHED = 8192
#: Ends of requests that may be lost with a connection. Each takes about 70 bytes, for as many entries as there are
#: sessions.
MAX_UNCONFIRMED = 1024


class NumberStatus(Enum):
    """How a session has used a request number so far."""

    NEW = "new"
    SAME = "same"  # the request equals the running one with this number, byte for byte
    IN_USE = "in use"  # used by another running request
    FINISHED = "finished"


class _Live(msgspec.Struct):
    digest: bytes
    num_unfinished: int  # choices
    load: Load
    accounts: tuple[Account, ...]  # the accounts it counts for


class RequestLedger:
    """The live and finished request numbers of one session, which owns the ledger.

    It learns of a request's start and end from the messages sent to the client. account: what the session's live
    requests use.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._finished: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.account = Account()

    def status(self, number: int, frame: bytes | memoryview) -> NumberStatus:
        """Return the status of a number for the request in this frame."""
        live = self._live.get(number)
        if live is not None:
            return NumberStatus.SAME if live.digest == _digest(frame) else NumberStatus.IN_USE
        return NumberStatus.FINISHED if number in self._finished else NumberStatus.NEW

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._live)

    def add(self, number: int, frame: bytes | memoryview, load: Load, *others: Account) -> None:
        """Add a new request with its frame and what it uses. others: further accounts that it counts for."""
        accounts = (self.account, *others)
        self._live[number] = _Live(_digest(frame), load.num_choices, load, accounts)
        for account in accounts:
            account.add(load)

    def live(self) -> UInt32s:
        """Return the numbers of the live requests."""
        return np.fromiter(self._live, np.uint32, len(self._live))

    def close(self) -> None:
        """Remove the live requests from all accounts, because the session has ended."""
        for live in self._live.values():
            for account in live.accounts:
                account.remove(live.load)
        self._live.clear()

    def unconfirmed(self) -> set[int]:
        """Return the numbers of requests that a client whose connection was cut may believe unfinished.

        These are the live ones, and the last ones that have finished, because their ends may have been on the way.
        """
        return {*self._live, *islice(reversed(self._finished), MAX_UNCONFIRMED)}

    def live_among(self, abort: Abort) -> Abort | None:
        """Return the part of an Abort that names live requests, each once, or None.

        So the others cost the engine thread nothing.
        """
        numbers = np.frombuffer(abort.numbers, "<u4", len(abort.numbers) // 4)
        named = {number: None for number in numbers.tolist() if number in self._live}
        if not named:
            return None
        if not abort.choices:
            return Abort(np.array(list(named), "<u4").tobytes())
        choices = np.frombuffer(abort.choices, "<u2", len(abort.choices) // 2)
        count = min(len(numbers), len(choices))  # a number without its choice names nothing
        pairs = dict.fromkeys(zip(numbers[:count].tolist(), choices[:count].tolist(), strict=True))
        kept = np.array([pair for pair in pairs if pair[0] in named], np.uint32).reshape(-1, 2).T
        if not kept.size:
            return None
        return Abort(kept[0].astype("<u4").tobytes(), kept[1].astype("<u2").tobytes())

    def note(self, message: ServerMessage) -> None:
        """Record a message that is being sent to the client.

        A request ends with the last row of its choices, or with a failure.
        """
        if isinstance(message, RequestFailed):
            self._end(message.number)
        elif isinstance(message, Outputs):
            if message.started:
                self._begin(np.frombuffer(message.started, "<u4")[::2].tolist())
            if message.finish:
                ended = np.frombuffer(message.finish, np.uint8).nonzero()[0]
                for number in np.frombuffer(message.numbers, "<u4")[ended].tolist():
                    live = self._live.get(number)
                    if live is not None:
                        live.num_unfinished -= 1
                        if live.num_unfinished == 0:
                            self._end(number)

    def _begin(self, numbers: list[int]) -> None:
        for number in numbers:
            live = self._live.get(number)
            if live is not None and not live.load.has_begun:
                for account in live.accounts:
                    account.begin(live.load)
                live.load = live.load._replace(has_begun=True)

    def _end(self, number: int) -> None:
        live = self._live.pop(number, None)
        if live is None:
            return
        for account in live.accounts:
            account.remove(live.load)
        self._finished[number] = None
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)


def _digest(frame: bytes | memoryview) -> bytes:
    return blake2b(frame, digest_size=16).digest()
