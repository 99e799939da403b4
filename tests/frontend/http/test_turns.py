"""Requests are taken and replies are written so many in a turn of the event loop, which has time for others between."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.client.news import NO_NEWS, News
from frontend.http import pooling
from frontend.http.errors import HttpError
from frontend.http.intake import Intake
from frontend.http.replies.pump import Pump
from frontend.http.replies.reply import Reply
from frontend.http.wire.exchange import Exchange, Message, NoWire
from tests.placed import PREFIX

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
    unsent: bytes | None = None

    def __init__(self, number: int, notes: list[str]) -> None:
        self.ids = list[int]()
        self._notes = notes
        self._part = SimpleNamespace(reply=self, state=SimpleNamespace(number=number), take=self._take, weight=1)

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
        intake = Intake()

        async def enter(number: int) -> None:
            await intake.turn()
            notes.append(number)

        tasks = [asyncio.create_task(enter(number)) for number in range(40)]
        await asyncio.sleep(0)
        assert notes == list(range(16))
        while not all(task.done() for task in tasks):
            asyncio.get_running_loop().call_soon(notes.append, "other")
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [note for note in notes if note != "other"] == list(range(40))
    assert notes.index("other") < 20


def exchange(sent: list[Message]) -> Exchange:
    """An exchange of a connection that is never full; what it sends is put into the list."""

    async def send(message: Message) -> None:
        sent.append(message)

    return Exchange({"http_version": "1.1", "method": "POST", "headers": []}, send, NoWire())


class OpeningFails:
    """A format of answers whose first events cannot be made."""

    stream_type, keep_alive = b"text/event-stream", b""

    def opening(self) -> bytes:
        raise RecursionError("no opening")

    def failure(self, error: Any) -> bytes:
        return b"failed"


def test_a_late_head_that_cannot_be_made_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PREFIX}frontend.http.replies.pump.HEAD_S", 0.0)
    ended = list[int]()
    sent = list[Message]()
    request: Any = SimpleNamespace(
        id="x", received_at=0.0, answer_headers=[], exchange=exchange(sent), error_body=HttpError.body
    )

    async def run() -> None:
        client: Any = Client()
        client.discard = list
        pump = Pump(client)
        answers: Any = OpeningFails()
        reply = Reply(request, answers, is_streamed=True, max_model_len=8, num_choices=0, on_end=ended.append)
        pump.add(reply, [])
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        pump.close()
        assert not pump.replies

    asyncio.run(run())
    assert sent[0]["status"] == 500
    assert b"failed to handle this request" in sent[1]["body"]
    assert ended == [0]


def test_texts_of_a_peer_that_leaves_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    discarded = list[list[int]]()
    monkeypatch.setattr(pooling, "submit_pooling", lambda engine, one: SimpleNamespace(number=one))

    async def run(*, leaves_before: bool) -> None:
        client: Any = Client()
        client.discard = discarded.append
        pump, left = Pump(client), exchange([])
        service: Any = SimpleNamespace(engine=SimpleNamespace(client=client), pump=pump)
        request: Any = SimpleNamespace(exchange=left)
        if leaves_before:
            left.leave()
        texts: Any = [COUNT, COUNT + 1]
        asking = asyncio.create_task(pooling._answers(service, request, texts))
        await asyncio.sleep(0)
        left.leave()
        with pytest.raises(HttpError, match="the peer has left") as caught:
            await asyncio.wait_for(asking, 30)
        assert caught.value.status == 499
        assert caught.value.body()
        assert left.on_left is None
        pump.close()

    asyncio.run(run(leaves_before=False))
    assert discarded == [[COUNT, COUNT + 1]]
    asyncio.run(run(leaves_before=True))
    assert discarded == [[COUNT, COUNT + 1]]


def test_parts_of_streams_leave_one_right_after_the_other() -> None:
    """Nothing is made between two sends of a turn; the head of a stream without text goes out too."""
    notes = list[str]()

    class Streamed(OneReply):
        is_streamed = True

        def flush(self, now: float) -> None:
            super().flush(now)
            self.unsent = b""

        def send(self, now: float) -> None:
            self.unsent = None
            self._notes.append("send")

    async def run() -> None:
        client: Any = Client()
        pump = Pump(client)
        for number in range(COUNT):
            pump.add(Streamed(number, notes), [])  # type: ignore[arg-type]
        client.listener()
        while notes.count("send") < COUNT:
            await asyncio.sleep(0)
        pump.close()

    asyncio.run(run())
    turns = "".join(note[0] for note in notes).replace("ws", "w s").replace("sw", "s w").split()
    assert sum(map(len, turns)) == 2 * COUNT
    assert len(turns) < COUNT / 10
