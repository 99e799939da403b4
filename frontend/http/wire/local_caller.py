"""LocalCaller: calls the routes of an App in the same process, without a socket."""

import asyncio
from typing import NamedTuple

from frontend.http.app import App
from frontend.http.wire.exchange import Message, NoWire
from frontend.http.wire.held_bodies import HeldBodies, HeldBody


class LocalAnswer(NamedTuple):
    """One answer. headers: names in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class LocalCaller:
    """Calls one App, whose answers are the same as over HTTP."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._bodies = HeldBodies(1 << 62)

    async def post(self, path: str, body: bytes) -> LocalAnswer:
        """Return the answer to a POST of JSON."""
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
            await self._app(self._scope(path, wire), receive, send)
        except asyncio.CancelledError:
            if wire.exchange is not None:
                wire.exchange.leave()
            raise
        return LocalAnswer(status, fields, b"".join(parts))

    def _scope(self, path: str, wire: NoWire) -> Message:
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "state": {"wire": wire, "body": HeldBody(self._bodies, lambda error: None)},
        }
