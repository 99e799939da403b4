"""SendQueue: frames that wait to be sent to an engine, and their number of bytes."""

from collections import deque

import zmq

from ipc.errors import RequestFailedError
from ipc.wire.sockets import Socket

#: Most bytes that may wait for an engine that does not read; further frames are refused.
MAX_QUEUED_BYTES = 64 << 20


class SendQueue:
    """Frames in order. Senders call check() and put(), one at a time; the owner of the socket calls flush()."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes_queued = 0  # in total; written by senders only
        self._bytes_sent = 0  # in total; written by the owner of the socket only

    def __len__(self) -> int:
        return len(self._frames)

    def check(self, frame: bytes, address: str) -> None:
        """Check that one more frame may wait. Errors: RequestFailedError."""
        waiting = self._bytes_queued - self._bytes_sent
        if waiting + len(frame) > MAX_QUEUED_BYTES:
            raise RequestFailedError(
                f"the engine at {address} does not read: {waiting} bytes wait to be sent, the limit is "
                f"{MAX_QUEUED_BYTES}; submit fewer requests at once"
            )

    def put(self, frame: bytes) -> None:
        """Add a frame."""
        self._frames.append(frame)
        self._bytes_queued += len(frame)

    def flush(self, socket: Socket) -> bool:
        """Send what the socket accepts; return False if it accepts no more now."""
        while self._frames:
            try:
                socket.send(self._frames[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._bytes_sent += len(self._frames.popleft())
        return True

    def restart(self, hello: bytes) -> None:
        """Drop all frames except this one, with which the next connection starts. No sender may flush at that time."""
        while self._frames:
            self._bytes_sent += len(self._frames.popleft())
        self._frames.append(hello)
        self._bytes_sent -= len(hello)
