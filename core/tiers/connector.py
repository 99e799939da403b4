"""KVConnector: a store of KV blocks by name, beyond the memory of the engine; docs/scale_out.md has the contract.

The folder (core/tiers/block_folder.py) and the peers (core/tiers/peers.py) are connectors, and installed packages may
have others. The blocks that a connector gives are checked as they are copied (core/tiers/block_file.py), so a wrong
connector costs time, and changes no token.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core import log
from core.plug_ins import PlugInKind
from core.tiers.block_file import BlockToLoad, BlockToStore
from ipc.errors import ConfigError
from ipc.options.block_stores import BUILT_IN_CONNECTORS, KV_CONNECTORS
from ipc.options.config import EngineConfig

#: The version of engine_core.kv_connectors.
KV_CONNECTOR_API = (1, 0)
#: The longest that find() and load() may take, in seconds. A request waits at most 2 s
#: (core/scheduling/block_exchange.py). Blocks that have arrived by then are used.
LOOK_S = 0.2
FETCH_S = 1.5
#: How long, in seconds, a connector from elsewhere is not asked after it failed or took too long; how long nothing is
#: stored after it failed; how long it is not called after it broke its contract.
PAUSE_S = 5.0
STORE_PAUSE_S = 30.0
DISTRUST_S = 60.0
#: How much longer than it may take a call can last before that counts as too long.
_SLACK = 1.5
Result = TypeVar("Result")


class KVConnector(Protocol):
    """A store of KV blocks. All calls come from one thread, next to the steps, which wait for none of them.

    A name stands for one content. A block may be gone, or be there again, at any time.
    """

    def open(self) -> None:
        """Connect; the first call. Errors: OSError: it cannot now; later calls connect by themselves."""

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are there, within LOOK_S. Nothing need hold them.

        lookup: a number; the load() of the same lookup follows, or not. Errors: OSError: it cannot be asked now.
        """

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Give these blocks to take() or read_from(), in order, within FETCH_S. What does not come is computed.

        Errors: OSError: it cannot be asked now.
        """

    def store(self, block: BlockToStore) -> bool:
        """Keep a block, and mark one that is there already as used. Return whether it was not there.

        Errors: OSError: nothing can be stored now.
        """

    def close(self) -> None:
        """Release everything; the last call."""


class Tier:
    """A connector in use.

    option: the one that names it, for the log. loads, stores: which ways blocks go. is_near: asking it takes no round
    trip. retain: keeps blocks with these names for a time, see BlockFolder.retain(); most connectors cannot.
    """

    def __init__(
        self,
        option: str,
        connector: KVConnector,
        *,
        loads: bool = True,
        stores: bool = True,
        is_near: bool = False,
        retain: Callable[[Sequence[bytes], int], None] = lambda names, ttl_ms: None,
    ) -> None:
        self.connector, self.loads, self.stores, self.is_near = connector, loads, stores, is_near
        self.retain = retain
        self._option = option
        self._paused_until = 0.0  # monotonic seconds

    def open(self) -> None:
        """Open it."""
        try:
            self.connector.open()
        except OSError as error:
            self.pause(error)

    def store(self, block: BlockToStore) -> bool | None:
        """Store a block. Return whether it was new; None: nothing is stored at present."""
        if not self.stores or time.monotonic() < self._paused_until:
            return None
        try:
            return self.connector.store(block)
        except OSError as error:
            self.pause(error)
            return None

    def pause(self, error: OSError) -> None:
        """Store nothing for a while, after an error of the disk or the server."""
        self._paused_until = time.monotonic() + STORE_PAUSE_S
        text = f"{error.strerror or error}; no blocks are written for {STORE_PAUSE_S:.0f} s"
        log.say(f"engine-core: {self._option}: {text}")


class Guard:
    """A connector from elsewhere, which may be dead, slow or wrong, as one that is a miss then.

    name: for the log. clock: monotonic seconds.
    """

    def __init__(self, name: str, inner: KVConnector, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._inner, self._clock = name, inner, clock
        self._asked_from = self._stored_from = 0.0  # when it is asked, and stored to, again
        self._said_until = 0.0  # of damaged blocks

    def open(self) -> None:
        """Open it."""
        self._ask(self._inner.open, FETCH_S)

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, it says it has."""
        count = self._ask(lambda: self._inner.find(lookup, names), LOOK_S)
        if count is None:
            return 0
        if isinstance(count, bool) or not isinstance(count, int):
            self._distrust(f"find() has returned {count!r:.80}, not a number of blocks")
            return 0
        return max(0, min(count, len(names)))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Let it give these blocks."""
        self._ask(lambda: self._inner.load(lookup, blocks), FETCH_S)
        now = self._clock()
        if now >= self._said_until and any(block.was_damaged for block in blocks):
            self._said_until = now + DISTRUST_S
            self._say("it has given a damaged or forged KV block, which is computed")

    def store(self, block: BlockToStore) -> bool:
        """Let it keep a block. Errors: OSError."""
        begun = self._clock()
        if begun < self._stored_from:
            return False
        try:
            is_new = self._inner.store(block) is True
        except OSError:
            raise
        except Exception as error:  # code from elsewhere: only this connector fails
            self._distrust(f"store() has raised {type(error).__name__}: {error}")
            return False
        if self._clock() - begun > _SLACK * FETCH_S:
            raise TimeoutError(f"storing a block took {self._clock() - begun:.1f} s")
        return is_new

    def close(self) -> None:
        """Close it."""
        try:
            self._inner.close()
        except Exception as error:  # as above
            self._say(f"close() has raised {type(error).__name__}: {error}")

    def _ask(self, call: Callable[[], Result], seconds: float) -> Result | None:
        begun = self._clock()
        if begun < self._asked_from:
            return None
        try:
            found = call()
        except OSError as error:
            self._pause(f"{type(error).__name__}: {error}")
            return None
        except Exception as error:  # code from elsewhere: only this connector fails
            self._distrust(f"it has raised {type(error).__name__}: {error}")
            return None
        if (taken := self._clock() - begun) > _SLACK * seconds:
            self._pause(f"it took {taken:.1f} s instead of up to {seconds:g}")
        return found

    def _pause(self, text: str) -> None:
        self._asked_from = self._clock() + PAUSE_S
        self._say(f"{text}; it is not asked for {PAUSE_S:g} s")

    def _distrust(self, text: str) -> None:
        self._asked_from = self._stored_from = self._clock() + DISTRUST_S
        self._say(f"{text}; it is not called for {DISTRUST_S:g} s")

    def _say(self, text: str) -> None:
        log.say(f"engine-core: kv_transfer_config: {self._name}: {text:.300}")


class _Connectors(PlugInKind):
    @property
    def api_name(self) -> str:
        """Return the name under which a module states the version it is written for."""
        return "KV_CONNECTOR_API"


_PLUG_INS = _Connectors("KV connector", KV_CONNECTORS, BUILT_IN_CONNECTORS, KV_CONNECTOR_API)


def create_connector(config: EngineConfig) -> KVConnector:
    """Return the connector that kv_transfer_config names, not opened. Errors: ConfigError."""
    settings = config.kv_transfer_config
    assert settings is not None, "the config names no connector"
    connector: KVConnector = _PLUG_INS.import_module(settings.kv_connector).create(config)
    calls = ("open", "find", "load", "store", "close")
    if missing := [call for call in calls if not callable(getattr(connector, call, None))]:
        raise ConfigError(f"KV connector {settings.kv_connector!r} has no {' and no '.join(missing)}()")
    return connector
