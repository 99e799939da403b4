"""Carrier: moves bytes between local descriptors and streams that end on other machines.

A stream carries the bytes of one socket pair, and the process at the other end cannot tell it from a local one. On the
network it consists of pieces with a stream number, in order.
"""

import select
import socket
from collections import deque

_READ_BYTES = 1 << 18


class Carrier:
    """The forwarded descriptors by stream. It owns them, and is used by one thread.

    poller: watches them for the thread. What cannot be written at once waits here; it is limited by what the steps in
    flight send.
    """

    def __init__(self, poller: select.poll, carried: dict[int, int]) -> None:
        self._poller = poller
        self._ends = {stream: socket.socket(fileno=fd) for stream, fd in carried.items()}
        self._streams = {end.fileno(): stream for stream, end in self._ends.items()}
        self._waiting: dict[int, deque[memoryview]] = {}
        for end in self._ends.values():
            end.setblocking(False)
            poller.register(end, select.POLLIN)

    def __contains__(self, fd: int) -> bool:
        """Return whether this descriptor is one of them."""
        return fd in self._streams

    def has(self, stream: int) -> bool:
        """Return whether a stream ends here."""
        return stream in self._ends

    def read(self, fd: int, events: int) -> tuple[int, bytes]:
        """Handle a ready descriptor. Return (stream, bytes read); no bytes if there were none."""
        stream = self._streams[fd]
        if events & select.POLLOUT:
            self._write(stream)
        return stream, self.take(stream) if events & ~select.POLLOUT and stream in self._ends else b""

    def take(self, stream: int) -> bytes:
        """Return the bytes that a descriptor has now, if any."""
        try:
            data = self._ends[stream].recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:  # its process is gone, which is reported elsewhere
            self._drop(stream)
        return data

    def write(self, stream: int, data: memoryview) -> None:
        """Write a piece of a stream now, or when its end accepts it. If the end is gone, drop it."""
        if stream not in self._ends:
            return
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = self._waiting[stream] = deque()
            waiting.append(data)
            self._write(stream)
        else:
            waiting.append(data)

    def _write(self, stream: int) -> None:
        end, waiting = self._ends[stream], self._waiting.get(stream, deque[memoryview]())
        try:
            while waiting:
                count = end.send(waiting[0], socket.MSG_NOSIGNAL)
                if count == len(waiting[0]):
                    waiting.popleft()
                else:
                    waiting[0] = waiting[0][count:]
        except BlockingIOError:
            self._poller.modify(end, select.POLLIN | select.POLLOUT)
            return
        except OSError:
            self._drop(stream)
            return
        self._poller.modify(end, select.POLLIN)
        self._waiting.pop(stream, None)

    def _drop(self, stream: int) -> None:
        end = self._ends.pop(stream)
        self._poller.unregister(end)
        del self._streams[end.fileno()]
        self._waiting.pop(stream, None)
        end.close()

    def close(self) -> None:
        """Close all descriptors. The processes at the other ends notice that."""
        for stream in list(self._ends):
            self._drop(stream)
