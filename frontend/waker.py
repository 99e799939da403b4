"""Waker: wakes the iterators of an event loop when their requests have news."""

import asyncio
import threading

from frontend.client.client import EngineClient


class Waker:
    """Wakes iterators of the event loop when their requests have news: one callback per received batch.

    The client holds a reference to it, so it must not refer to the AsyncLLM, which could never be collected then.
    """

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._client = client
        self._news: dict[int, asyncio.Event] = {}
        self._scheduled = threading.Event()
        client.add_listener(self._on_news)

    def register(self, number: int) -> asyncio.Event:
        """Return the event that is set when the request has news. Called in the loop, so no news is missed."""
        event = self._news[number] = asyncio.Event()
        return event

    def forget(self, number: int) -> None:
        """Drop the event of a request that has no iterator any more."""
        self._news.pop(number, None)

    def move(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on in another loop, where the old one is closed. Called in the new one. What waited there never runs."""
        self._news.clear()
        self.loop = loop  # before the flag: what comes later is for the new loop
        self._scheduled.clear()
        loop.call_soon(self._wake)

    def _on_news(self) -> None:
        """Schedule _wake() in the loop, unless it is scheduled. Called by the client's IO thread."""
        if self._scheduled.is_set():
            return
        self._scheduled.set()
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed, so there is no iterator to wake
            self._scheduled.clear()

    def _wake(self) -> None:
        self._scheduled.clear()
        numbers = self._client.take_ready().tolist()
        for number in self._news if self._client.error is not None else numbers:
            if number in self._news:
                self._news[number].set()
