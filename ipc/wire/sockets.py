"""The two ends of the border: the engine's bound ROUTER and a client's connected DEALER, with every option set.

libzmq facts behind the options (measured on 4.3.5): a second bind on a live ipc path succeeds and takes its clients, so
there is a lock file; a ROUTER without MANDATORY drops silently; MAXMSGSIZE limits one frame, not a message; HANDOVER
gives one peer's replies to another that claims its identity; the ipc file stays after a close.
"""

import contextlib
import fcntl
import ipaddress
import os
import re
import socket as sockets
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from ipc.errors import AddressError, EngineDeadError
from ipc.keys.curve import use_as_client, use_as_engine
from ipc.wire.messages import MAX_CLIENT_MESSAGE_BYTES, MAX_SERVER_MESSAGE_BYTES

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

HIGH_WATER_MARK = 1000  # messages per peer and direction; beyond it a send answers EAGAIN
ROUTER_HIGH_WATER_MARK = 256  # of the engine's sends; further messages wait in the backlog, which merges them
ROUTER_RECEIVE_MARK = 16  # messages of one peer that libzmq holds unread: at most 128 MiB
#: Of pending_events(). With zmq's own enumerations each `&` takes 2.7 us.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
HANDSHAKE_MS = 2000
ROUTER_LINGER_MS = 500  # time to send the last messages of an engine that ends
DEALER_LINGER_MS = 100
#: Between attempts to connect, up to twice this. libzmq's default of 100 ms was a sixth of a restart's pause.
RECONNECT_MS = 20
_MONITOR_EVENT = struct.Struct("=hi")  # as libzmq documents it
MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un is 108 with its NUL
PRIVATE_PREFIX = "engine-core-"
_PRIVATE_SOCKET = "engine.sock"
_MADE = re.compile(rf"/{PRIVATE_PREFIX}[a-z0-9_]{{8}}/[^/]*$")  # a path in a directory that private_ipc_address() made
#: Age at which an address whose lock is not held is stale: longer than a start may take (--start-timeout, 300 s).
_SWEEP_AGE_S = 600.0
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})(\?keys=(?P<keys>.+))?")


@dataclass
class BoundRouter:
    """A ROUTER that owns its address.

    Only the thread that uses the socket may call `close`; any thread may call `remove_files`.
    """

    socket: Socket
    address: str  # the actual address: port 0 is replaced by the assigned port
    lock_fd: int | None = field(default=None, repr=False)  # flock on PATH.lock for ipc; None for tcp
    is_private: bool = False  # of `private_ipc_address`: its directory is removed with it

    def close(self, linger_ms: int = ROUTER_LINGER_MS) -> None:
        """Close the socket, remove its files and release the lock. linger_ms: time to send what is queued."""
        self.socket.close(linger_ms)
        self.remove_files()
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None

    def remove_files(self) -> None:
        """Remove the socket file and its lock. Remove their directory if it was created for this socket."""
        if self.lock_fd is not None:
            _remove_files(ipc_path(self.address))
            if self.is_private:
                _remove_directory(self.address)


def bind_router(
    context: Context, address: str, *, is_private: bool = False, prepare: Callable[[Socket], None] = lambda _: None
) -> BoundRouter:
    """Return a ROUTER bound to `ipc:///absolute/path` or `tcp://host:port[?keys=folder]` (port 0 = any free one).

    is_private: it is from `private_ipc_address`; its directory is removed with it. prepare: sets further options.
    Errors: AddressError if the address is malformed, too long, open to the network, or in use by a live process.
    """
    check_address(address, binding=True)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"engine-core")  # core/border/zap.py answers; also ends the downgrade to ZMTP/1.0
    _set_common_options(socket, MAX_CLIENT_MESSAGE_BYTES, ROUTER_LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, ROUTER_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, ROUTER_RECEIVE_MARK)
    prepare(socket)
    lock_fd = None
    try:
        if address.startswith("ipc://"):
            _check_directory(address)
            lock_fd = _lock(address)
            _clean_stale_socket(address)
            _bind_private_file(socket, address)
        else:
            if (keys := keys_of(address)) is not None:
                use_as_engine(socket, keys)
            _bind(socket, _numeric(address))
    except BaseException:
        socket.close(0)
        if lock_fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(ipc_path(address) + ".lock")
            os.close(lock_fd)
        raise
    real = address if lock_fd is not None else _with_keys(socket.get_string(zmq.LAST_ENDPOINT), keys_of(address))
    return BoundRouter(socket, real, lock_fd, is_private)


def connect_dealer(context: Context, address: str, prepare: Callable[[Socket], None] = lambda _: None) -> Socket:
    """Return a DEALER connected to an engine's address. libzmq connects in the background, and reconnects after a loss.

    prepare: sets further options. Errors: AddressError for an address that cannot be connected to.
    """
    check_address(address, binding=False)
    socket = context.socket(zmq.DEALER)
    try:
        _set_common_options(socket, MAX_SERVER_MESSAGE_BYTES, DEALER_LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        prepare(socket)
        endpoint = address if address.startswith("ipc://") else _numeric(address)
        if (keys := keys_of(address)) is not None:
            use_as_client(socket, keys)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise AddressError(f"cannot connect to {address}: {zmq.strerror(error.errno or 0)}") from error
    except BaseException:
        socket.close(0)
        raise
    return socket


def signal_fd(socket: Socket) -> int:
    """Return a file descriptor to wait on. It is readable if something may have happened to the socket.

    It signals nothing before the first call of pending_events(). It does not signal events that another use of the
    socket, such as sending, has already handled.
    """
    return int(socket.get(zmq.FD))


def pending_events(socket: Socket) -> int:
    """Return the socket's events now: READABLE | WRITABLE.

    Call this before waiting on the socket's file descriptor, and after each use by a thread that does not read it.
    """
    return int(socket.get(zmq.EVENTS))


def receive_event(monitor: Socket) -> tuple[int, int]:
    """Receive what a socket's monitor says: (event, its value: for connections, the file descriptor).

    zmq.utils.monitor would import asyncio, 20 ms of every start of an engine or a client.
    """
    frame, _address = monitor.recv_multipart()
    event, value = _MONITOR_EVENT.unpack(frame)
    return event, value


def check_address(address: str, *, binding: bool) -> None:
    """Check an address. Errors: AddressError that states the form of an address and why this one cannot be used."""
    if address.startswith("ipc://"):
        _check_ipc_path(address)
        return
    match = _TCP.fullmatch(address)
    if match is None:
        raise AddressError(
            f"{address!r} is not an address: write ipc:///absolute/path or tcp://127.0.0.1:PORT"
            + (" (port 0 = any free one)" if binding else "")
        )
    if not 0 <= int(match["port"]) <= 65535 or (not binding and int(match["port"]) == 0):
        raise AddressError(f"the port of {address!r} must be from {0 if binding else 1} to 65535")
    if not _is_loopback(match["host"]) and match["keys"] is None:
        raise AddressError(
            f"{address!r} is reachable from other machines, so it needs keys: make them with `engine-core keys` and "
            f"write {address}?keys=PATH, with the engine's folder or the client's file as PATH; or use "
            "tcp://127.0.0.1:PORT"
        )


def keys_of(address: str) -> str | None:
    """Return the path of the keys that an address names; None if it names none."""
    match = _TCP.fullmatch(address)
    return None if match is None else match["keys"]


def check_listening(address: str) -> None:
    """Check that a process listens at the address; libzmq would wait forever.

    Errors: EngineDeadError at once if none does; AddressError.
    """
    check_address(address, binding=False)
    if address.startswith("ipc://"):
        family, target = sockets.AF_UNIX, ipc_path(address)
    else:
        host, _, port = _numeric(address).removeprefix("tcp://").rpartition(":")
        family = sockets.AF_INET6 if host.startswith("[") else sockets.AF_INET
        target = (host.strip("[]"), int(port))  # type: ignore[assignment]
    with sockets.socket(family, sockets.SOCK_STREAM) as probe:
        probe.settimeout(HANDSHAKE_MS / 1000)
        try:
            probe.connect(target)
        except OSError as error:
            raise EngineDeadError(f"no engine listens at {address}: {error.strerror or error}") from error


def ipc_path(address: str) -> str:
    """Return the file path of an ipc address."""
    return address.removeprefix("ipc://")


def private_ipc_address() -> str:
    """Return a new ipc address in its own directory, mode 0700.

    The directory is under XDG_RUNTIME_DIR or the temporary directory. The caller owns it and removes it with
    `remove_private_address`. Errors: AddressError if no directory can be made.
    """
    tail = len(f"/{PRIVATE_PREFIX}xxxxxxxx/{_PRIVATE_SOCKET}")
    failures = []
    parents = [os.environ.get("XDG_RUNTIME_DIR")]
    with contextlib.suppress(OSError):  # none is writable
        parents.append(tempfile.gettempdir())
    for parent in (*parents, "/tmp"):
        if not parent or not os.path.isabs(parent) or len(os.fsencode(parent)) + tail > MAX_IPC_PATH_BYTES:
            continue
        _sweep(parent)
        try:
            return f"ipc://{tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=parent)}/{_PRIVATE_SOCKET}"
        except OSError as error:
            failures.append(str(error))
    raise AddressError(
        f"no directory for a socket could be created ({'; '.join(failures) or 'every candidate path is too long'}): "
        f"set TMPDIR to a writable directory of at most {MAX_IPC_PATH_BYTES - tail} bytes"
    )


@contextlib.contextmanager
def held_private_address() -> Iterator[str]:
    """Yield a new private address for an owner that runs one engine after another there; it is removed at the end.

    It is not swept up while no engine holds its lock. Errors: AddressError.
    """
    address = private_ipc_address()
    try:
        fd = os.open(os.path.dirname(ipc_path(address)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield address
        finally:
            os.close(fd)
    finally:
        remove_private_address(address)


def _sweep(parent: str) -> None:
    """Remove the private addresses in a directory whose owner and engine were killed: nothing else would.

    The lock of a dead engine is free, or gone if the engine outlived its owner for a moment; then the directory is
    empty. A new one is not touched: it may not have its lock yet.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(PRIVATE_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AGE_S:
                    continue
                directory = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while an owner holds the address
                    _remove_dead(f"{entry.path}/{_PRIVATE_SOCKET}")
                finally:
                    os.close(directory)


def _remove_dead(path: str) -> None:
    """Remove a private socket's files and their directory. Errors: OSError if an engine holds its lock."""
    try:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if _MADE.search(path) is not None:
            _remove_directory(f"ipc://{path}")  # fails if it has other files
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_private_address(f"ipc://{path}")
    finally:
        os.close(fd)


def remove_private_address(address: str) -> None:
    """Remove the directory of `private_ipc_address` and the files that an engine may have left in it."""
    _remove_files(ipc_path(address))
    _remove_directory(address)


def _check_ipc_path(address: str) -> None:
    path = ipc_path(address)
    if not os.path.isabs(path):
        raise AddressError(f"{address!r} needs an absolute path: write ipc:///run/user/1000/engine.sock, for example")
    if "\0" in path or "*" in path or path.endswith("/"):
        raise AddressError(f"{address!r} must name one file, without wildcards")
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        most = f"a socket's path at most {MAX_IPC_PATH_BYTES}: shorten it by {length - MAX_IPC_PATH_BYTES}"
        raise AddressError(f"the path of {address!r} has {length} bytes and {most}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _with_keys(endpoint: str, keys: str | None) -> str:
    return endpoint if keys is None else f"{endpoint}?keys={keys}"


def _numeric(address: str) -> str:
    """Return a tcp address in libzmq's form: without keys, localhost as a number."""
    return address.partition("?")[0].replace("tcp://localhost:", "tcp://127.0.0.1:", 1)


def _set_common_options(socket: Socket, max_message_bytes: int, linger_ms: int) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def _bind(socket: Socket, endpoint: str) -> None:
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        hint = ": stop its owner or choose another address" if error.errno == zmq.EADDRINUSE else ""
        raise AddressError(f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}{hint}") from error


def _bind_private_file(socket: Socket, address: str) -> None:
    """Bind so that only this user may connect: the file is created with mode 0600."""
    before = os.umask(0o177)
    try:
        _bind(socket, address)
    finally:
        os.umask(before)


def _check_directory(address: str) -> None:
    """Check that no other user can replace our socket: write access to the directory would allow it. Errors:
    AddressError.
    """
    directory = os.path.dirname(ipc_path(address))
    try:
        status = os.stat(directory)
    except OSError:
        return  # _lock() reports the error
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise AddressError(
            f"cannot listen on {address}: every user may write to {directory}; choose another directory or "
            f"chmod o-w {directory}"
        )
    if status.st_uid not in (0, os.getuid()):
        raise AddressError(f"cannot listen on {address}: {directory} belongs to user {status.st_uid}; choose another")


def _lock(address: str) -> int:
    """Take the lock next to the socket file. The kernel releases it however its owner ends."""
    path = ipc_path(address) + ".lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = -1
        try:
            fd = os.open(path, flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(fd, path):  # its last owner may have unlinked it between our open and our lock
                with contextlib.suppress(OSError):  # a full disk: the lock works without the number
                    os.truncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
                return fd
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise AddressError(
                f"{address} is in use by a live engine, process {owner}: connect to it, stop it or choose another"
            ) from None
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            why = f"{error.strerror} ({path}); its directory must exist and be writable for this user"
            raise AddressError(f"cannot listen on {address}: {why}") from error
        os.close(fd)


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _clean_stale_socket(address: str) -> None:
    """Remove a dead engine's socket file. Call it only under the lock; it removes only a socket without a listener."""
    path = ipc_path(address)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(
            f"cannot listen on {address}: {path} exists and is not a socket; remove it or choose another"
        )
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {error.strerror}") from error
    raise AddressError(f"{address} is in use by another live process: stop it or choose another path")


def _remove_files(path: str) -> None:
    for name in (path, path + ".lock"):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _remove_directory(address: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(ipc_path(address)))
