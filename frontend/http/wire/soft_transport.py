"""SoftTransport: a connection whose close() lets the peer read the last answer.

Closing a connection while its peer still sends resets it, so the peer may lose data that it has not read yet. So the
sending side is closed first, and HttpProtocol.sweep() closes the rest.
"""

import asyncio
from collections.abc import Callable
from typing import Any

_JOINED_BYTES = 64 << 10  # that are copied rather than sent in two pieces


class SoftTransport:
    """A transport with another close(). on_close: called at the first close(); returns whether the peer still sends."""

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], bool]) -> None:
        self._transport = transport
        self._on_close: Callable[[], bool] | None = on_close
        self._kept: list[bytes] = []  # while it is corked
        self.write: Callable[[bytes], None] = transport.write
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def cork(self) -> None:
        """Keep what is written until uncork(), or the end."""
        self.write = self._kept.append

    def uncork(self) -> None:
        """Write what was kept: in one piece, unless it is long."""
        self.write = self._transport.write
        kept, self._kept = self._kept, []
        if sum(map(len, kept)) <= _JOINED_BYTES:
            kept = [b"".join(kept)] if kept else kept
        for part in kept:
            self.write(part)

    def is_closing(self) -> bool:
        """Return whether nothing more will be written."""
        return self._on_close is None or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after the written data; only its sending side if the peer still sends."""
        on_close, self._on_close = self._on_close, None
        if on_close is None or self._transport.is_closing():
            return
        self.uncork()
        if on_close() and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def forget(self) -> None:
        """Release the owner once the connection has ended."""
        self._on_close = None
