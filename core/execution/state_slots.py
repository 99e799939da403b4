"""num_state_slots: how many recurrent states an engine keeps for later requests, beside those of its rows."""

from ipc.config import EngineConfig

#: Most states that are kept for each row.
_EACH = 4


def num_state_slots(config: EngineConfig, state_bytes: int) -> int:
    """Return the number of slots in which states of state_bytes are kept: what is left of half of the cache's memory.

    config: kv_cache_memory_bytes and max_num_seqs are resolved. 0 without a prefix cache, or for models without states.
    """
    if not state_bytes or not config.enable_prefix_caching or config.kv_cache_memory_bytes is None:
        return 0
    left = config.kv_cache_memory_bytes // 2 // state_bytes - config.max_num_seqs
    return max(0, min(left, _EACH * config.max_num_seqs))
