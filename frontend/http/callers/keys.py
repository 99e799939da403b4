"""Keys: who may use the server, and what each key may do.

A keys file has a line for each key: `NAME SHA256 [LIMIT=VALUE ...]`, with the hex digest of the key, so that the file
reveals no key. Limits: models=a,b; concurrent=N, concurrent requests; rpm=N and tpm=N, requests and tokens a minute;
max_tokens=N; min_priority=N; store_bytes=N, bytes that it may keep in the store. With manage=1 a key may change the
models of a server with many. The file is read again when it changes; a file with an error changes nothing.
"""

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable

import msgspec

from ipc.errors import ConfigError

_log = logging.getLogger("engine_core.http")
_MAX_KEYS = 10_000
_ALL = 1 << 62  # bytes
_LIMIT = re.compile(r"-?[0-9]{1,18}")
_LIMITS = ("concurrent", "rpm", "tpm", "max_tokens", "min_priority", "store_bytes")


class Key(msgspec.Struct, frozen=True):
    """One key. models: names that it may use, empty = all. The other limits: None = none."""

    name: str
    digest: bytes
    models: tuple[str, ...] = ()
    concurrent: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    max_tokens: int | None = None
    min_priority: int | None = None
    store_bytes: int | None = None
    manages: bool = False  # it may change a server's models, and say how long they stay in memory


def digest_of(secret: str) -> str:
    """Return a key's entry in a keys file: its SHA-256 as hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyRing:
    """All keys of a server. digests: keys without limits, such as the one from the environment. path: the keys file, or
    None.

    Errors: ConfigError for a file that cannot be read.
    """

    def __init__(self, digests: Iterable[str] = (), path: str | None = None) -> None:
        self._path = path
        own = enumerate(map(bytes.fromhex, digests))
        self._own = [Key(f"key{index}", one, manages=True, store_bytes=_ALL) for index, one in own]
        self._version: object = None
        self._keys: list[Key] = list(self._own)
        if path is not None:
            self._version = _version(path)
            self._keys += read_keys(path)

    @property
    def is_empty(self) -> bool:
        """Return whether the server has no keys, so that any caller may use it."""
        return not self._keys and self._path is None

    def find(self, secret: bytes) -> Key | None:
        """Return the key with this secret. All keys are compared, so that the time reveals nothing."""
        digest, found = hashlib.sha256(secret).digest(), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        """Return the key with this name, as its file has it now."""
        return next((key for key in self._keys if key.name == name), None)

    def refresh(self) -> None:
        """Read the file again if it has changed. An error in it is logged, and the old keys stay valid."""
        if self._path is None or (version := _version(self._path)) == self._version:
            return
        self._version = version
        try:
            self._keys = self._own + read_keys(self._path)
        except ConfigError as error:
            _log.error("the old keys stay valid: %s", error)


def read_keys(path: str) -> list[Key]:
    """Return the keys of a file. Errors: ConfigError that names the line, and never shows a digest."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys file {path} cannot be read: {error}") from None
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words:
            key = _read_line(words, f"{path}, line {number}")
            if key.name in keys:
                raise ConfigError(f"{path}, line {number}: the name {key.name!r} is taken")
            keys[key.name] = key
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"{path} has {len(keys)} keys; at most {_MAX_KEYS} are allowed")
    return list(keys.values())


def _read_line(words: list[str], place: str) -> Key:
    if len(words) < 2 or len(words[0].encode()) > 64 or len(words[1]) != 64:
        raise ConfigError(f"{place}: expected NAME SHA256 [LIMIT=VALUE ...], a name of at most 64 bytes")
    try:
        digest = bytes.fromhex(words[1])
    except ValueError:
        raise ConfigError(f"{place}: the SHA-256 of the key of {words[0]} must be 64 hex digits") from None
    limits: dict[str, object] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "models":
            limits[name] = tuple(value.split(","))
        elif word == "manage=1":
            limits["manages"] = True
        elif name in _LIMITS and _LIMIT.fullmatch(value) and (name == "min_priority" or int(value) > 0):
            limits[name] = int(value)
        else:
            text = f"{place}: {word!r:.80} is not a limit; known: models=a,b, manage=1 and {', '.join(_LIMITS)}=N"
            raise ConfigError(f"{text}, above 0 except for min_priority")
    return Key(words[0], digest, **limits)  # type: ignore[arg-type]


def _version(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
