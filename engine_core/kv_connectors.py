"""The names that a KV connector in another distribution uses; docs/scale_out.md explains them.

KV_CONNECTOR_API is their version: the major number changes if connectors break, the minor one if something is added.
"""

from core.tiers.block_file import BlockToLoad, BlockToStore
from core.tiers.connector import FETCH_S, KV_CONNECTOR_API, LOOK_S, KVConnector
from ipc.errors import ConfigError
from ipc.options.block_stores import KVTransferConfig
from ipc.options.config import EngineConfig

__all__ = [
    "FETCH_S",
    "KV_CONNECTOR_API",
    "LOOK_S",
    "BlockToLoad",
    "BlockToStore",
    "ConfigError",
    "EngineConfig",
    "KVConnector",
    "KVTransferConfig",
]
