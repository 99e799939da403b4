"""A backlog makes more turns of the event loop, not longer ones; long answers are made on a thread."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.client import journal as journal_module
from frontend.client.journal import Journal
from frontend.client.news import NO_NEWS, News
from frontend.http.intake import Intake
from frontend.http.replies import pump as pump_module
from frontend.http.replies.pump import Pace, Pump
from frontend.http.replies.reply import MAX_IN_LOOP, Reply
from frontend.http.wire.exchange import Exchange, Message, NoWire
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, FinishReason, Outputs


class Client:
    """A client whose news is taken in the parts that it is given."""

    error = None

    def __init__(self, news: list[News]) -> None:
        self.news = news
        self.held = list[tuple[int, bool]]()
        self.discarded = list[list[int]]()
        self.listener = lambda: None

    def lend(self, borrower: object) -> None:
        """Receive nothing."""

    def add_listener(self, listener: Any) -> None:
        self.listener = listener

    def take_news(self) -> News:
        return self.news.pop(0) if self.news else NO_NEWS

    def hold(self, number: int, held: bool) -> int:
        self.held.append((number, held))
        return 0

    def discard(self, numbers: Any) -> None:
        self.discarded.append(list(numbers))


def news_of(count: int, tokens: int, *, has_more: bool = False) -> News:
    """`tokens` tokens of each of `count` requests: their numbers."""
    numbers = np.arange(count)
    return News(
        numbers, 0 * numbers, 0 * numbers + tokens, np.arange(count, dtype=np.int32).repeat(tokens),
        np.zeros(count, np.uint8), has_more,
    )  # fmt: skip


class Taker:
    """A reply of one request, which notes the turn in which it takes its news, and how much."""

    is_streamed = False
    unsent: bytes | None = None

    def __init__(self, number: int, weight: int, taken: list[tuple[int, int, int]], turn: list[int]) -> None:
        self.parts = [SimpleNamespace(reply=self, state=SimpleNamespace(number=number), take=self._take, weight=weight)]
        self._number, self._taken, self._turn = number, taken, turn

    def _take(self, client: Any, choice: int, ids: list[int], finish: int) -> None:
        self._taken.append((self._turn[0], self._number, len(ids)))

    def attach(self, pump: Any, states: Any) -> list[Any]:
        return self.parts

    def flush(self, now: float) -> None:
        """Write nothing."""


@pytest.mark.parametrize(("count", "tokens", "weight"), [(5000, 1, 1), (500, 64, 1), (200, 8, 85), (40, 256, 85)])
def test_a_turn_takes_a_bounded_part_of_the_news(count: int, tokens: int, weight: int) -> None:
    taken, turn = list[tuple[int, int, int]](), [0]

    async def run() -> None:
        client: Any = Client([news_of(count, tokens, has_more=True), news_of(count, tokens)])
        pump = Pump(client)
        for number in range(count):
            pump.add(Taker(number, weight, taken, turn), [])  # type: ignore[arg-type]
        client.listener()
        while len(taken) < 2 * count:
            turn[0] += 1
            await asyncio.sleep(0)
            assert turn[0] < 10 * count
        pump.close()

    asyncio.run(run())
    assert [number for _, number, _ in taken] == [*range(count), *range(count)]  # in order, each once
    assert {size for _, _, size in taken} == {tokens}
    cost = 8 + tokens * weight
    for one in {turn for turn, _, _ in taken}:
        rows = sum(turn == one for turn, _, _ in taken)
        assert (rows - 1) * cost < pump_module.NEWS_EACH_TURN


class Clock:
    """A clock that is a millisecond later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    monotonic = perf_counter


def test_a_turn_with_slow_news_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is received until all of it is taken: what comes meanwhile is merged by the engine."""
    monkeypatch.setattr(pump_module, "time", Clock())
    taken, turn, calls = list[tuple[int, int, int]](), [0], list[tuple[str, int]]()

    async def run() -> None:
        client: Any = Client([news_of(200, 256)])
        pump = Pump(client)
        receiver: Any = SimpleNamespace(
            pause=lambda: calls.append(("pause", len(taken))),
            resume=lambda: calls.append(("resume", len(taken))),
            close=lambda: calls.append(("close", len(taken))),
        )
        pump._receiver = receiver
        for number in range(200):
            pump.add(Taker(number, 1, taken, turn), [])  # type: ignore[arg-type]
        client.listener()
        while len(taken) < 200:
            turn[0] += 1
            await asyncio.sleep(0)
        for _ in range(8):  # the replies are written in turns, too
            await asyncio.sleep(0)
        pump.close()

    asyncio.run(run())
    assert len({turn for turn, _, _ in taken}) > 5
    assert {what for what, count in calls if count < 200} == {"pause"}
    assert calls[-2:] == [("resume", 200), ("close", 200)]


def test_a_server_at_its_limit_rests_as_long_as_it_works() -> None:
    pace, now = Pace(), 100.0
    rests = []
    for idle, work in [  # milliseconds
        (50, 2),  # the first news
        (0.4, 3),  # within a quarter of 2
        (0.5, 20),  # of 3: it rests for a bounded time
        (4.9, 1),  # of 20
        (0.3, 2),  # later than a quarter of 1
        (0, 0.4),  # too little for a rest
    ]:
        now += idle * 1e-3
        pace.begin(now)
        now += work * 1e-3
        rests.append(round(pace.end(now) * 1e3, 6))
        now += rests[-1] * 1e-3
    assert rests == [0, 3, 8, 1, 0, 0]


@pytest.mark.parametrize("num_others", [0, 60])
def test_many_requests_are_forgotten_in_parts(num_others: int) -> None:
    """One part in a turn, also if further replies end in the meantime."""

    async def run() -> list[int]:
        client: Any = Client([])
        pump = Pump(client)
        reply = Taker(0, 1, [], [0])
        reply.parts = [SimpleNamespace(reply=reply, state=SimpleNamespace(number=number)) for number in range(1000)]
        pump.add(reply, [])  # type: ignore[arg-type]
        pump.remove(reply)  # type: ignore[arg-type]
        for number in range(1000, 1000 + num_others):
            other = Taker(number, 1, [], [0])
            pump.remove(other)  # type: ignore[arg-type]
        sizes = list[int]()
        while sum(map(len, client.discarded)) < 1000 + num_others:
            before = len(client.discarded)
            await asyncio.sleep(0)
            sizes.append(sum(map(len, client.discarded[before:])))
        pump.close()
        assert sorted(number for part in client.discarded for number in part) == list(range(1000 + num_others))
        return sizes

    assert max(asyncio.run(run())) <= 128


@pytest.mark.parametrize(("size", "most"), [(0, 16), (10_000, 7), (64 << 10, 1), (8 << 20, 1)])
def test_a_turn_takes_requests_up_to_a_bound(size: int, most: int) -> None:
    handled, turns = list[int](), list[int]()

    async def run() -> None:
        intake = Intake()

        async def handle(number: int) -> None:
            await intake.turn(size)
            handled.append(number)

        tasks = [asyncio.create_task(handle(number)) for number in range(40)]
        while len(handled) < len(tasks):
            before = len(handled)
            await asyncio.sleep(0)
            turns.append(len(handled) - before)

    asyncio.run(run())
    assert handled == list(range(40))
    assert max(turns) == most


class Format:
    """A format that notes on which thread it works."""

    stream_type, keep_alive = b"text/event-stream", b""

    def __init__(self) -> None:
        self.threads = list[int]()

    def opening(self) -> bytes:
        return b"opening "

    def closing(self, usage: Any) -> bytes:
        return b"closing"

    def failure(self, error: Any) -> bytes:
        return b"failed"

    def piece(self, index: int, output: Any, usage: Any) -> bytes:
        self.threads.append(threading.get_ident())
        return b"%d:%b " % (index, output)

    def whole(self, choices: Any, sides: Any, usage: Any) -> bytes:
        self.threads.append(threading.get_ident())
        return b"whole"


class Completion:
    """A choice with so many log probabilities that no output has shown."""

    def __init__(self, text: bytes, count: int) -> None:
        self.num_unread_logprobs, self._text = count, text

    def output(self) -> bytes:
        return self._text


def exchange_of(sent: list[Message]) -> Exchange:
    """An exchange of a connection that is never full; what it sends is put into the list."""

    async def send(message: Message) -> None:
        sent.append(message)

    return Exchange({"http_version": "1.1", "method": "POST", "headers": []}, send, NoWire())


@pytest.mark.parametrize("sizes", [(1, MAX_IN_LOOP + 1, 1), (MAX_IN_LOOP + 1,) * 3, (1, 1, 1)])
def test_long_pieces_of_a_stream_are_made_on_a_thread_and_keep_their_places(sizes: tuple[int, ...]) -> None:
    made, sent = Format(), list[Message]()
    exchange = exchange_of(sent)
    request: Any = SimpleNamespace(id="x", received_at=0.0, answer_headers=[], exchange=exchange, key=None)

    async def run() -> None:
        client: Any = Client([])
        pump = Pump(client)
        answers: Any = made
        reply = Reply(request, answers, is_streamed=True, max_model_len=8, num_choices=0)
        pump.add(reply, [])
        for index, size in enumerate(sizes):
            completion: Any = Completion(b"abc"[index : index + 1], size)
            reply.add(index, completion)
        reply.flush(0.0)
        if max(sizes) > MAX_IN_LOOP:
            assert not exchange.is_complete
        async with asyncio.timeout(30):
            while not exchange.is_complete:
                await asyncio.sleep(0.001)
        pump.close()

    asyncio.run(run())
    assert b"".join(one.get("body", b"") for one in sent) == b"opening 0:a 1:b 2:c closing"
    here = threading.get_ident()
    assert sum(thread != here for thread in made.threads) == sum(size > MAX_IN_LOOP for size in sizes)


def test_a_stream_waits_for_all_of_its_requests() -> None:
    """It is attached in parts, and may be complete as far as it is attached."""
    exchange = exchange_of([])
    request: Any = SimpleNamespace(id="x", received_at=0.0, answer_headers=[], exchange=exchange, key=None)

    async def run() -> None:
        client: Any = Client([])
        pump = Pump(client)
        answers: Any = Format()
        reply = Reply(request, answers, is_streamed=True, max_model_len=8, num_choices=1)
        pump.add(reply, [])
        reply.start_late()
        reply.fail(ValueError())
        reply.flush(0.0)
        assert not exchange.is_complete
        pump.close()

    asyncio.run(run())


class TestJournal:
    """One look at the news has bounds, and several looks have all of it."""

    def journal(self, count: int, length: int, finish: int = 0) -> Journal:
        journal = Journal()
        for number in range(count):
            params = SamplingParams(max_tokens=length)
            journal.add(AddRequest(number, b"\1\0\0\0", params, 0), streaming=True, now=1.0)
        numbers = np.arange(count, dtype="<u4")
        tokens = np.arange(length, dtype="<i4")
        journal.apply(
            Outputs(
                epoch=1,
                step=0,
                numbers=numbers.tobytes(),
                positions=bytes(4 * count),
                counts=np.full(count, length, "<u2").tobytes(),
                tokens=np.tile(tokens, count).tobytes(),
                finish=bytes([finish]) * count if finish else b"",
            ),
            2.0,
        )
        return journal

    def test_tokens_of_a_choice_come_in_parts_and_its_end_with_the_last(self) -> None:
        journal = self.journal(2, 600, FinishReason.LENGTH)
        found: dict[int, list[int]] = {0: [], 1: []}
        looks, has_more = 0, True
        while has_more:
            news = journal.take_news()
            has_more, looks, at = news.has_more, looks + 1, 0
            assert max(news.counts) <= journal_module.MAX_NEWS_TOKENS
            for number, count, finish in zip(news.numbers.tolist(), news.counts.tolist(), news.finish, strict=True):
                found[number] += news.tokens[at : at + count].tolist()
                at += count
                assert bool(finish) == (len(found[number]) == 600)
        assert looks == 3
        assert list(found.values()) == [list(range(600))] * 2
        assert len(journal.take_news().numbers) == 0

    def test_requests_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal_module, "MAX_NEWS_REQUESTS", 10)
        journal = self.journal(25, 1)
        found = list[int]()
        for has_more in (True, True, False):
            news = journal.take_news()
            assert news.has_more == has_more
            found += news.numbers.tolist()
            journal._ready[journal.row(found[0])] = True  # the first one always has more to say
            if has_more:
                assert len(news.numbers) == 10
        assert set(range(25)) <= {*found, *journal.take_news().numbers.tolist()}
        assert found[10:20] != found[:10]
