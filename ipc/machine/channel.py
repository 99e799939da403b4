"""Channel: frames over a stream socket between an engine and one of its processes: a uint32 length and a message.

The socket also shows whether the other process is alive: its end means that the process is gone.
"""

import select
import socket
import struct

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class ChannelEndedError(Exception):
    """The other process is gone, or has closed its end."""


class Channel:
    """One end of a socket pair; it owns the socket. Each of its methods is for one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._poller = select.poll()
        self._poller.register(end, select.POLLIN | select.POLLOUT)
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        """Send one message. While the other end does not read it, messages from there are received and kept.

        So two processes that send large messages to each other at the same time do not deadlock.
        Errors: ChannelEndedError.
        """
        assert len(message) <= MAX_FRAME_BYTES, f"a message of {len(message)} bytes"
        data = memoryview(_LENGTH.pack(len(message)) + message)
        try:
            while data:
                try:
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    if any(events & select.POLLIN for _, events in self._poller.poll()):
                        self._read()
        except OSError as error:
            raise ChannelEndedError(str(error)) from error

    def receive(self) -> bytes:
        """Wait for the next message and return it. Errors: ChannelEndedError."""
        while (message := self._take()) is None:
            try:
                self._read()
            except OSError as error:
                raise ChannelEndedError(str(error)) from error
        return message

    @property
    def has_frame(self) -> bool:
        """Return whether a message, or a part of one, has arrived."""
        if self._received:
            return True
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _read(self) -> None:
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ChannelEndedError("the other end is closed")
        self._received += data

    def _take(self) -> bytes | None:
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return None
        message = bytes(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return message
