"""LocalCaller: calls the routes of an App in the same process, without a socket."""

import asyncio
from collections.abc import Awaitable, Callable

from frontend.http.callers.keys import Key
from frontend.http.request import LocalAnswer
from frontend.http.wire.exchange import Message, NoWire, Receive, Send
from frontend.http.wire.held_bodies import HeldBodies, HeldBody


class LocalCaller:
    """Calls one App, whose answers are the same as over HTTP."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._bodies = HeldBodies(1 << 62)

    async def post(
        self, path: str, body: bytes, *, key: Key | None = None, request_id: str | None = None
    ) -> LocalAnswer:
        """Return the answer to a POST of JSON. key: of the caller, if the server has keys. request_id: None = a new
        one.
        """
        wire, status, fields, parts = NoWire(), 0, dict[bytes, bytes](), list[bytes]()
        ended, is_read = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, fields
            if message["type"] == "http.response.start":
                status, fields = message["status"], dict(message["headers"])
                return
            parts.append(message["body"])
            if not message["more_body"]:
                ended.set()

        try:
            await self._app(self._scope(path, wire, key, request_id), receive, send)
        except asyncio.CancelledError:
            if wire.exchange is not None:
                wire.exchange.leave()
            raise
        return LocalAnswer(status, fields, b"".join(parts))

    def _scope(self, path: str, wire: NoWire, key: Key | None, request_id: str | None) -> Message:
        named = [] if request_id is None else [(b"x-request-id", request_id.encode())]
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *named],
            "client": None,
            "state": {"wire": wire, "body": HeldBody(self._bodies, lambda error: None), "key": key},
        }
