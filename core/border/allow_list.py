"""AllowList: the clients whose keys an engine accepts, read again whenever their file changes."""

import os
from pathlib import Path

from zmq.utils import z85

from core import log
from ipc.errors import ConfigError
from ipc.keys.curve import ALLOWED_FILE, AllowedClient, read_allowed, read_keys
from ipc.keys.quota import NO_QUOTA, Quota
from ipc.log_lines import counted


class AllowList:
    """The allowed clients in one folder of keys (ipc/keys/curve.py). Used by one thread, except for quota_of().

    If the file is invalid or missing, the last list stays in force. Connections that exist are kept, because the list
    is only checked when a connection is made. Errors: ConfigError.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._own = read_keys(folder).public
        self._version = self._read_version()
        self._set(read_allowed(folder))

    def _set(self, clients: dict[str, AllowedClient]) -> None:
        self._clients = clients
        self._quotas = {client.name: client.quota for client in clients.values()}

    def quota_of(self, name: str) -> Quota:
        """Return the quota of a client's name from the last list. May be called from any thread."""
        return self._quotas.get(name, NO_QUOTA)

    def name_of(self, public_key: bytes) -> str | None:
        """Return the name of the client with this key (32 bytes), or None if it may not connect.

        "": it has the engine's own keys, and therefore no limits.
        """
        if (version := self._read_version()) != self._version:
            self._version = version
            try:
                self._set(read_allowed(self._folder))
                log.say(
                    f"engine-core: the list of clients has changed: {counted(len(self._clients), 'client')} may connect"
                )
            except ConfigError as error:
                log.say(f"engine-core: the changed list of clients is not used: {error}")
        key = z85.encode(public_key).decode() if len(public_key) == 32 else ""
        if key == self._own:
            return ""
        client = self._clients.get(key)
        return None if client is None else client.name

    def _read_version(self) -> object:
        try:
            found = os.stat(Path(self._folder, ALLOWED_FILE))
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
