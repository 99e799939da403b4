"""Wire: a relay between a connector and its server (TCP) that can refuse, cut, silence or damage the connection."""

import enum
import os
import select
import socket
import threading

from ipc.errors import ConfigError

_CONNECT_S = 2.0
_READ_BYTES = 1 << 16
_CUT_AFTER = 5_000  # bytes of a reply


class Fault(enum.Enum):
    """What is wrong with the wire."""

    DEAD = "dead server"  # connections are refused, and those that exist end
    SILENT = "silent server"  # connections are accepted, and nothing comes
    CUT = "connection cut"  # connections end in the middle of a reply
    DAMAGED = "damaged reply"  # one byte of each piece of a reply is changed
    SHORT = "reply in pieces"  # a byte at first, then the rest


class Wire:
    """The relay, with a thread of its own, until its context ends. fault: may be changed at any time.

    server: HOST:PORT. Errors: ConfigError if nothing answers there.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--server-option must name an option with HOST:PORT; its value is {server!r:.80}")
        self._server = host.strip("[]"), int(port)
        try:
            socket.create_connection(self._server, _CONNECT_S).close()
        except OSError as error:
            raise ConfigError(f"there is no server at {server}: {error}") from error
        self.fault: Fault | None = None
        self._listener = self._listen(0)
        self._port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._to_server: set[socket.socket] = set()
        self._counts: dict[socket.socket, int] = {}
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def __enter__(self) -> "Wire":
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)

    @staticmethod
    def _listen(port: int) -> socket.socket:
        return socket.create_server(("127.0.0.1", port), reuse_port=False)

    def _run(self) -> None:
        while True:
            watched: list[int | socket.socket] = [self._end, self._listener, *self._pairs]
            ready, _, _ = select.select(watched, [], [], 0.02)
            if self._end in ready:
                break
            if self.fault is Fault.DEAD:
                self._drop_all()
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif isinstance(one, socket.socket) and one in self._pairs:
                    self._forward(one)
        self._drop_all()
        self._listener.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.fault is Fault.DEAD:
            client.close()
            return
        try:
            server = socket.create_connection(self._server, _CONNECT_S)
        except OSError:
            client.close()
            return
        self._pairs |= {client: server, server: client}
        self._to_server.add(server)
        self._counts[server] = 0

    def _forward(self, one: socket.socket) -> None:
        other = self._pairs[one]
        try:
            data = one.recv(_READ_BYTES)
            if data and self.fault is Fault.SILENT:
                return  # it is lost
            if data and one in self._to_server:
                data = self._spoiled(one, data)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass  # an end is gone: so goes the other
        self._drop(one)

    def _spoiled(self, server: socket.socket, data: bytes) -> bytes:
        """Return what comes of a reply; nothing: the connection ends."""
        if self.fault is Fault.DAMAGED:
            at = len(data) // 2
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if self.fault is Fault.CUT:
            self._counts[server] += len(data)
            return b"" if self._counts[server] > _CUT_AFTER else data
        if self.fault is Fault.SHORT and len(data) > 1:
            self._pairs[server].sendall(data[:1])
            return data[1:]
        return data

    def _drop(self, one: socket.socket) -> None:
        other = self._pairs.pop(one)
        del self._pairs[other]
        for end in (one, other):
            self._to_server.discard(end)
            self._counts.pop(end, None)
            end.close()

    def _drop_all(self) -> None:
        while self._pairs:
            self._drop(next(iter(self._pairs)))
