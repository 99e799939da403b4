"""The pages of a config whose layers with a window give KV blocks back (core/models/layers/cache_pages.py)."""

from ipc.options.config import EngineConfig


def keeping_option(config: EngineConfig) -> str | None:
    """Return the option with which layers keep all blocks, where only some layers have a window; None: there is none.

    A step of whole prompts needs them all.
    """
    if config.kv_window == 0:
        return "kv_window"
    if config.kv_page_blocks == 0:
        return "kv_page_blocks"
    return None if config.enable_chunked_prefill else "enable_chunked_prefill"
