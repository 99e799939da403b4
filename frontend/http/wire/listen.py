"""Listening sockets: HOST:PORT or unix:PATH as text, and the socket bound to it."""

import contextlib
import os
import socket
import stat

from ipc.errors import AddressError

UNIX = "unix:"
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # milliseconds within which sent bytes must be acknowledged
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def parse_http_address(text: str, flag: str = "--http") -> tuple[str, int]:
    """Return (host, port) of "HOST:PORT", "[IPv6]:PORT", or a port on 127.0.0.1. Errors: AddressError, naming flag."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("http://").removeprefix("https://").removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise AddressError(f"{flag} must be HOST:PORT or a port, such as 127.0.0.1:8000; got {text!r:.80}")
    return host or "127.0.0.1", int(port)


def bind_http(text: str) -> socket.socket:
    """Return a socket bound to this address; accepted sockets inherit its options. Errors: AddressError."""
    if text.startswith(UNIX):
        return _bind_unix(text.removeprefix(UNIX))
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


def _bind_unix(path: str) -> socket.socket:
    """Return a socket bound to this file; the umask decides who may use it. Errors: AddressError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        bound.bind(path)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise AddressError(f"cannot listen at {path}: {error.strerror or error}") from None
    bound.setblocking(False)
    return bound


def _remove_dead(path: str) -> None:
    """Remove a socket file left by a killed server. Errors: OSError if one still listens there."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # bind() says that the path is in use
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def close_http(bound: socket.socket) -> None:
    """Refuse connections from now on, also in processes that have this socket, and remove the file of a unix socket."""
    with contextlib.suppress(OSError):  # it is closed already
        path = bound.getsockname() if bound.family == socket.AF_UNIX else None
        bound.shutdown(socket.SHUT_RDWR)
        if path:
            os.unlink(path)


def is_unix(text: str) -> bool:
    """Return whether this is the address of a file, which only programs on this machine can reach, and no browser."""
    return text.startswith(UNIX)


def is_loopback(text: str, flag: str = "--http") -> bool:
    """Return whether only this machine can reach this address. Errors: AddressError."""
    if is_unix(text):
        return True
    host, _ = parse_http_address(text, flag)
    return host in ("localhost", "::1") or host.startswith("127.")


def url_of(bound: socket.socket, *, has_tls: bool = False) -> str:
    """Return the URL of a bound socket; of a file unix:PATH."""
    if bound.family == socket.AF_UNIX:
        return f"{UNIX}{bound.getsockname()}"
    scheme = "https" if has_tls else "http"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
