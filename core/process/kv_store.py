"""The folder of KV blocks that an engine's config names, between its scheduler and its executor."""

from collections.abc import Callable

from core.engine import EngineCore
from core.execution.executor import Executor
from core.execution.shared_blocks import shared_blocks_of
from core.inputs import StoreNews
from core.tiers.block_file import HEAD_BYTES
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore
from core.tiers.portable_names import PortableNames
from core.tiers.store_thread import StoreThread
from ipc.config import EngineConfig
from ipc.errors import ConfigError


def open_folder(config: EngineConfig, executor: Executor) -> BlockFolder | None:
    """Open the folder that the config names; None: it names none, or the engine caches no prefixes.

    Errors: ConfigError for a folder that cannot be used or has no room for a block, or an executor that does not share
    its blocks.
    """
    if config.kv_dir is None or not config.num_host_blocks:
        return None
    blocks = shared_blocks_of(executor)
    if blocks is None:
        raise ConfigError(f"kv_dir: executor {config.executor!r} keeps no blocks in this process: leave it out")
    file_bytes = HEAD_BYTES + blocks.cache.bytes_per_block
    if config.kv_dir_bytes < file_bytes:
        raise ConfigError(
            f"kv_dir_bytes={config.kv_dir_bytes} is less than the file of one KV block, which has {file_bytes} bytes: "
            f"set it to at least {file_bytes}, and to as much as the disk has for it"
        )
    return BlockFolder(config.kv_dir, config.kv_dir_bytes)


def start_store(
    folder: BlockFolder | None, executor: Executor, core: EngineCore, tell: Callable[[StoreNews], None]
) -> StoreThread | None:
    """Start the thread that carries out the core's orders. tell: called from it with each answer."""
    exchange, blocks = core.scheduler.exchange, shared_blocks_of(executor)
    if folder is None or exchange is None or blocks is None:
        return None
    content = f"{executor.info.fingerprint}\n{executor.info.dtype}\n{blocks.layout}"
    names = PortableNames(folder.key, content, core.scheduler.block_size)
    return StoreThread(BlockStore(folder, names, blocks, core.scheduler.pool.names.content, exchange.evictions), tell)


def with_orders(turn: Callable[[int], None], core: EngineCore, store: StoreThread | None) -> Callable[[int], None]:
    """Return what the loop calls after each round: `turn`, and the orders of the step given to the store."""
    if store is None:
        return turn

    def both(num_waiting: int) -> None:
        turn(num_waiting)
        store.put(core.take_orders())

    return both
