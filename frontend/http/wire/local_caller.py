"""LocalCaller: calls the routes of an App within its own process, without a socket."""

import asyncio
from typing import NamedTuple

from frontend.http.app import App
from frontend.http.errors import Headers, HttpError
from frontend.http.request import Request
from frontend.http.wire.exchange import Exchange
from frontend.http.wire.head import Heads


class LocalAnswer(NamedTuple):
    """One answer. headers: names in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class LocalExchange(Exchange):
    """An exchange that keeps the answer; it is its own wire, which is never full."""

    is_full = False

    def __init__(self) -> None:
        super().__init__(self, is_head=False, is_http_1_0=False, keep_alive=True)
        self.heads = Heads()
        self.done = asyncio.Event()
        self._status, self._fields = 200, dict[bytes, bytes]()
        self._parts: list[bytes] = []

    @property
    def answer(self) -> LocalAnswer:
        """Return what was written."""
        return LocalAnswer(self._status, self._fields, b"".join(self._parts))

    def write_whole(self, status: int, fields: Headers, body: bytes) -> None:
        """Take a whole answer."""
        self._status, self._fields = status, dict(fields)
        self.end(body)

    def begin(self, fields: Headers) -> None:
        """Take the head of a stream."""
        self._fields = dict(fields)

    def write(self, part: bytes) -> bool:
        """Take a part of a stream."""
        self._parts.append(part)
        return False

    def end(self, part: bytes) -> None:
        """Take the last part."""
        self._parts.append(part)
        self.is_complete = True
        self.done.set()

    def send(self, data: bytes) -> None:
        """Take nothing: parts are taken unframed."""

    def complete(self, exchange: Exchange) -> None:
        """Do nothing: no other request follows."""

    def abort(self) -> None:
        """End the answer."""
        self.done.set()


class LocalCaller:
    """Calls one App. What it answers is what it answers over HTTP."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def post(self, path: str, body: bytes) -> LocalAnswer:
        """Return the answer to a POST of JSON."""
        exchange = LocalExchange()
        headers = {b"content-type": b"application/json"}
        request = Request("POST", path, path.encode(), b"", headers, exchange, num_hosts=0)
        request.parts.append(body)
        try:
            self._app.judge(request)
        except HttpError as error:
            request.refusal = error
        self._app.answer(request)
        try:
            await exchange.done.wait()
        except asyncio.CancelledError:
            exchange.leave()
            raise
        return exchange.answer
