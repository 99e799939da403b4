"""`engine-core check-kv-connector`: check a KV connector, usually a plug-in's, in this process.

It stores random blocks and asks for them again: whole, with gaps, of other sizes, damaged. With --server-option the
connector's server is reached through a wire that can be cut, silent or damaged (wire.py).
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from core.tiers.block_file import BlockToLoad, BlockToStore, pack_block
from core.tiers.block_folder import BlockFolder
from core.tiers.connector import FETCH_S, LOOK_S, KVConnector, create_connector
from core.tiers.portable_names import KEY_BYTES, NAME_BYTES
from ipc.errors import ConfigError
from ipc.options.block_stores import KVTransferConfig, parse_kv_transfer_config
from ipc.options.config import EngineConfig
from tools.flags.options import ArgumentParser
from tools.lab.check_kv_connector.wire import Fault, Wire

_WORDS = {True: "ok", False: "FAILED", None: "seen"}
_SIZES = (1, 4096, 65_537, 1 << 20)  # bytes of a block
_MANY = 128
_SLACK_S = 1.0  # for a busy machine
_ATTEMPTS = 3  # of a check that ends with OSError
_REST_S = 0.05  # before the next one
_BACK_S = 10.0  # within which a connector must work again after a fault
_KEY = secrets.token_bytes(KEY_BYTES)


class Finding(NamedTuple):
    """The outcome of one check. is_right: None for an observation without a promise."""

    name: str
    is_right: bool | None
    text: str


class BrokenContractError(Exception):
    """The connector broke its contract; the text says how."""


def main(arguments: Sequence[str]) -> int:
    """Print a line for each check, and return the exit status: 1 if one failed.

    Errors: ConfigError; those of the connector's create().
    """
    parser = ArgumentParser(
        prog="engine-core check-kv-connector",
        usage="engine-core check-kv-connector NAME [--kv-connector-extra-config JSON] [--server-option KEY]",
        description="Check that a KV connector follows the contract of docs/scale_out.md; for a plug-in's CI.",
    )
    parser.add_argument("name", metavar="NAME", help="the connector's name: a plug-in's, or folder")
    parser.add_argument(
        "--kv-connector-extra-config", default="{}", metavar="JSON", help="its own options, as in kv_transfer_config"
    )
    parser.add_argument(
        "--server-option",
        metavar="KEY",
        help="which of them is its server's HOST:PORT: then the check also makes the server dead, silent and wrong",
    )
    parsed = parser.parse_args(arguments)
    settings = parse_kv_transfer_config(
        {"kv_connector": parsed.name, "kv_connector_extra_config": _object(parsed.kv_connector_extra_config)}
    )
    assert settings is not None, "parse_kv_transfer_config() refuses no connector"
    num_failed = 0
    for finding in check_kv_connector(settings, parsed.server_option):
        print(f"{_WORDS[finding.is_right]:>6}  {finding.name}: {finding.text}", flush=True)
        num_failed += finding.is_right is False
    end = f"{num_failed} of its checks failed" if num_failed else "every check passed"
    print(f"KV connector {settings.kv_connector}: {end}")
    return 1 if num_failed else 0


def _object(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--kv-connector-extra-config must be a JSON object: {error}") from None


def check_kv_connector(settings: KVTransferConfig, server_option: str | None = None) -> Iterator[Finding]:
    """Yield the outcome of each check of the connector that the settings name.

    server_option: the key of its own options that has the HOST:PORT of its server; None: it has no server, or the
    checks of its loss are left out. Errors: those of the connector's create().
    """
    with _maker(settings) as make:
        with _opened(make) as connector:
            for name, check in _CHECKS.items():
                yield _found(name, partial(check, connector))
        yield _found("restart", lambda: _restart(make))
    if server_option is None:
        yield Finding("faults of the server", None, "not checked; --server-option KEY names the option with HOST:PORT")
        return
    options = settings.kv_connector_extra_config
    with Wire(str(options.get(server_option))) as wire:
        own = msgspec.structs.replace(settings, kv_connector_extra_config={**options, server_option: wire.address})
        with _maker(own) as make, _opened(make) as connector:
            for fault in Fault:
                yield _found(fault.value, partial(_through, fault, wire, connector))


def _found(name: str, check: Callable[[], str]) -> Finding:
    for _ in range(_ATTEMPTS - 1):
        try:
            return Finding(name, True, check())
        except BrokenContractError as error:
            return Finding(name, False, str(error))
        except OSError:
            time.sleep(_REST_S)  # it cannot be asked now, as on a busy machine
    try:
        return Finding(name, True, check())
    except (BrokenContractError, OSError) as error:
        return Finding(name, False, str(error) or type(error).__name__)


@contextmanager
def _maker(settings: KVTransferConfig) -> Iterator[Callable[[], KVConnector]]:
    """Yield a function that creates the connector."""
    if settings.kv_connector == "folder":
        with tempfile.TemporaryDirectory(prefix="engine-core-kv-") as folder:
            path = settings.kv_connector_extra_config.get("kv_dir", folder)
            yield lambda: BlockFolder(path, 1 << 30, _KEY)
        return
    if settings.kv_connector == "peers":
        raise ConfigError("connector 'peers' stores no blocks, so it cannot be checked alone")
    config = EngineConfig(kv_transfer_config=settings, kv_key_file="given", kv_host_bytes=1 << 20)
    yield lambda: create_connector(config)


@contextmanager
def _opened(make: Callable[[], KVConnector]) -> Iterator[KVConnector]:
    connector = make()
    try:
        connector.open()
    except OSError as error:
        raise ConfigError(f"the connector cannot be opened: {error}") from error
    try:
        yield connector
    finally:
        connector.close()


# What is asked of a connector.


class _Block(NamedTuple):
    """A random block."""

    name: bytes
    data: bytes

    @property
    def parts(self) -> list[memoryview]:
        """Return its bytes in up to three parts, as a cache of several layers has them."""
        third = len(self.data) // 3 or len(self.data)
        cuts = [self.data[:third], self.data[third : 2 * third], self.data[2 * third :]]
        return [memoryview(bytearray(cut)) for cut in cuts if cut]


class _Damaged(BlockToStore):
    """A block whose bytes are changed on their way: byte `at`; None: all after the first half are missing."""

    __slots__ = ("_at", "_data")

    def __init__(self, block: _Block, at: int | None) -> None:
        super().__init__(block.name, block.parts, _KEY)
        self._at, self._data = at, pack_block(block.name, block.parts, _KEY)

    def pack(self) -> bytearray:
        """Return the wrong bytes."""
        data = bytearray(self._data)
        if self._at is None:
            return data[: len(data) // 2]
        data[self._at % len(data)] ^= 1
        return data

    def write_to(self, fd: int) -> None:
        """Write the wrong bytes."""
        os.write(fd, self.pack())


def _blocks(count: int, size: int = 4096) -> list[_Block]:
    return [_Block(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(size)) for _ in range(count)]


def _store(connector: KVConnector, block: _Block) -> bool:
    is_new: bool = _call("store", lambda: connector.store(BlockToStore(block.name, block.parts, _KEY)), FETCH_S)
    _expect(isinstance(is_new, bool), f"store() has returned {is_new!r:.80}, not whether the block is new")
    return is_new


def _find(connector: KVConnector, blocks: Sequence[_Block]) -> int:
    count: int = _call("find", lambda: connector.find(1, [block.name for block in blocks]), LOOK_S)
    is_count = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= len(blocks)
    _expect(is_count, f"find() of {len(blocks)} blocks has returned {count!r:.80}")
    return count


def _load(connector: KVConnector, blocks: Sequence[_Block], sizes: Sequence[int] | None = None) -> list[bool]:
    """Return which of these blocks were loaded. sizes: of the places; None: the blocks'."""
    places = [[memoryview(bytearray(size))] for size in sizes or [len(block.data) for block in blocks]]
    rooms = [BlockToLoad(block.name, place, _KEY) for block, place in zip(blocks, places, strict=True)]
    _call("load", lambda: connector.load(1, rooms), FETCH_S)
    for room in rooms:
        room.close()
    for block, room, place in zip(blocks, rooms, places, strict=True):
        _expect(not room.is_loaded or bytes(place[0]) == block.data, "a block has other bytes than were stored")
    return [room.is_loaded for room in rooms]


def _call(name: str, call: Callable[[], Any], seconds: float) -> Any:
    """Call it. Errors: OSError, as the contract allows; BrokenContractError for others, and if it takes too long."""
    begun = time.monotonic()
    try:
        found = call()
    except OSError:
        _in_time(name, begun, seconds)
        raise
    except Exception as error:  # code from elsewhere: this check fails
        raise BrokenContractError(f"{name}() has raised {type(error).__name__} instead of OSError: {error}") from error
    _in_time(name, begun, seconds)
    return found


def _in_time(name: str, begun: float, seconds: float) -> None:
    taken = time.monotonic() - begun
    _expect(taken < seconds + _SLACK_S, f"{name}() took {taken:.2f} s instead of up to {seconds:g}")


def _expect(is_right: bool, text: str) -> None:
    if not is_right:
        raise BrokenContractError(text)


# The checks. Each returns what it has seen.


def _stored(connector: KVConnector) -> str:
    blocks = _blocks(_MANY)
    _expect(_find(connector, blocks) == 0, "blocks are found that were never stored")
    _expect(all(_store(connector, block) for block in blocks), "a block that was never there is not new")
    count = _find(connector, blocks)
    _expect(count == len(blocks), f"{count} of {len(blocks)} blocks are found after they were stored")
    loaded = sum(_load(connector, blocks))
    _expect(loaded == len(blocks), f"{loaded} of {len(blocks)} blocks are loaded")
    _expect(not _store(connector, blocks[0]), "a block that is there is new")
    return f"{len(blocks)} blocks"


def _gaps(connector: KVConnector) -> str:
    blocks = _blocks(6)
    for place in (0, 1, 3, 4):
        _store(connector, blocks[place])
    count = _find(connector, blocks)
    _expect(count == 2, f"find() counts {count} blocks, but the third is missing")
    loaded = _load(connector, blocks)
    _expect(loaded[:2] == [True, True] and not loaded[2], f"of blocks with a gap are loaded: {loaded}")
    _expect(_find(connector, []) == 0, "of no blocks some are found")
    _load(connector, [])
    return "find() ends at the first missing block"


def _sizes(connector: KVConnector) -> str:
    for size in _SIZES:
        block = _blocks(1, size)[0]
        _store(connector, block)
        for other in (size, size + 1, size - 1 or 2, 4 * size):
            is_loaded = _load(connector, [block], [other])[0] if other == size else _misses(connector, block, other)
            _expect(is_loaded == (other == size), f"a block of {size} bytes, asked for with {other}: {is_loaded}")
            _store(connector, block)  # a connector may have removed what did not fit
    return f"{_SIZES[0]} byte to {_SIZES[-1] >> 20} MiB; another size is a miss"


def _misses(connector: KVConnector, block: _Block, size: int) -> bool:
    """Return whether a block goes into a place of another size."""
    room = BlockToLoad(block.name, [memoryview(bytearray(size))], _KEY)
    _call("load", lambda: connector.load(1, [room]), FETCH_S)
    return room.is_loaded


def _damage(connector: KVConnector) -> str:
    spots = (0, 20, 40, -1, None)
    for at in spots:
        (block,) = _blocks(1)
        damaged = _Damaged(block, at)
        _call("store", partial(connector.store, damaged), FETCH_S)
        _expect(not _load(connector, [block])[0], "a damaged block is loaded")
        _store(connector, block)
        is_loaded = _load(connector, [block])[0]
        _expect(is_loaded, "a damaged block stays: remove it if take() returns False, so that it is stored again")
    return f"{len(spots)} kinds are misses, and are replaced"


def _overwritten(connector: KVConnector) -> str:
    (block,) = _blocks(1)
    changed = BlockToStore(block.name, block.parts, _KEY, lambda: False)
    is_new = _call("store", lambda: connector.store(changed), FETCH_S)
    _expect(is_new is False, "a block that the engine has overwritten in the meantime counts as stored")
    _expect(_find(connector, [block]) == 0, "a block that the engine has overwritten in the meantime is kept")
    return "what the engine overwrites while it is stored is not kept"


def _restart(make: Callable[[], KVConnector]) -> str:
    (block,) = _blocks(1)
    with _opened(make) as first:
        _store(first, block)
    with _opened(make) as second:
        found = _find(second, [block])
        _store(second, block)
        _expect(_load(second, [block])[0], "a second connector does not work after the first was closed")
    return f"a second connector finds {found} of 1 blocks of the first"


_CHECKS: dict[str, Callable[[KVConnector], str]] = {
    "stored": _stored,
    "gaps": _gaps,
    "sizes": _sizes,
    "damage": _damage,
    "overwritten": _overwritten,
}


def _through(fault: Fault, wire: Wire, connector: KVConnector) -> str:
    """Use the connector while its wire has a fault, and after it."""
    blocks, longest = _blocks(16), 0.0
    _until_kept(connector, blocks, "it does not work before the fault")
    num_errors = 0
    calls: list[Callable[[], object]] = [
        lambda: _find(connector, blocks),
        lambda: _load(connector, blocks),
        lambda: _store(connector, blocks[0]),
    ]
    wire.fault = fault
    try:
        for call in calls:
            begun = time.monotonic()
            try:
                call()
            except OSError:
                num_errors += 1
            longest = max(longest, time.monotonic() - begun)
    finally:
        wire.fault = None  # also after a broken contract: the next check begins without a fault
    _until_kept(connector, blocks, f"it does not work again {_BACK_S:g} s after the fault")
    return f"{num_errors} of 3 calls raised OSError, the longest took {longest:.2f} s; all blocks after it"


def _until_kept(connector: KVConnector, blocks: Sequence[_Block], fault: str) -> None:
    """Store these blocks until all can be loaded. Errors: BrokenContractError with the fault after _BACK_S."""
    end = time.monotonic() + _BACK_S
    while time.monotonic() < end:
        try:
            for block in blocks:
                _store(connector, block)
            if all(_load(connector, blocks)):
                return
        except OSError:
            time.sleep(_REST_S)
    raise BrokenContractError(fault)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
