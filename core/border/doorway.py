"""Doorway: limits connections, so that they stay below the process's limit of file descriptors.

libzmq 4.3.5 aborts the process if it accepts a connection on ipc and there is no file descriptor left. Its listener
cannot be stopped without closing the connections that it has accepted. So connections above the limit are cut as soon
as the monitor reports them. Their clients try again until others have left.
"""

import contextlib
import resource
import socket

import zmq

from core import log
from core.border.sessions import MAX_SESSIONS
from ipc.wire.sockets import Context, Socket

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
#: The most connections. Peers without a session, such as those refused one, count too.
MAX_CONNECTIONS = 2 * MAX_SESSIONS
#: The most monitor events that wait; then libzmq's thread waits and accepts no more. 1000 is libzmq's own limit.
_EVENTS_WAITING = 1000 + 1
#: Descriptors for everything else: files, libraries, libzmq's own, and connections that are accepted and not cut yet.
#: With a limit below twice this, connections are cut in time only if the thread that cuts them is not held up for long.
_RESERVE = _EVENTS_WAITING + 256


def monitor_of(context: Context, router: Socket) -> Socket:
    """Return a socket that receives EVENTS about the router's connections."""
    address = f"inproc://monitor-{id(router):x}"
    router.monitor(address, EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 1
    monitor.connect(address)
    return monitor


class Doorway:
    """The connections of one socket, as reported by its monitor. max_connections: the limit."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_cut = 0
        self._num_connections = 0

    def note(self, event: int, fd: int) -> None:
        """Handle a monitor event, one of EVENTS, for the connection with this descriptor."""
        if event == zmq.EVENT_DISCONNECTED:
            self._num_connections -= 1
            return
        self._num_connections += 1
        if self._num_connections > self.max_connections:
            if not self.num_cut:
                log.say(f"engine-core: the limit of {self.max_connections} connections is reached: more are cut")
            self.num_cut += 1
            _cut(fd)


def _cut(fd: int) -> None:
    """Shut a connection down; libzmq closes it. If it is already closed, its number can only belong to a later one."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


def max_connections() -> int:
    """Return how many connections the process's limit of file descriptors allows."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, limit - min(_RESERVE, limit // 2)))


def raise_descriptor_limit() -> None:
    """Raise the process's limit of file descriptors to the highest allowed; the usual default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
