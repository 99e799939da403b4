"""Kept, Run and Follower: a stored response, one that is computed in the background, and a reader of its events."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import EVENT_STREAM, json_bytes
from frontend.http.replies.reply import KEEP_ALIVE_S, STALL_S, Reply
from frontend.http.request import Request, WrittenAnswer
from frontend.http.stored.store import RUNNING, Content, Record, ResponseStore, Work

_EACH_WRITE = 64  # events
_NOT_EQUAL = "this answer was begun again, and did not repeat what was already sent"


class Kept:
    """One response that is stored. tenant: of its caller. previous: the id of the response that it continues.
    conversation: the id of the one that it belongs to.

    created: Unix seconds. most: bytes that its tenant may store. make_items: returns the items of its input, each with
    an id; called on the store's thread.
    """

    def __init__(
        self,
        store: ResponseStore,
        response_id: str,
        tenant: str,
        *,
        created: int,
        previous: str | None,
        conversation: str | None = None,
        most: int = 0,
        make_items: Callable[[], Sequence[Json]] = lambda: (),
    ) -> None:
        self.id, self.created, self.previous, self.conversation = response_id, created, previous, conversation
        self.run: Run | None = None  # if it is computed in the background
        self.tenant, self._store, self._make_items = tenant, store, make_items
        self._num_ids, self._most = 0, most

    def begin(self) -> None:
        """Draw the same ids again."""
        self._num_ids = 0

    def draw(self) -> str:
        """Return 32 hexadecimal digits. If the response is computed again, they are the same."""
        self._num_ids += 1
        return hashlib.blake2b(f"{self.id}:{self._num_ids}".encode(), digest_size=16).hexdigest()

    async def put(self, response: Json, work: Work | None = None) -> None:
        """Store the response. work: of one in the background, which has only begun. Errors: HttpError 500, 507."""
        status = response["status"] if work is None else RUNNING

        def make() -> Record:
            content = Content(
                json_bytes(self._make_items()), json_bytes(response), work, conversation=self.conversation
            )
            return Record(self.id, self.tenant, self.created, status, content, self.previous)

        await self._store.put(make, self._most)

    async def finish(self, response: Json, events: list[bytes]) -> None:
        """Store the end of a response in the background. Errors: HttpError 500, 507."""
        await self._store.finish(self.id, response["status"], lambda: json_bytes(response), events)


class Run:
    """The computation of one background response. kept: it. snapshot: its last state, for those who ask.

    events: of its stream, if the caller asked for one; each has its place as its number. If it is computed again, its
    events must be the same.
    """

    def __init__(self, kept: Kept, work: Work, snapshot: Json) -> None:
        self.kept, self.work, self.snapshot = kept, work, snapshot
        self.events: list[bytes] = []
        self.is_ended = False
        self.reply: Reply | None = None
        self.computed = asyncio.Event()  # the reply has ended
        self.news: set[asyncio.Event] = set()  # of those who follow it
        self.task: asyncio.Task[None] | None = None
        self._at = 0

    def begin(self) -> None:
        """Begin the events, maybe again."""
        self._at = 0
        self.kept.begin()

    def add(self, event: bytes) -> None:
        """Add the next event. Errors: HttpError 500 if another one was added in its place."""
        if not self.work.is_streamed:
            return
        if self._at < len(self.events):
            if self.events[self._at] != event:
                raise HttpError(500, _NOT_EQUAL)
        else:
            self.events.append(event)
            self._wake()
        self._at += 1

    async def finish(self, response: Json, make_event: Callable[[], bytes] | None = None) -> None:
        """Store the end, and then show it. make_event: makes the last event; None = there is none.

        Errors: HttpError 500, 507; then the run has not ended.
        """
        last = [make_event()] if make_event is not None and self.work.is_streamed else []
        await self.kept.finish(response, [*self.events[: self._at], *last])
        if not self.is_ended:
            self.snapshot = response
            self.events += last
            self.leave()

    def leave(self) -> None:
        """End those who follow this run."""
        self.is_ended = True
        self._wake()

    def _wake(self) -> None:
        for one in self.news:
            one.set()


class Runs:
    """The background responses of one server by id. find: returns the Service that answers a request."""

    find: Callable[[Request], Awaitable[Any]]

    def __init__(self) -> None:
        self.by_id: dict[str, Run] = {}
        self.keeper: asyncio.Task[None] | None = None  # of those that wait to be taken up

    def close(self) -> None:
        """Stop. The responses are taken up again by the next server, or by this one with another engine."""
        if self.keeper is not None:
            self.keeper.cancel()
        for run in list(self.by_id.values()):
            if run.task is not None:
                run.task.cancel()
            run.leave()
        self.by_id.clear()


class Follower(WrittenAnswer):
    """A stream of the events of a run. begin: number of the first one. on_end: called when it has ended."""

    def __init__(self, request: Request, events: Run, begin: int, on_end: Callable[[], None]) -> None:
        self._request, self._run, self._at, self._on_end = request, events, begin, on_end
        self._news = asyncio.Event()

    async def write(self) -> None:
        """Write the events until the run has ended or the peer has left."""
        exchange, run = self._request.exchange, self._run
        exchange.on_left = exchange.on_writable = self._news.set
        run.news.add(self._news)
        fields = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        exchange.begin([*fields, *self._request.answer_headers])
        is_full = exchange.write(b"")
        try:
            while not exchange.has_left:
                self._news.clear()
                if not is_full and self._at < len(run.events):
                    part = run.events[self._at : self._at + _EACH_WRITE]
                    self._at += len(part)
                    exchange.on_writable = self._news.set
                    is_full = exchange.write(b"".join(part))
                elif not is_full and run.is_ended:
                    break
                elif await self._has_news(STALL_S if is_full else KEEP_ALIVE_S):
                    is_full = False
                elif is_full:
                    exchange.abort()
                    return
                else:
                    is_full = exchange.write(b": keep-alive\n\n")
            if not exchange.has_left:
                exchange.end(b"")
        finally:
            run.news.discard(self._news)
            exchange.on_left = exchange.on_writable = None
            self._on_end()

    async def _has_news(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True
