"""Listening sockets: HOST:PORT as text, and the socket bound to it."""

import socket

from ipc.errors import AddressError

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # milliseconds in which sent bytes must be confirmed
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def parse_http_address(text: str) -> tuple[str, int]:
    """Return (host, port) of "HOST:PORT", "[IPv6]:PORT", or a port on 127.0.0.1. Errors: AddressError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("http://").removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise AddressError(f"--http takes HOST:PORT or a port, such as 127.0.0.1:8000; got {text!r:.80}")
    return host or "127.0.0.1", int(port)


def bind_http(text: str) -> socket.socket:
    """Return a socket bound to this address; accepted sockets inherit its options. Errors: AddressError."""
    host, port = parse_http_address(text)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressError(f"cannot listen at {text}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, name, value in _KEEPALIVE:
            bound.setsockopt(level, name, value)
        bound.bind(address)
        bound.listen(2048)  # a second server at this address fails here, by name
    except OSError as error:
        bound.close()
        raise AddressError(f"cannot listen at {text}: {error.strerror or error}") from None
    bound.setblocking(False)
    return bound


def is_loopback(text: str) -> bool:
    """Return whether only this machine can reach this address. Errors: AddressError."""
    host, _ = parse_http_address(text)
    return host in ("localhost", "::1") or host.startswith("127.")


def url_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
