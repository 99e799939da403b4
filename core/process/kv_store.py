"""The folder of KV blocks that an engine's config names, between its scheduler and its executor."""

from collections.abc import Callable

from core import log
from core.engine import EngineCore
from core.execution.executor import Executor
from core.execution.host_blocks import host_blocks_of
from core.inputs import StoreNews
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore
from core.tiers.portable_names import PortableNames
from core.tiers.store_thread import StoreThread
from ipc.config import EngineConfig
from ipc.errors import ConfigError


def open_store(config: EngineConfig, executor: Executor, tell: Callable[[StoreNews], None]) -> StoreThread | None:
    """Open the folder that the config names; None: it names none, or the engine caches no prefixes.

    tell: called with each answer, from a thread. Errors: ConfigError.
    """
    if config.kv_dir is None or not config.num_host_blocks:
        return None
    host = host_blocks_of(executor)
    if host is None:
        raise ConfigError(f"kv_dir: executor {config.executor!r} keeps no blocks in this process: leave it out")
    assert config.num_blocks_override is not None, "the config is not resolved"
    folder = BlockFolder(config.kv_dir, config.kv_dir_bytes)
    content = f"{executor.info.fingerprint}\n{executor.info.dtype}\n{host.layout}"
    names = PortableNames(folder.key, content, config.block_size)
    if host.bytes_per_block * 2 > config.kv_dir_bytes:
        log.say(f"engine-core: kv_dir_bytes has no room for two blocks of {host.bytes_per_block} bytes")
    num_blocks = config.num_blocks_override + config.num_host_blocks
    return StoreThread(BlockStore(folder, names, host, num_blocks), tell)


def with_orders(turn: Callable[[int], None], core: EngineCore, store: StoreThread | None) -> Callable[[int], None]:
    """Return what the loop calls after each round: `turn`, and the orders of the step given to the store."""
    if store is None:
        return turn

    def both(num_waiting: int) -> None:
        turn(num_waiting)
        store.put(core.take_orders())

    return both
