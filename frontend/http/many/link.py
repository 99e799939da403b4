"""HostLink: the HTTP worker's connection to the host of the models."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from frontend.http.errors import HttpError
from frontend.http.many.messages import (
    MAX_CHANGE_BYTES,
    MAX_LINE_BYTES,
    Change,
    Known,
    News,
    Progress,
    ToHost,
    ToWorker,
)

_decoder = msgspec.json.Decoder(ToWorker)
_encode = msgspec.json.Encoder().encode


class HostLink:
    """See the module's docstring. known: the models when it was opened. In one event loop.

    on_message: called with each later message, except the steps of changes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Known) -> None:
        self.known = known
        self.on_message: Callable[[News], None] = lambda message: None
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._changes: dict[int, asyncio.Queue[Progress]] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: str) -> "HostLink":
        """Return the connection to the host at this socket. Errors: OSError."""
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        known = _decoder.decode(await reader.readline())
        assert isinstance(known, Known), known
        return cls(reader, writer, known)

    def start(self) -> None:
        """Begin to call on_message."""
        self._task = asyncio.get_running_loop().create_task(self._read())

    def send(self, message: ToHost) -> None:
        """Send a message, without waiting."""
        if not self._writer.is_closing():
            self._writer.write(_encode(message) + b"\n")

    async def change(self, kind: Any, name: str, source: str = "", **options: Any) -> AsyncIterator[Progress]:
        """Change the models, and yield each step. The last one is final, and may be an error.

        Errors: HttpError 413 for a change with too much text.
        """
        number = next(self._numbers)
        change = Change(number, kind, name, source, options)
        if (size := len(_encode(change))) > MAX_CHANGE_BYTES:
            text = f"a model that is created may have {MAX_CHANGE_BYTES} bytes of text; this one has {size}"
            raise HttpError(413, text)
        steps = self._changes[number] = asyncio.Queue()
        self.send(change)
        try:
            while True:
                step = await steps.get()
                yield step
                if step.is_final:
                    return
        finally:
            del self._changes[number]

    def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        while line := await self._reader.readline():
            message = _decoder.decode(line)
            if isinstance(message, Progress):
                if (steps := self._changes.get(message.id)) is not None:
                    steps.put_nowait(message)
            else:
                self.on_message(message)
