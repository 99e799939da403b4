"""Requests are taken and replies are written so many in a turn of the event loop, which has time for others between."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from frontend.client.news import NO_NEWS, News
from frontend.http.intake import Intake
from frontend.http.pump import Pump

COUNT = 300


class Client:
    """A client that has one token for each of COUNT requests, once."""

    error = None

    def lend(self, borrower: object) -> None:
        """Receive nothing."""

    def __init__(self) -> None:
        self.listener: Callable[[], None] = lambda: None
        ones = np.ones(COUNT, np.int64)
        finish = np.zeros(COUNT, np.uint8)
        self.news = [News(np.arange(COUNT), 0 * ones, ones, np.arange(COUNT, dtype=np.int32), finish)]

    def add_listener(self, listener: Callable[[], None]) -> None:
        self.listener = listener

    def take_news(self) -> News:
        return self.news.pop() if self.news else NO_NEWS


class OneReply:
    """A reply of one request, which notes when it is written."""

    is_streamed = False

    def __init__(self, number: int, notes: list[str]) -> None:
        self.ids = list[int]()
        self._notes = notes
        self._part = SimpleNamespace(reply=self, state=SimpleNamespace(number=number), take=self._take)

    def _take(self, client: Any, choice: int, ids: list[int], finish: int) -> None:
        self.ids += ids

    def attach(self, pump: Any, states: Any) -> list[Any]:
        return [self._part]

    def flush(self, now: float) -> None:
        self._notes.append("write")

    def fail(self, error: Exception) -> None:
        self._notes.append(str(error))


class BrokenReply(OneReply):
    """A reply whose text cannot be read, or cannot be written."""

    def __init__(self, number: int, notes: list[str], *, reads: bool) -> None:
        super().__init__(number, notes)
        self.request = SimpleNamespace(id="x")
        self._reads = reads

    def _take(self, client: Any, choice: int, ids: list[int], finish: int) -> None:
        if not self._reads:
            raise RecursionError("not read")

    def flush(self, now: float) -> None:
        if self._reads and "not written" not in self._notes:
            raise RecursionError("not written")
        super().flush(now)


def test_replies() -> None:
    notes = list[str]()

    async def run() -> list[OneReply]:
        client: Any = Client()
        pump, loop = Pump(client), asyncio.get_running_loop()
        replies = [OneReply(number, notes) for number in range(COUNT)]
        for reply in replies:
            pump.add(reply, [])  # type: ignore[arg-type]
        client.listener()
        for _ in range(6):
            loop.call_soon(notes.append, "other")
            await asyncio.sleep(0)
        pump.close()
        return replies

    replies = asyncio.run(run())
    assert [reply.ids for reply in replies] == [[number] for number in range(COUNT)]
    assert notes.count("write") == COUNT
    last = len(notes) - notes[::-1].index("write")
    assert notes[notes.index("write") : last].count("other") >= 2
    longest = max(map(len, "".join("w" if note == "write" else " " for note in notes).split()))
    assert longest < COUNT / 2


def test_a_reply_that_cannot_be_made_fails_alone() -> None:
    notes = list[str]()

    async def run() -> list[OneReply]:
        client: Any = Client()
        pump = Pump(client)
        broken = [BrokenReply(0, notes, reads=False), BrokenReply(1, notes, reads=True)]
        replies = [*broken, *(OneReply(number, notes) for number in range(2, COUNT))]
        for reply in replies:
            pump.add(reply, [])  # type: ignore[arg-type]
        client.listener()
        while notes.count("write") < COUNT:
            await asyncio.sleep(0)
        pump.close()
        return replies

    assert [reply.ids for reply in asyncio.run(run())[2:]] == [[number] for number in range(2, COUNT)]
    assert sorted(set(notes)) == ["not read", "not written", "write"]


def test_requests() -> None:
    notes = list[object]()

    async def run() -> None:
        intake: Intake[int] = Intake(notes.append)
        for number in range(40):
            intake.put(number)
        assert (notes, len(intake)) == ([], 40)
        while len(intake):
            asyncio.get_running_loop().call_soon(notes.append, "other")
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [note for note in notes if note != "other"] == list(range(40))
    assert notes.index("other") < 20
