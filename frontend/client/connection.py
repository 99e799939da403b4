"""Connection: a client's socket to an engine, and the monitor that tells when the engine has closed it."""

from typing import NamedTuple

import zmq

from ipc.wire.sockets import READABLE, Context, connect_dealer, pending_events

#: Most frames received in one batch, so that a slow reader still looks at its other file descriptors.
MAX_BATCH = 256


class Connection(NamedTuple):
    """See the module's docstring."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_s: float) -> None:
        """Close both; linger_s: seconds for what waits to be sent."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))


def connect(context: Context, address: str) -> Connection:
    """Connect a DEALER socket and its monitor. Errors: AddressError."""
    socket = connect_dealer(context, address)
    return Connection(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))


def receive_batch(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames that have arrived, at most MAX_BATCH.

    With fewer, the socket was seen to have no more: its file descriptor signals the next one.
    """
    frames: list[bytes] = []
    while len(frames) < MAX_BATCH and pending_events(socket) & READABLE:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames
