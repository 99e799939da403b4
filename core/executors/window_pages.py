"""What the config says of pages, by which layers with a window give KV blocks back (core/models/cache_pages.py)."""

from ipc.block_stores import stores_of
from ipc.config import EngineConfig


def keeping_option(config: EngineConfig) -> str | None:
    """Return the option with which layers keep all blocks, where only some layers have a window; None: there is none.

    The tiers behind the cache copy blocks of all layers together, and a step of whole prompts needs them all.
    """
    if config.kv_window == 0:
        return "kv_window"
    if config.kv_page_blocks == 0:
        return "kv_page_blocks"
    if not config.enable_chunked_prefill:
        return "enable_chunked_prefill"
    if config.kv_host_bytes or config.num_host_blocks:
        return "kv_host_bytes"
    return next(iter(stores_of(config)), None)
