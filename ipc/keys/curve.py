"""CURVE keys (rfc.zeromq.org/26): who may connect to an engine over a network, and the files that define it.

An engine's keys are a folder: `engine.json`, its key pair, and `allowed`, a line `NAME PUBLIC_KEY [LIMIT=N ...]` for
each client (ipc/keys/quota.py has the limits). A client's keys are one file, its key pair and the engine's public key.
`engine-core keys` makes both. An address names the folder or the file:
`tcp://10.0.0.5:5555?keys=/etc/engine-core/keys`. The engine's folder also works as a client's keys: any process that
can read it could act as the engine. Keys are in Z85, 40 characters each.
"""

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from ipc.errors import AddressError, ConfigError
from ipc.keys.quota import NO_QUOTA, Quota, read_quota

ENGINE_FILE, ALLOWED_FILE = "engine.json", "allowed"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_ALLOWED_BYTES = 1 << 20


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key pair, and the public key of its engine."""

    public: str
    secret: str
    engine: str


class AllowedClient(NamedTuple):
    """A client that may connect."""

    name: str
    quota: Quota = NO_QUOTA


def make_engine_keys(folder: str) -> None:
    """Make an engine's keys in a new or empty folder, with no client allowed. Errors: ConfigError."""
    write_engine_keys(folder, new_keys())


def new_keys() -> Keys:
    """Return new keys of an engine. Errors: ConfigError if libzmq has no CURVE."""
    _check_curve()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return Keys(public, secret, public)


def write_engine_keys(folder: str, keys: Keys) -> None:
    """Write an engine's keys to a new or empty folder, with no client allowed. Errors: ConfigError."""
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path / ENGINE_FILE, msgspec.json.encode(keys), is_new=True)
        _write(path / ALLOWED_FILE, b"", is_new=True)
    except OSError as error:
        raise ConfigError(f"no keys can be made in {folder}: {error.strerror} ({error.filename})") from None


def add_client(folder: str, name: str, file: str, quota: Quota = NO_QUOTA) -> None:
    """Allow a new client, and write its keys to a new file for it. Errors: ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a client's name has 1 to 64 letters, digits, '.', '_' and '-'; got {name!r:.80}")
    engine, lines = read_keys(folder), _read_lines(folder)
    if name in _names(folder, lines):
        raise ConfigError(f"{folder} allows a client {name} already: remove it first, or name another")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    if lines and not lines[-1].endswith((b"\n", b"\r")):
        lines[-1] += b"\n"
    lines.append(_line(name, public, quota))
    _check_size(folder, sum(map(len, lines)))
    try:
        _write(Path(file), msgspec.json.encode(Keys(public, secret, engine.public)), is_new=True)
    except OSError as error:
        raise ConfigError(f"the client's keys cannot be written to {file}: {error.strerror}") from None
    _write_allowed(folder, lines)


def remove_client(folder: str, name: str) -> None:
    """Remove a client: it cannot connect again. Errors: ConfigError."""
    lines = _read_lines(folder)
    gone = {name, *_keys_of(folder, lines, name)}  # also under another name
    _write_allowed(folder, [line for line in lines if gone.isdisjoint(_words(line))])


def limit_client(folder: str, name: str, quota: Quota) -> None:
    """Replace a client's quota. Errors: ConfigError."""
    lines = _read_lines(folder)
    _keys_of(folder, lines, name)
    changed = [_line(name, words[1], quota) if (words := _words(line))[:1] == [name] else line for line in lines]
    _write_allowed(folder, changed)


def _keys_of(folder: str, lines: list[bytes], name: str) -> list[str]:
    """Return the public keys of a client. Errors: ConfigError if it is not allowed."""
    allowed = _clients(folder, lines)
    keys = [key for key, client in allowed.items() if client.name == name]
    if not keys:
        names = ", ".join(client.name for client in allowed.values())
        raise ConfigError(f"{folder} allows no client {name}; it allows: {names or 'nobody'}")
    return keys


def _line(name: str, public: str, quota: Quota) -> bytes:
    return f"{' '.join([name, public, *quota.words()])}\n".encode()


def read_keys(path: str) -> Keys:
    """Return the keys in a client's file or an engine's folder. Errors: ConfigError."""
    _check_curve()
    file = Path(path, ENGINE_FILE) if os.path.isdir(path) else Path(path)
    try:
        mode, data = file.stat().st_mode, file.read_bytes()[:4096]
    except OSError as error:
        raise ConfigError(f"the keys {file} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"other users may read the keys {file}: chmod 600 {file}")
    try:
        keys = msgspec.json.decode(data, type=Keys)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is not a file of `engine-core keys`: {error}") from None
    if not all(_KEY.fullmatch(key) for key in msgspec.structs.astuple(keys)):
        raise ConfigError(f"{file} has a key that is not 40 characters of Z85")
    return keys


def read_allowed(folder: str) -> dict[str, AllowedClient]:
    """Return the clients that an engine's folder allows, by public key. Errors: ConfigError with the line."""
    return _clients(folder, _read_lines(folder))


def _read_lines(folder: str) -> list[bytes]:
    """Return the lines of the list of clients, with their ends. Errors: ConfigError."""
    file = Path(folder, ALLOWED_FILE)
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_ALLOWED_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the list of clients {file} cannot be read: {error.strerror}") from None
    _check_size(folder, len(data))
    return data.splitlines(keepends=True)


def _check_size(folder: str, num_bytes: int) -> None:
    if num_bytes > _MAX_ALLOWED_BYTES:
        raise ConfigError(
            f"the list of clients {Path(folder, ALLOWED_FILE)} is too long; at most {_MAX_ALLOWED_BYTES} bytes are "
            "allowed"
        )


def _words(line: bytes) -> list[str]:
    """Return the words of a line; none for a comment."""
    words = line.decode("ascii", "replace").split()
    return [] if not words or words[0].startswith("#") else words


def _names(folder: str, lines: list[bytes]) -> set[str]:
    return {client.name for client in _clients(folder, lines).values()}


def _clients(folder: str, lines: list[bytes]) -> dict[str, AllowedClient]:
    """Return the clients of the lines, by public key. Errors: ConfigError with the line."""
    allowed: dict[str, AllowedClient] = {}
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(lines, 1):
        words, place = _words(line), f"{Path(folder, ALLOWED_FILE)}:{number}"
        if not words:
            continue
        if len(words) < 2 or not _NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]):
            raise ConfigError(f"{place}: a line is NAME PUBLIC_KEY [LIMIT=N ...], the key 40 characters of Z85")
        quota = read_quota(words[2:], place)
        if quotas.setdefault(words[0], quota) != quota:
            raise ConfigError(f"{place}: the keys of {words[0]} share one quota: give its lines the same limits")
        allowed[words[1]] = AllowedClient(words[0], quota)
    return allowed


def use_as_engine(socket: "zmq.Socket[bytes]", path: str) -> None:
    """Set up CURVE on a socket with the keys of an engine's folder, before it is bound. Errors: AddressError."""
    if not os.path.isdir(path):
        raise AddressError(f"an engine listens with a folder made by `engine-core keys new`; {path} is not one")
    keys = _address_keys(path)
    read_allowed(path)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()


def use_as_client(socket: "zmq.Socket[bytes]", path: str) -> None:
    """Set up CURVE on a socket with these keys, before it is connected. Errors: AddressError."""
    keys = _address_keys(path)
    socket.curve_serverkey = keys.engine.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()


def _address_keys(path: str) -> Keys:
    try:
        return read_keys(path)
    except ConfigError as error:
        raise AddressError(str(error)) from None


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE: install pyzmq's own wheel (pip install pyzmq)")


def _write_allowed(folder: str, lines: list[bytes]) -> None:
    try:
        _write(Path(folder, ALLOWED_FILE), b"".join(lines), is_new=False)
    except OSError as error:
        raise ConfigError(f"the list of clients in {folder} cannot be written: {error.strerror}") from None


def _write(path: Path, data: bytes, *, is_new: bool) -> None:
    """Write a file that only this user may read, completely or not at all. is_new: it must not exist."""
    fd, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        if is_new:
            os.link(draft, path)  # fails if it exists
        else:
            os.replace(draft, path)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)
