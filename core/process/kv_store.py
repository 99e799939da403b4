"""The stores of KV blocks that an engine's config names (a folder, peers), for its scheduler and executor."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from core.batch.batch import Batch
from core.border.allow_list import AllowList
from core.border.socket_rounds import AddressedMessage
from core.border.zap import start_zap
from core.engine import EngineCore
from core.execution.executor import Executor
from core.execution.shared_blocks import SharedBlocks, shared_blocks_of
from core.inputs import EngineInput, StoreNews
from core.process.loop import Engine
from core.tiers.block_file import HEAD_BYTES
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BesideContents, BlocksServed, BlockStore, Shelves
from core.tiers.memory_shelf import Contents, MemoryShelf
from core.tiers.peer_server import PeerServer, Shelf
from core.tiers.peers import Peers
from core.tiers.portable_names import PortableNames
from core.tiers.store_thread import StoreThread
from ipc.errors import ConfigError
from ipc.options.block_stores import addresses_of, read_key_file
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints
from ipc.wire.sockets import BoundRouter, Context, bind_router, check_address, keys_of


class OpenStores(NamedTuple):
    """What an engine's config names, checked and opened. key: for the blocks' names and digests."""

    blocks: SharedBlocks
    key: bytes
    folder: BlockFolder | None
    peers: Peers | None
    listening: tuple[Context, BoundRouter] | None


def open_stores(config: ResolvedConfig, executor: Executor) -> OpenStores | None:
    """Open what the config names. None: it names nothing, or the engine has no prefix cache.

    Errors: ConfigError for a folder or key that cannot be used, a folder without room for one block, and an executor
    that does not share its blocks; AddressError.
    """
    stores = config.kv_stores
    if not stores or not config.num_host_blocks:
        return None
    blocks = shared_blocks_of(executor)
    if blocks is None:
        raise ConfigError(f"{stores[0]}: executor {config.executor!r} does not share its blocks: leave it out")
    key = b"" if config.kv_key_file is None else read_key_file(config.kv_key_file)
    peers = None if config.kv_peers is None else _peers(config.kv_peers, key)
    listening = None if config.kv_listen is None else _listen(config.kv_listen)
    try:
        largest = blocks.cache.bytes_per_block * max(1, config.kv_page_blocks)
        folder = None if config.kv_dir is None else _open_folder(config.kv_dir, config.kv_dir_bytes, largest, key)
    except BaseException:
        if listening is not None:
            listening[1].close(0)
            listening[0].destroy(0)
        raise
    assert key or folder is not None, "no key: ResolvedConfig asks for kv_key_file"
    return OpenStores(blocks, key or (folder.key if folder is not None else b""), folder, peers, listening)


def _open_folder(path: str, max_bytes: int, block_bytes: int, key: bytes) -> BlockFolder:
    file_bytes = HEAD_BYTES + block_bytes
    if max_bytes < file_bytes:
        raise ConfigError(
            f"kv_dir_bytes={max_bytes} is less than the file of one KV block, {file_bytes} bytes: "
            f"set it to at least {file_bytes}, or as much as the disk can spare"
        )
    return BlockFolder(path, max_bytes, key)


def _peers(kv_peers: str, key: bytes) -> Peers:
    addresses = addresses_of(kv_peers)
    for address in addresses:
        check_address(address, binding=False)
    return Peers(addresses, key)


def _listen(address: str) -> tuple[Context, BoundRouter]:
    """Return the context and the bound socket for peers with the address's keys, or on this machine."""
    context: Context = zmq.Context()
    try:
        keys = keys_of(address)
        start_zap(context, None if keys is None else AllowList(keys))
        return context, bind_router(context, address)
    except BaseException:
        context.term()
        raise


def start_store(
    stores: OpenStores | None, executor: Executor, core: EngineCore, tell: Callable[[StoreNews], None]
) -> StoreThread | None:
    """Start the thread that carries out the core's orders. tell: called in it with each answer."""
    scheduler = core.scheduler
    if stores is None or scheduler.exchange is None:
        return None
    blocks = stores.blocks
    content = f"{executor.info.fingerprint}\n{executor.info.dtype}\n{blocks.layout}"
    names = PortableNames(stores.key, content, scheduler.block_size)
    return StoreThread(_block_store(stores, names, scheduler.batch, scheduler.exchange.evictions), tell)


def _block_store(stores: OpenStores, names: PortableNames, batch: Batch, evictions: Ints) -> BlockStore:
    """Return an engine's store."""
    host, blocks, block_names = batch.host_cache, stores.blocks, batch.pool.names

    def shelves(contents: Contents, host_contents: Ints) -> Shelves:
        of_host = MemoryShelf(blocks.host, host_contents, host.times_given, stores.key, first=host.first)
        return Shelves(MemoryShelf(blocks.cache, contents, evictions, stores.key), of_host)

    beside = BesideContents(block_names) if block_names.beside else None
    of_beside = None if beside is None else shelves(beside, host.beside[0].content)
    served = _served(stores, shelves(block_names.content, host.names.content), of_beside)
    return BlockStore(
        stores.folder,
        names,
        blocks,
        block_names.content,
        evictions,
        peers=stores.peers,
        served=served,
        beside=beside,
    )


def _served(stores: OpenStores, named: Shelves, beside: Shelves | None) -> BlocksServed | None:
    """Return what peers can get of blocks in memory and in the folder; None: no peers are served."""
    if stores.listening is None:
        return None
    asked: list[Shelf] = [*named, *(beside or ()), *([] if stores.folder is None else [stores.folder])]
    return BlocksServed(named, PeerServer(*stores.listening, asked), beside)


class WithOrders:
    """An engine whose orders are given to the store after each step, before the step's results are reported.

    So a client that then requests the blocks of a finished request from a peer finds them.
    """

    def __init__(self, engine: Engine, core: EngineCore, store: StoreThread) -> None:
        self._engine, self._core, self._store = engine, core, store

    @property
    def has_work(self) -> bool:
        """See the engine's method."""
        return self._engine.has_work

    @property
    def has_unfinished(self) -> bool:
        """See the engine's method."""
        return self._engine.has_unfinished

    def count_waiting(self) -> tuple[int, int]:
        """See the engine's method."""
        return self._engine.count_waiting()

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[AddressedMessage]:
        """Run a step, and give its orders to the store."""
        messages = self._engine.step(inbox, now_ns)
        self._store.put(self._core.take_orders())
        return messages


def with_orders(engine: Engine, core: EngineCore, store: StoreThread | None) -> Engine:
    """Return the engine with its orders given to the store, or the engine itself if there is no store."""
    return engine if store is None else WithOrders(engine, core, store)
