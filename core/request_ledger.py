"""RequestLedger: which request numbers a session has in use, so that sending a request twice is one request."""

from collections import OrderedDict
from enum import Enum
from hashlib import blake2b

import msgspec
import numpy as np

from ipc.messages import FinishReason, Outputs, RequestFailed, ServerMessage

MAX_FINISHED = 4096  # numbers of finished requests that a session remembers


class Standing(Enum):
    """How a request stands to those its session has sent before."""

    NEW = "new"
    SAME = "same"  # as one that is running, byte for byte
    IN_USE = "in use"  # by a running request that is another
    FINISHED = "finished"


class _Live(msgspec.Struct):
    digest: bytes
    num_bytes: int
    num_unfinished: int  # choices


class RequestLedger:
    """Owned by the IO thread; learns of a request's end from the messages on their way to the client."""

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._finished: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.num_bytes = 0  # of live requests, as they were sent

    def standing(self, number: int, frame: bytes | memoryview) -> Standing:
        live = self._live.get(number)
        if live is not None:
            return Standing.SAME if live.digest == _digest(frame) else Standing.IN_USE
        return Standing.FINISHED if number in self._finished else Standing.NEW

    def add(self, number: int, frame: bytes | memoryview, num_choices: int) -> None:
        self._live[number] = _Live(_digest(frame), len(frame), num_choices)
        self.num_bytes += len(frame)

    def note(self, message: ServerMessage) -> None:
        """What the client is told now; a request ends with the last of its choices' rows, or by a failure."""
        if isinstance(message, RequestFailed):
            self._end(message.number)
        elif isinstance(message, Outputs) and message.finish:
            finish = np.frombuffer(message.finish, np.uint8)
            numbers = np.frombuffer(message.numbers, "<u4")
            for number in numbers[finish != FinishReason.NONE].tolist():
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
