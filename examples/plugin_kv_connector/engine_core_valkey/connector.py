"""A KV connector in another distribution: blocks as values of a Valkey or Redis server.

The server's own settings bound what it keeps (maxmemory, and maxmemory-policy allkeys-lru). It can read the blocks, but
not change them unseen: they carry an HMAC. So give it a network and a password that only the engines have.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import ValkeyError
from valkey.retry import Retry

from engine_core.kv_connectors import FETCH_S, LOOK_S, BlockToLoad, BlockToStore, ConfigError, EngineConfig

#: The version of engine_core.kv_connectors for which this module is written.
KV_CONNECTOR_API = (1, 0)
_KNOWN = ("address", "password_file", "prefix")
_AT_ONCE = 8  # blocks of one round trip


class ValkeyConnector:
    """A KVConnector; the methods are described in engine_core.kv_connectors.KVConnector."""

    def __init__(self, host: str, port: int, prefix: bytes, password: str | None) -> None:
        self._prefix = prefix
        self._client = Valkey(
            host=host,
            port=port,
            password=password,
            socket_connect_timeout=LOOK_S / 2,
            socket_timeout=LOOK_S,  # of silence; it bounds no transfer
            retry=Retry(NoBackoff(), 0),
            single_connection_client=False,
        )

    def open(self) -> None:
        """Check that the server is there."""
        with _as_os_errors():
            self._client.ping()

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, the server has."""
        with _as_os_errors(), self._client.pipeline(transaction=False) as batch:
            for name in names:
                batch.exists(self._prefix + name)
            answers = batch.execute()
        return next((count for count, is_there in enumerate(answers) if not is_there), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Fetch blocks up to the first that is missing. One that is not what was stored is removed."""
        end = time.monotonic() + FETCH_S
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            with _as_os_errors(), self._client.pipeline(transaction=False) as batch:
                for block in some:  # of a value that is too long no more than it takes to see that
                    batch.getrange(self._prefix + block.name, 0, block.num_bytes)
                values = batch.execute()
            for block, value in zip(some, values, strict=True):
                if not value:
                    return
                if not block.take(value):
                    with _as_os_errors():
                        self._client.delete(self._prefix + block.name)
            if time.monotonic() > end:
                return

    def store(self, block: BlockToStore) -> bool:
        """Keep a block that the server does not have."""
        key = self._prefix + block.name
        with _as_os_errors():
            if self._client.touch(key):
                return False
            data = block.pack()
            return data is not None and bool(self._client.set(key, memoryview(data)))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def create(config: EngineConfig) -> ValkeyConnector:
    """Return the connector for this configuration, not connected. Errors: ConfigError."""
    settings = config.kv_transfer_config
    options = {} if settings is None else settings.kv_connector_extra_config
    if unknown := sorted(options.keys() - set(_KNOWN)):
        raise ConfigError(f"connector 'valkey' has the options {', '.join(_KNOWN)}; got {unknown[0]!r:.80}")
    if bad := [key for key in _KNOWN if not isinstance(options.get(key, ""), str)]:
        raise ConfigError(f"connector 'valkey': {bad[0]} must be a text; got {options[bad[0]]!r:.80}")
    host, _, port = options.get("address", "127.0.0.1:6379").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"connector 'valkey': address must be HOST:PORT; got {options['address']!r:.80}")
    password = None
    if (path := options.get("password_file")) is not None:
        try:
            password = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"connector 'valkey': password_file={path!r:.80} cannot be read: {error}") from error
    return ValkeyConnector(host.strip("[]"), int(port), options.get("prefix", "engine-core:").encode(), password)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn the client's errors into OSError, which says that the server cannot be asked now."""
    try:
        yield
    except ValkeyError as error:
        raise OSError(f"the server: {error}") from error
