"""Carrier: moves bytes between descriptors of this machine and streams that end on other machines.

A stream is the bytes of one socket pair, of which the process at the other end knows no more than of one within the
machine. Who carries them over the network sees pieces with a stream's number, in order.
"""

import select
import socket
from collections import deque

_READ_BYTES = 1 << 18


class Carrier:
    """The descriptors that are carried, by their streams, for one thread. It owns them.

    poller: watches them for the thread. What cannot be written at once waits here: it is no more than what the steps
    in flight say.
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
        """Return whether this descriptor is one of these."""
        return fd in self._streams

    def has(self, stream: int) -> bool:
        """Return whether a stream ends here."""
        return stream in self._ends

    def read(self, fd: int, events: int) -> tuple[int, bytes]:
        """Do what a descriptor is ready for; return (stream, bytes that it has), none where it has none."""
        stream = self._streams[fd]
        if events & select.POLLOUT:
            self._write(stream)
        return stream, self.take(stream) if events & ~select.POLLOUT and stream in self._ends else b""

    def take(self, stream: int) -> bytes:
        """Return what a descriptor has now; none where it has none."""
        try:
            data = self._ends[stream].recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:  # its process is gone; others tell of that
            self._drop(stream)
        return data

    def write(self, stream: int, data: memoryview) -> None:
        """Write a piece of a stream, now or when its end takes it; nothing where that is gone."""
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
        """Close all descriptors: the processes at their other ends see that."""
        for stream in list(self._ends):
            self._drop(stream)
