"""Stores of KV blocks beyond the host's memory: the options that name them, and the key of the blocks' names."""

import os
import stat

from ipc.errors import ConfigError

#: Options that name one.
STORE_OPTIONS = ("kv_dir", "kv_listen", "kv_peers")
#: The options of an engine without stores: a replay's, since its requests to stores are not carried out.
NO_STORE: dict[str, None] = dict.fromkeys((*STORE_OPTIONS, "kv_key_file"))
KEY_BYTES = 32


def addresses_of(kv_peers: str) -> list[str]:
    """Return the addresses in the option kv_peers."""
    return [address for part in kv_peers.split(",") if (address := part.strip())]


def make_key_file(path: str) -> None:
    """Write a new key for the names of KV blocks to a new file. Errors: ConfigError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
    except OSError as error:
        raise ConfigError(f"the key cannot be written to {path}: {error.strerror}") from None


def read_key_file(path: str) -> bytes:
    """Return the key in a file of make_key_file(). Errors: ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found, key = os.fstat(fd), file.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"kv_key_file={path!r} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"kv_key_file={path!r} may be read by other users: chmod 600 {path}")
    if len(key) != KEY_BYTES:
        raise ConfigError(f"kv_key_file={path!r} has no key: make one with `engine-core keys blocks FILE`")
    return key
