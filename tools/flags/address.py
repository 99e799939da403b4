"""The default address: `engine-core serve` listens there, and other commands connect there, if no address is given."""

import os
import stat
from pathlib import Path

from ipc.errors import AddressError, EngineCoreError
from ipc.wire.sockets import check_listening

_SOCKET, _OWNER = "engine.sock", "engine.owner"


def default_folder() -> Path:
    """Return this user's folder for the socket; create it if it does not exist.

    It is in $XDG_RUNTIME_DIR, otherwise in /tmp. Errors: AddressError if other users could have put a socket there.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "engine-core") if base else Path(f"/tmp/engine-core-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise AddressError(f"{folder} cannot be used for the socket ({error.strerror}): name an address") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AddressError(f"{folder} is not owned by this user alone: remove it, or name an address")
    return folder


def default_address() -> str:
    """Return the address that is used when none is given. Errors: AddressError."""
    return f"ipc://{default_folder() / _SOCKET}"


def default_owner_file() -> str:
    """Return the owner file of an engine at the default address. Errors: AddressError."""
    return str(default_folder() / _OWNER)


def fresh_owner_file() -> str:
    """Return the default owner file for a new engine; a file left behind by an engine that has ended is removed.

    Errors: AddressError while another engine has the default address.
    """
    path = Path(default_owner_file())
    if path.exists():
        if _is_served(default_address()):
            raise AddressError(
                f"an engine is already served at {default_address()}: name another address with --listen"
            )
        path.unlink(missing_ok=True)
    return str(path)


def address_to_connect(given: str | None) -> str:
    """Return the address of --connect. Errors: AddressError if none was given and no engine is served at the default
    one.
    """
    if given is not None:
        return given
    address = default_address()
    if not Path(address.removeprefix("ipc://")).exists():
        raise AddressError(
            f"no engine is served at {address}: start one with `engine-core serve`, or give --connect ADDR"
        )
    return address


def owner_file_to_read(given: str | None, connect: str | None) -> str | None:
    """Return the owner file to read, None for none: that of the default address if neither was given."""
    if given is not None or connect is not None:
        return given
    path = default_owner_file()
    return path if os.path.exists(path) else None


def _is_served(address: str) -> bool:
    try:
        check_listening(address)
    except EngineCoreError:
        return False
    return True
