"""`engine-core control`: pause, resume, drain, upgrade or shut down a running engine, as its owner."""

import argparse
import fcntl
import os
import re
from collections.abc import Callable, Sequence

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import ConfigError
from ipc.messages import PauseMode
from tools.address import address_to_connect, owner_file_to_read
from tools.options import ArgumentParser

_ACTIONS: dict[str, Callable[[EngineClient, argparse.Namespace], None]] = {
    "pause": lambda client, options: client.pause(PauseMode[options.mode.upper()]),
    "resume": lambda client, _: client.resume(),
    "drain": lambda client, options: client.drain(move_after=options.move_after),
    "upgrade": lambda client, _: client.upgrade(),
    "shutdown": lambda client, _: client.shutdown(),
    "reset-prefix-cache": lambda client, _: client.reset_prefix_cache(),
}
_OWNER_FILE = re.compile(rb"([0-9a-f]*\n)?")


def main(arguments: Sequence[str]) -> int:
    """Do one action on a running engine and return the exit status. Errors: ConfigError; those of the client."""
    parser = ArgumentParser(
        prog="engine-core control",
        usage=f"engine-core control {{{','.join(_ACTIONS)}}} --connect ADDR [--owner-file FILE]",
        description="Steer a running engine. All but reset-prefix-cache are owner only: see serve --owner-file.",
    )
    parser.add_argument("action", choices=tuple(_ACTIONS))
    parser.add_argument("--connect", metavar="ADDR", help="the engine's address; default: that of `engine-core serve`")
    parser.add_argument("--owner-file", metavar="FILE", help="that of `engine-core serve --owner-file FILE`")
    parser.add_argument(
        "--mode", choices=("new", "all"), default="new", help="of pause: no request begins, or none runs; default: new"
    )
    parser.add_argument(
        "--move-after",
        type=float,
        metavar="S",
        help="of drain: end after so many seconds; what has not finished goes on at the next engine",
    )
    parsed = parser.parse_args(arguments)
    owner_file = owner_file_to_read(parsed.owner_file, parsed.connect)
    token = b"" if owner_file is None else read_owner_file(owner_file)
    client = EngineClient(ZmqTransport(address_to_connect(parsed.connect)), name="control", owner_token=token)
    try:
        _ACTIONS[parsed.action](client, parsed)
    finally:
        client.close()
    return 0


def write_owner_file(path: str, token: bytes) -> int:
    """Write the owner token to a file that only this user can read; return its descriptor, which holds a lock.

    The lock ends with the process, however it ends: the file of an engine that was killed is taken over. Errors:
    ConfigError if the file is in use, or is no owner file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"--owner-file {path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _OWNER_FILE.fullmatch(os.pread(fd, 1000, 0)) or os.fstat(fd).st_uid != os.geteuid():
            raise ConfigError(f"--owner-file {path} exists and is not an owner file: name another")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, token.hex().encode() + b"\n", 0)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"--owner-file {path} is in use by a running `engine-core serve`: name another") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_owner_file(path: str) -> bytes:
    """Return the owner token of a file that write_owner_file() made. Errors: ConfigError."""
    try:
        with open(path, encoding="ascii") as file:
            return bytes.fromhex(file.read(1000).strip())
    except OSError as error:
        raise ConfigError(f"--owner-file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--owner-file {path} is not one that `engine-core serve --owner-file` wrote") from None
