"""Number of recurrent states: of rows, kept for later requests, of swapped requests, and before a step's drafts.

An executor stores them in this order.
"""

from ipc.options.step_sizes import SizedConfig
from ipc.options.workers import most_in_flight

#: The most states kept per row, in addition to those at places where a later prompt may leave an earlier one.
_EACH = 4
#: The most such places of a prompt (core/batch/kept_states.py).
MOST_GUESSES = 64
#: The most drafts in a step. The state before each is kept until the step's tokens are known.
_MOST_DRAFTS = 32


def num_states(config: SizedConfig, state_bytes: int) -> int:
    """Return the number of all states."""
    kept, swapped = num_state_slots(config, state_bytes), num_swap_states(config, state_bytes)
    return config.max_num_seqs + kept + swapped + num_draft_states(config, state_bytes)


def num_state_slots(config: SizedConfig, state_bytes: int) -> int:
    """Return the number of slots for kept states of state_bytes: what is left of half of the cache's memory.

    config: kv_cache_memory_bytes and max_num_seqs are resolved. 0 without a prefix cache, or for models without states.
    """
    if not state_bytes or not config.enable_prefix_caching or config.kv_cache_memory_bytes is None:
        return 0
    left = config.kv_cache_memory_bytes // 2 // state_bytes - config.max_num_seqs
    return max(0, min(left - num_draft_states(config, state_bytes), _EACH * config.max_num_seqs + 2 * MOST_GUESSES))


def num_draft_states(config: SizedConfig, state_bytes: int) -> int:
    """Return how many drafts have a state before them: an eighth of what half of the memory can hold.

    config: kv_cache_memory_bytes is resolved. 0 without speculation, or for models without states.
    """
    if not state_bytes or config.speculative_config is None or config.kv_cache_memory_bytes is None:
        return 0
    return min(config.kv_cache_memory_bytes // 2 // state_bytes // 8, _MOST_DRAFTS)


def most_drafts(config: SizedConfig, state_bytes: int) -> int:
    """Return how many drafts a step may have."""
    return num_draft_states(config, state_bytes) // num_sharing_steps(config)


def num_sharing_steps(config: SizedConfig) -> int:
    """Return how many steps share the states before drafts.

    In all stages but the last, and on a GPU, each that is in flight: their tokens are known later.
    """
    return most_in_flight(config) if config.pipeline_parallel_size > 1 or config.device == "cuda" else 1


def num_swap_states(config: SizedConfig, state_bytes: int) -> int:
    """Return how many swapped requests have room for their states: in half of the swap space.

    config: max_num_seqs is resolved. 0 if requests are only recomputed, or for models without states.
    """
    if not state_bytes or config.preemption_mode == "recompute":
        return 0
    return min(config.swap_space_bytes // 2 // state_bytes, _EACH * config.max_num_seqs)
