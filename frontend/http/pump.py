"""Pump: the one consumer of the engine's news in a process, which feeds all replies.

The client's IO thread schedules one run in the event loop for each batch that it received. A run takes all news as
columns and calls into Python once for each choice; there is no task, queue or timer for a reply.
"""

import asyncio
import threading
import time
from collections.abc import Sequence

from frontend.client.client import EngineClient
from frontend.http.reply import HEAD_S, Part, Reply
from frontend.results.request_state import RequestState
from ipc.sampling_params import SamplingParams

_TICK_S = 1.0


class Pump:
    """Feeder of all replies of one client. It is made in the event loop that it runs in."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.replies: dict[Reply, None] = {}
        self.num_events = 0  # choices that had news, since the start
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, Part] = {}
        self._scheduled = threading.Event()
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        client.add_listener(self._on_news)

    def close(self) -> None:
        """End what runs by itself."""
        self._timer.cancel()

    def add(self, reply: Reply, states: Sequence[tuple[RequestState, SamplingParams]]) -> None:
        """Feed this reply with the news of these requests, which were just submitted."""
        for part in reply.attach(self, states):
            self._parts[part.state.number] = part
        self.replies[reply] = None
        if reply.is_streamed:
            self._loop.call_later(HEAD_S, reply.start_late)
        self._on_news()  # for what came before

    def remove(self, reply: Reply) -> None:
        """Forget an ended reply, and its requests."""
        self.replies.pop(reply, None)
        numbers = [part.state.number for part in reply.parts]
        for number in numbers:
            del self._parts[number]
        self.client.discard(numbers)

    def wake(self) -> None:
        """Look for news of replies that were on hold."""
        self._on_news()

    def _on_news(self) -> None:
        """Schedule a run, unless one is scheduled. Called by the client's IO thread too."""
        if self._scheduled.is_set():
            return
        self._scheduled.set()
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop is closed
            return

    def _run(self) -> None:
        self._scheduled.clear()
        now = time.monotonic()
        news = self.client.take_news()
        tokens, parts = news.tokens.tolist(), self._parts
        touched: dict[Reply, None] = {}
        self.num_events += len(news.numbers)
        at = 0
        for number, choice, count, finish in zip(
            news.numbers.tolist(), news.choices.tolist(), news.counts.tolist(), news.finish.tolist(), strict=True
        ):
            ids = tokens[at : at + count]
            at += count
            part = parts.get(number)
            if part is not None:
                part.take(self.client, choice, ids, finish)
                touched[part.reply] = None
        for reply in touched:
            reply.flush(now)
        if self.client.error is not None:
            self.fail_all(self.client.error, now)

    def fail_all(self, error: Exception, now: float) -> None:
        """End all replies with this error. now: monotonic seconds."""
        for reply in list(self.replies):
            reply.fail(error)
            reply.flush(now)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now = time.monotonic()
        for reply in list(self.replies):
            reply.tick(now)
