"""What a model with recurrent layers asks of an engine's config.

A row's recurrent state is that of the last token it has computed. A request begins with a part of another's tokens
where the state behind them is kept (core/batch/kept_states.py), and a row goes back to the state before a wrong draft
(core/runner/state_rows.py). What would need the states of other earlier tokens is refused by name.
"""

import msgspec

from core.execution.executor import ModelInfo
from core.execution.state_slots import num_draft_states
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.block_stores import stores_of
from ipc.options.config import EngineConfig
from ipc.options.workers import has_workers


def for_recurrent_layers(config: EngineConfig, info: ModelInfo, memory_bytes: int) -> EngineConfig:
    """Return the config of a model with recurrent layers, with max_num_seqs for which half of memory_bytes has states.

    A quarter of these at least is for states that are kept for later requests, if there is a prefix cache; and there is
    none without chunked prefill, since a prompt is cut where a state is kept.
    memory_bytes: of states and KV blocks together.

    Errors: ConfigError for an option that the model does not have, with what to leave out. OutOfMemoryError if there is
    no room for one state.
    """
    wanted = {
        "preemption_mode": (
            config.preemption_mode != "recompute",
            "states of preempted requests are computed again, and not copied: use 'recompute'",
        ),
        **dict.fromkeys(stores_of(config), (True, "its requests take over no KV blocks of others")),
        "kv_host_bytes": (
            bool(config.kv_host_bytes or config.num_host_blocks),
            "its requests take over no KV blocks of others",
        ),
        "distributed_executor_backend": (has_workers(config), "its states are in the engine's process"),
    }
    for option, (is_wanted, reason) in wanted.items():
        if is_wanted:
            raise ConfigError(f"{option}: {info.name} has recurrent layers; {reason}. Leave it out")
    fitting = memory_bytes // 2 // info.state_bytes
    if not fitting:
        raise OutOfMemoryError(
            f"the recurrent state of a request takes {info.state_bytes} bytes, more than half of "
            f"kv_cache_memory_bytes={memory_bytes}: set it to at least {2 * info.state_bytes}"
        )
    num_drafts = num_draft_states(msgspec.structs.replace(config, kv_cache_memory_bytes=memory_bytes), info.state_bytes)
    if config.speculative_config is not None and not num_drafts:
        raise ConfigError(
            f"speculative_config: a draft of {info.name} needs a recurrent state of {info.state_bytes} bytes, and a "
            f"sixteenth of kv_cache_memory_bytes={memory_bytes} has no room for one: set it to at least "
            f"{16 * info.state_bytes}, or leave speculative_config out"
        )
    num_kept = fitting // 4 if config.enable_prefix_caching and config.enable_chunked_prefill else 0
    most = fitting - num_kept - num_drafts
    return msgspec.structs.replace(
        config, enable_prefix_caching=num_kept > 0, max_num_seqs=min(config.max_num_seqs, most)
    )
