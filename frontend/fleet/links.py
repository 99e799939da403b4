"""Links: the sockets of a fleet to its replicas, for one thread at a time; none of its methods waits.

A replica that dies is noticed when the system closes its connection. One whose machine disappears, or whose process is
stopped, is noticed by the silence of its libzmq.
"""

import select
from collections import deque

import zmq

from ipc.wire.sockets import READABLE, Context, Socket, connect_dealer, pending_events, receive_event, signal_fd

SILENCE_MS = 2000
_MAX_RECONNECT_MS = 320
#: Most bytes that wait for a replica that does not read; beyond them its connection is closed.
MAX_QUEUED_BYTES = 64 << 20
_MAX_BATCH = 64  # most frames of one replica that are read before those of the others

Arrived = list[tuple[int, bytes | None]]  # (row of the replica, frame); None: its connection has ended


class _Link:
    """One connection."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = connect_dealer(context, address, _listen_for_silence)
        self.monitor: Socket = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.fd, self.monitor_fd = signal_fd(self.socket), signal_fd(self.monitor)
        self.unsent: deque[bytes] = deque()
        self.num_unsent_bytes = 0

    def send(self, frame: bytes) -> bool:
        """Send a frame, or queue it; return False if too much waits."""
        if not self.unsent:
            try:
                self.socket.send(frame, zmq.NOBLOCK)
                return True
            except zmq.Again:
                pass
        self.unsent.append(frame)
        self.num_unsent_bytes += len(frame)
        return self.num_unsent_bytes <= MAX_QUEUED_BYTES

    def flush(self) -> None:
        while self.unsent:
            try:
                self.socket.send(self.unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_unsent_bytes -= len(self.unsent.popleft())

    def read(self) -> list[bytes]:
        frames: list[bytes] = []
        while len(frames) < _MAX_BATCH and pending_events(self.socket) & READABLE:
            frames.append(self.socket.recv(zmq.NOBLOCK))
        return frames

    def has_ended(self) -> bool:
        ended = False
        while pending_events(self.monitor) & READABLE:
            receive_event(self.monitor)
            ended = True
        return ended

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def _listen_for_silence(socket: Socket) -> None:
    """Count a peer as disconnected if its libzmq does not answer; connect less often if nothing listens."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, SILENCE_MS // 4)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)


class Links:
    """The connections, by the rows of their replicas. fd: readable when there may be something to receive."""

    def __init__(self) -> None:
        self._context: Context = zmq.Context()
        self._links: dict[int, _Link] = {}
        self._row_of: dict[int, int] = {}  # by the file descriptor of the socket
        self._monitored: dict[int, int] = {}  # row by the file descriptor of the socket's monitor
        self._unread: dict[int, None] = {}  # rows of sockets that may have something without a signal at their fd
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()

    @property
    def has_unread(self) -> bool:
        """Return whether there may be something to receive that `fd` does not signal."""
        return bool(self._unread)

    def open(self, row: int, address: str, hello: bytes) -> None:
        """Connect, in the background, and send this first. Errors: AddressError."""
        self.close(row)
        link = self._links[row] = _Link(self._context, address)
        self._row_of[link.fd] = self._monitored[link.monitor_fd] = row
        for fd in (link.fd, link.monitor_fd):
            self._epoll.register(fd, select.EPOLLIN)
        self._unread[row] = None  # reading its events for the first time arms the file descriptor
        link.send(hello)

    def send(self, row: int, frame: bytes) -> bool:
        """Send a frame; return False if the replica does not read and too much waits."""
        link = self._links.get(row)
        if link is None:
            return True
        is_taken = link.send(frame)
        if pending_events(link.socket) & READABLE:
            self._unread[row] = None
        return is_taken

    def close(self, row: int) -> None:
        """End a connection; do nothing if there is none."""
        link = self._links.pop(row, None)
        self._unread.pop(row, None)
        if link is not None:
            for fd in (link.fd, link.monitor_fd):
                self._epoll.unregister(fd)
            del self._row_of[link.fd], self._monitored[link.monitor_fd]
            link.close()

    def receive(self) -> Arrived:
        """Return what has arrived, in order for each replica; the end of a connection comes last."""
        looks = dict.fromkeys(self._unread, True)  # row: whether its monitor has been read; it signals nothing before
        for fd, _ in self._epoll.poll(0):
            if (row := self._row_of.get(fd)) is not None:
                looks.setdefault(row, False)
            else:
                looks[self._monitored[fd]] = True
        self._unread = {}
        arrived: Arrived = []
        for row, is_monitor_due in looks.items():
            link = self._links.get(row)
            if link is None:
                continue
            has_ended = is_monitor_due and link.has_ended()
            frames = link.read()
            if link.unsent:
                link.flush()
            arrived += [(row, frame) for frame in frames]
            if has_ended and len(frames) == _MAX_BATCH:
                while frames := link.read():  # its last frames
                    arrived += [(row, frame) for frame in frames]
            if has_ended:
                arrived.append((row, None))
                self.close(row)
            elif (link.unsent or len(frames) == _MAX_BATCH) and pending_events(link.socket) & READABLE:
                self._unread[row] = None
        return arrived

    def end(self) -> None:
        """Close everything."""
        for row in list(self._links):
            self.close(row)
        self._epoll.close()
        self._context.term()
