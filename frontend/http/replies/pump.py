"""Pump: the one consumer of the engine's news in a process, which feeds all replies.

The event loop receives from the engine itself, and each batch that it received schedules one run. A run takes the news
as columns and calls into Python once for each choice; there is no task, queue or timer for a reply. However much there
is, a turn of the loop does a bounded part of it: a backlog makes more turns, not longer ones. Nothing is received until
the backlog is taken. So a server at its limit gets fewer and larger messages: those that wait are merged. It also
rests: see Pace.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

from frontend.client.client import EngineClient
from frontend.client.loop_receiver import LoopReceiver
from frontend.client.news import News
from frontend.http.replies.reply import HEAD_S, MAX_IN_LOOP, Part, Reply
from frontend.http.turns import Turns
from frontend.results.request_state import RequestState
from ipc.params.sampling_params import SamplingParams

_TICK_S = 1.0
_EACH_TURN = 128  # replies: a write takes some 10 microseconds
#: Of a turn of the loop with news: others wait no longer than that. The clock is read after each _LOOK_EVERY.
_TURN_S = 0.008
#: Of news in a turn. A choice is 8; each of its tokens is 1, and each of their log probabilities, which make more work,
#: is 4.
NEWS_EACH_TURN, _LOOK_EVERY = 65_536, 512
_DISCARDS_EACH_TURN = 128
#: Rests of a server at its limit; see Pace. A shorter one is not worth a timer.
_MOST_REST_S, _LEAST_REST_S = 0.008, 0.0005
_BYTES_OF_WORK = 64  # of an answer, for each unit of its size
_log = logging.getLogger("engine_core.http")


class Pace:
    """How long news waits for more, so that a server at its limit makes fewer and larger events.

    It is at its limit if the next news is there within a quarter of the time that the last took. Then it rests for as
    long as it has worked: the engine, callers and other requests get the processor, and an event has the tokens of
    twice as many steps. Others never wait.
    """

    def __init__(self) -> None:
        self._begun_at = self._ended_at = 0.0
        self._took_s = self._rest_s = self._idle_s = 0.0

    def begin(self, now: float) -> None:
        """Begin to take news. now: seconds of a steady clock."""
        self._idle_s, self._begun_at = now - self._ended_at - self._rest_s, now

    def end(self, now: float) -> float:
        """End: all news is taken. Return for how many seconds nothing should be received; usually 0."""
        is_late = self._idle_s < self._took_s / 4
        self._took_s, self._ended_at = now - self._begun_at, now
        self._rest_s = min(self._took_s, _MOST_REST_S) if is_late and self._took_s >= _LEAST_REST_S else 0.0
        return self._rest_s


class Pump:
    """Feeder of all replies of one client. Created in the event loop that it runs in."""

    def __init__(self, client: EngineClient, turns: Turns | None = None) -> None:
        """turns: the server's turns for other long work."""
        self.client = client
        self._turns = turns or Turns(1)
        self._news: Iterator[tuple[int, int, list[int], int]] | None = None  # the rest of the last batch of news
        self._has_more = False  # there is more news after that
        self._discarded: deque[int] = deque()  # requests for the client to discard
        self._is_discarding = False  # the next part of them is scheduled
        self._tasks: set[asyncio.Task[None]] = set()
        self.replies: dict[Reply, None] = {}
        self.num_events = 0  # choices with news since the start
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, Part] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}  # of requests without a reply of tokens
        self._touched: dict[Reply, None] = {}  # replies with something to write
        self._is_flushing = False
        self._is_scheduled = False  # written by the loop's thread and the client's
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._thread = threading.get_ident()  # the loop's
        client.add_listener(self._on_news)
        self._receiver = LoopReceiver(client, self._loop)
        self._pace = Pace()

    def close(self) -> None:
        """Stop background work."""
        self._timer.cancel()
        self._receiver.close()

    def add(self, reply: Reply, states: Sequence[tuple[RequestState, SamplingParams]]) -> None:
        """Feed this reply with the news of these requests.

        They must be submitted in the same turn of the loop, so that no run has already taken their news.
        """
        for part in reply.attach(self, states):
            self._parts[part.state.number] = part
        self.replies[reply] = None
        if reply.is_streamed:
            self._loop.call_later(HEAD_S, _start_late, reply)

    def remove(self, reply: Reply) -> None:
        """Remove an ended reply and its requests."""
        self.replies.pop(reply, None)
        numbers = [part.state.number for part in reply.parts]
        for number in numbers:
            self._parts.pop(number, None)
        self._discarded.extend(numbers[_DISCARDS_EACH_TURN:])
        self.client.discard(numbers[:_DISCARDS_EACH_TURN])
        self._discard_more()

    def make(
        self,
        reply: Reply,
        size: int,
        work: Callable[[], bytes],
        done: Callable[[bytes], None],
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run `work` and `then`, call done() with the work's result, and flush the reply; see Owner."""

        async def run() -> bytes:
            key = reply.request.key
            if size <= MAX_IN_LOOP:
                made = work()
            else:
                made = await self._turns.run("" if key is None else key.name, size * _BYTES_OF_WORK, work)
            if then is not None:
                await then()
            return made

        task = self._loop.create_task(self._make(reply, run(), done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, reply: Reply, making: Coroutine[None, None, bytes], done: Callable[[bytes], None]) -> None:
        made = b""
        try:
            made = await making
        except Exception as error:  # as in _run()
            _fail(reply, error)
        done(made)
        self._touched[reply] = None
        if not self._is_flushing:
            self._flush()
        self._on_news()  # of the time on hold

    def _discard_more(self) -> None:
        """Schedule the next part of what is to be discarded, one in each turn, however many replies end."""
        if self._discarded and not self._is_discarding:
            self._is_discarding = True
            self._loop.call_soon(self._discard)

    def _discard(self) -> None:
        self._is_discarding = False
        count = min(_DISCARDS_EACH_TURN, len(self._discarded))
        self.client.discard([self._discarded.popleft() for _ in range(count)])
        self._discard_more()

    def ended(self, number: int) -> "asyncio.Future[None]":
        """Return a future that is done when this request, which has no reply, has ended.

        It must be submitted in the same turn of the loop, as in add().
        """
        end = self._ends[number] = self._loop.create_future()
        return end

    def forget(self, numbers: Sequence[int]) -> None:
        """Stop waiting for the ends of these requests."""
        for number in numbers:
            self._ends.pop(number, None)

    def wake(self) -> None:
        """Look for news of replies that were on hold."""
        self._on_news()

    def _on_news(self) -> None:
        """Schedule a run, unless one is scheduled. Also called by the client's IO thread."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        call = self._loop.call_soon if threading.get_ident() == self._thread else self._loop.call_soon_threadsafe
        try:
            call(self._run)
        except RuntimeError:  # the loop is closed
            return

    def _run(self) -> None:
        self._is_scheduled = False  # before the news is taken: later news schedules another run
        begin = time.perf_counter()
        if self._news is None:
            if not self._has_more:
                self._pace.begin(begin)
            news = self.client.take_news()
            self.num_events += len(news.numbers)
            self._news, self._has_more = _rows(news), news.has_more
        parts, left, until = self._parts, NEWS_EACH_TURN, begin + _TURN_S
        look_at = left - _LOOK_EVERY
        for number, choice, ids, finish in self._news:
            part = parts.get(number)
            if part is not None:
                left -= 8 + len(ids) * part.weight
                try:
                    part.take(self.client, choice, ids, finish)
                except Exception as error:  # from one answer's text: the others get their news in this run
                    _fail(part.reply, error)
                self._touched[part.reply] = None
                if left <= look_at:
                    if left <= 0 or time.perf_counter() > until:
                        break
                    look_at = left - _LOOK_EVERY
            elif finish and (end := self._ends.pop(number, None)) is not None and not end.done():
                end.set_result(None)
        else:
            self._news = None
        if self._touched and not self._is_flushing:
            self._flush()
        if self._news is not None or self._has_more:
            self._receiver.pause()
            self._on_news()
            return
        if rest_s := self._pace.end(time.perf_counter()):
            self._receiver.rest(rest_s)
        else:
            self._receiver.resume()
        if self.client.error is not None:
            self.fail_all(self.client.error, time.monotonic())

    def _flush(self) -> None:
        """Write the parts of a limited number of replies. Between two turns the loop handles requests and health
        checks.

        Parts of streams are first made and then sent together, so that a process that reads several of them, such as a
        proxy, is not woken for each.
        """
        self._is_flushing = False
        now = time.monotonic()
        turn = list(itertools.islice(self._touched, _EACH_TURN))
        for reply in turn:
            del self._touched[reply]
            try:
                reply.flush(now)
            except Exception as error:  # as in _run()
                _fail(reply, error)
                reply.flush(now)
        for reply in turn:
            if reply.unsent is not None:
                try:
                    reply.send(now)
                except Exception as error:  # as in _run()
                    _fail(reply, error)
                    reply.flush(now)
        if self._touched:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def fail_all(self, error: Exception, now: float) -> None:
        """End all replies with this error. now: monotonic seconds."""
        for reply in list(self.replies):
            reply.fail(error)
            reply.flush(now)
        for end in self._ends.values():
            if not end.done():
                end.set_exception(error)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now = time.monotonic()
        for reply in list(self.replies):
            reply.tick(now)


def _rows(news: News) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield (number, choice, new tokens, finish) of each choice with news."""
    tokens, at = news.tokens.tolist(), 0
    for number, choice, count, finish in zip(
        news.numbers.tolist(), news.choices.tolist(), news.counts.tolist(), news.finish.tolist(), strict=True
    ):
        yield number, choice, tokens[at : at + count], finish
        at += count


def _start_late(reply: Reply) -> None:
    """Send the headers of a stream that has no news yet."""
    try:
        reply.start_late()
    except Exception as error:  # as in Pump._run()
        _fail(reply, error)
        reply.flush(time.monotonic())


def _fail(reply: Reply, error: Exception) -> None:
    """End a reply with an error raised while its own text was read or written."""
    _log.error("request %s failed", reply.request.id, exc_info=error)
    reply.fail(error)
