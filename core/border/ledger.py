"""RequestLedger: the request numbers that a session has in use, so that a request sent twice is one request."""

from collections import OrderedDict
from enum import Enum
from hashlib import blake2b
from itertools import islice

import msgspec
import numpy as np

from ipc.messages import Abort, Outputs, RequestFailed, ServerMessage, unpack_choices, unpack_numbers

#: Numbers of finished requests that a session remembers. This is more than the rows, of at least 10 bytes each, that
#: core/border/backlog.py merges into one message: a number's second use must not be merged with its first.
MAX_FINISHED = 8192
#: Ends of requests that may be lost with a connection: each is remembered with some 70 bytes, for as many as sessions.
MAX_UNCONFIRMED = 1024


class NumberStatus(Enum):
    """The use of a request number by its session so far."""

    NEW = "new"
    SAME = "same"  # the request equals the running one of this number, byte for byte
    IN_USE = "in use"  # by another running request
    FINISHED = "finished"


class _Live(msgspec.Struct):
    digest: bytes
    num_bytes: int
    num_unfinished: int  # choices


class RequestLedger:
    """The live and finished request numbers of one session, which owns the ledger.

    It learns of a request's end from the messages on their way to the client.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._finished: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.num_bytes = 0  # of the frames of live requests

    def status(self, number: int, frame: bytes | memoryview) -> NumberStatus:
        """Return the status of a number for the request in this frame."""
        live = self._live.get(number)
        if live is not None:
            return NumberStatus.SAME if live.digest == _digest(frame) else NumberStatus.IN_USE
        return NumberStatus.FINISHED if number in self._finished else NumberStatus.NEW

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._live)

    def add(self, number: int, frame: bytes | memoryview, num_choices: int) -> None:
        """Enter a new request with its frame and number of choices."""
        self._live[number] = _Live(_digest(frame), len(frame), num_choices)
        self.num_bytes += len(frame)

    def unconfirmed(self) -> set[int]:
        """Numbers of the requests that a client whose connection was cut may believe unfinished: the live ones, and the
        last that have finished, because their ends may have been on the way."""
        return {*self._live, *islice(reversed(self._finished), MAX_UNCONFIRMED)}

    def live_among(self, abort: Abort) -> Abort | None:
        """Return the part of an Abort that names live requests, each once; None if there is none.

        So the rest costs the engine thread nothing.
        """
        numbers = unpack_numbers(abort.numbers)
        choices = unpack_choices(abort.choices) if abort.choices else [0] * len(numbers)
        named = dict.fromkeys(zip(numbers, choices, strict=False))  # a number without its choice names nothing
        kept = np.array([pair for pair in named if pair[0] in self._live], np.uint32).reshape(-1, 2).T
        if not kept.size:
            return None
        return Abort(kept[0].astype("<u4").tobytes(), kept[1].astype("<u2").tobytes() if abort.choices else b"")

    def note(self, message: ServerMessage) -> None:
        """Note a message that is sent to the client now.

        A request ends with the last of its choices' rows, or by a failure.
        """
        if isinstance(message, RequestFailed):
            self._end(message.number)
        elif isinstance(message, Outputs) and message.finish:
            for row, code in enumerate(message.finish):
                if code:
                    number = int.from_bytes(message.numbers[4 * row : 4 * row + 4], "little")
                    live = self._live.get(number)
                    if live is not None:
                        live.num_unfinished -= 1
                        if live.num_unfinished == 0:
                            self._end(number)

    def _end(self, number: int) -> None:
        live = self._live.pop(number, None)
        if live is None:
            return
        self.num_bytes -= live.num_bytes
        self._finished[number] = None
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)


def _digest(frame: bytes | memoryview) -> bytes:
    return blake2b(frame, digest_size=16).digest()
