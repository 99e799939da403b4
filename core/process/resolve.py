"""Resolves the config when the engine starts: the ResolvedConfig.

A pure function: the machine's sizes are arguments.
"""

from collections.abc import Callable

import msgspec

from core.execution.executor import Costs, ModelInfo, StepCosts
from core.execution.state_slots import (
    most_drafts,
    num_draft_states,
    num_sharing_steps,
    num_state_slots,
    num_swap_states,
)
from core.execution.token_budget import encoder_sizes, token_budget
from core.kv.cache_kinds import CacheRoom, cache_room
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.log_lines import counted
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.step_sizes import SizedConfig, with_rows
from ipc.options.workers import overlaps
from ipc.tables.rounding import ceil_div

MAX_DEFAULT_CACHE_BYTES = 4 << 30
#: The fewest host blocks for a store behind the host, per kind of layer: half of them may be read into at once.
MIN_EXCHANGE_BLOCKS = 2
_PROBE_BYTES = 1 << 40  # divided by the number of blocks that fit, it gives the bytes per block

#: A function from (memory in bytes, tokens per block) to the number of KV blocks that fit, including the null block.
BlocksIn = Callable[[int, int], int]


def default_cache_bytes(total_memory_bytes: int) -> int:
    """Return the default size of the KV cache in bytes: a quarter of the memory, at most 4 GiB."""
    return max(1, min(total_memory_bytes // 4, MAX_DEFAULT_CACHE_BYTES))


def resolve(
    given: EngineConfig,
    info: ModelInfo,
    blocks_in: BlocksIn,
    *,
    total_memory_bytes: int,
    num_cpus: int,
    device_bytes: int | None = None,
    step_tokens: int = 0,
) -> ResolvedConfig:
    """Return the config with every size set.

    It sets dtype, max_num_seqs, max_model_len, max_num_batched_tokens, max_num_encoder_input_tokens,
    encoder_cache_size, kv_cache_memory_bytes, num_blocks_override (the number of KV blocks, including the null block),
    threads, num_swap_blocks, num_host_blocks, kv_window, kv_page_blocks and async_scheduling. Costs of preemption that
    are not given are 1 until resolve_costs(), which needs the cache.
    device_bytes: free bytes for the cache on a device. step_tokens: what max_num_batched_tokens is at least by default,
    unless requests then take more of the cache. An encoder computes whole prompts and caches none of them.

    Errors: ConfigError if max_model_len exceeds the model's, kv_window or kv_page_blocks differ from the model's,
    kv_dir has too few blocks on the host, or max_num_batched_tokens, max_num_encoder_input_tokens or
    encoder_cache_size is too small (core/execution/token_budget.py).
    OutOfMemoryError, with what to change, if the cache cannot hold one request.
    """
    memory_bytes = given.kv_cache_memory_bytes or device_bytes or default_cache_bytes(total_memory_bytes)
    config = with_rows(given, info.device_memory_bytes)
    if info.is_encoder:
        config = msgspec.structs.replace(config, enable_chunked_prefill=False, enable_prefix_caching=False)
    if info.state_bytes:
        config = for_recurrent_layers(config, info, memory_bytes)
    _check_length(config, info)
    config = msgspec.structs.replace(config, kv_cache_memory_bytes=memory_bytes)
    num_others = num_state_slots(config, info.state_bytes) + num_draft_states(config, info.state_bytes)
    states = (config.max_num_seqs + num_others) * info.state_bytes  # those of swapped requests are not of this memory
    available = config.num_blocks_override or blocks_in(memory_bytes - states, config.block_size)
    bytes_per_block = ceil_div(_PROBE_BYTES, max(1, blocks_in(_PROBE_BYTES, config.block_size)))
    room = _room(config, info)
    max_model_len = _max_model_len(config, info, room, available, memory_bytes, bytes_per_block)
    budget = _budget(config, info, max_model_len, 0 if info.kv_page_blocks else step_tokens)
    useful = config.max_num_seqs * room.num_pages(max_model_len) + 1
    if info.is_encoder:  # no block outlives its step, and each row has one that is not full
        useful = min(useful, ceil_div(budget, config.block_size) + config.max_num_seqs + 1)
    decided = {
        "dtype": info.dtype,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": budget,
        "kv_cache_memory_bytes": memory_bytes,
        "num_blocks_override": config.num_blocks_override or min(available, useful, 2**30),
        "threads": config.threads or min(max(1, num_cpus), 1024),
        "async_scheduling": overlaps(config),
        "num_swap_blocks": _num_swap_blocks(config, info, bytes_per_block // max(1, info.kv_page_blocks)),
        "num_host_blocks": _num_host_blocks(config, info, bytes_per_block),
        "kv_window": _kv_window(config, info),
        "kv_page_blocks": info.kv_page_blocks,
        "recompute_ns_per_token": config.recompute_ns_per_token or 1,
        "swap_ns_per_block": config.swap_ns_per_block or 1,
        **encoder_sizes(config, info, budget),
    }
    return ResolvedConfig(**{**msgspec.structs.asdict(config), **decided})


def resolve_costs(
    config: ResolvedConfig,
    given: EngineConfig,
    measure: Callable[[], Costs],
    measure_steps: Callable[[], StepCosts] = StepCosts,
) -> ResolvedConfig:
    """Return the config with the costs of preemption, and with speculation those of steps.

    given: the unresolved config. Costs are measured only if they affect decisions and are not given.
    """
    if (speculative := config.speculative_config) is not None and not speculative.step_ns:
        speculative = msgspec.structs.replace(speculative, **measure_steps()._asdict())
    config = msgspec.structs.replace(config, speculative_config=speculative)
    if config.preemption_mode != "auto" or None not in (given.recompute_ns_per_token, given.swap_ns_per_block):
        return config
    costs = measure()
    return msgspec.structs.replace(
        config,
        recompute_ns_per_token=given.recompute_ns_per_token or costs.recompute_ns_per_token,
        swap_ns_per_block=given.swap_ns_per_block or costs.swap_ns_per_block,
    )


def _check_length(config: SizedConfig, info: ModelInfo) -> None:
    if config.max_model_len is not None and config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {counted(info.max_model_len, 'token')} that "
            f"{info.name} supports: use at most {info.max_model_len}, or leave it out"
        )


def _kv_window(config: SizedConfig, info: ModelInfo) -> int:
    given = config.kv_window
    if given and not 0 < info.kv_window <= given:
        seen = counted(info.kv_window, "token") if info.kv_window else "all tokens before it"
        raise ConfigError(f"kv_window={given}: a token of {info.name} may see {seen}; leave it out, or use 0")
    return info.kv_window if given is None else given


def _budget(config: SizedConfig, info: ModelInfo, max_model_len: int = 0, wanted: int = 0) -> int:
    memory = info.device_memory_bytes
    return token_budget(config, max_model_len, info.max_whole_tokens, device_bytes=memory, wanted=wanted)


def _room(config: SizedConfig, info: ModelInfo) -> CacheRoom:
    """Return how much of the cache requests take: pages, if layers with a window have their own blocks."""
    if config.kv_page_blocks not in (None, info.kv_page_blocks):
        raise ConfigError(
            f"kv_page_blocks={config.kv_page_blocks}: a page of {info.name} has "
            f"{counted(info.kv_page_blocks, 'KV block')}: leave it out, or use 0"
        )
    num_step_tokens = 0
    if info.kv_page_blocks:
        num_step_tokens = _budget(config, info)
    return cache_room(config, _kv_window(config, info), info.kv_page_blocks, num_step_tokens)


def _num_swap_blocks(config: SizedConfig, info: ModelInfo, bytes_per_block: int) -> int:
    if config.preemption_mode == "recompute":
        return 0
    if config.num_swap_blocks is not None:
        return config.num_swap_blocks
    states = num_swap_states(config, info.state_bytes) * info.state_bytes
    return min((config.swap_space_bytes - states) // bytes_per_block, 2**30)


def _num_host_blocks(config: SizedConfig, info: ModelInfo, bytes_per_page: int) -> int:
    """Return the number of host blocks for what the cache evicts. A window block takes as many as a page has."""
    if not config.enable_prefix_caching:
        return 0
    bytes_per_block = bytes_per_page // max(1, info.kv_page_blocks)
    fewest = MIN_EXCHANGE_BLOCKS * (1 + info.kv_page_blocks)
    count = config.num_host_blocks
    if count is None:
        count = min(config.kv_host_bytes // bytes_per_block, 2**30)
    stores = config.kv_stores
    if stores and count < fewest:
        given = "num_host_blocks" if config.num_host_blocks is not None else "kv_host_bytes"
        least = fewest * (1 if config.num_host_blocks is not None else bytes_per_block)
        raise ConfigError(
            f"{stores[0]} needs room for {counted(fewest, 'KV block')} on the host, and "
            f"{given}={getattr(config, given)} is {count} (a block has {bytes_per_block} bytes): set {given} to at "
            f"least {least}, or leave out {stores[0]}"
        )
    return count


def _max_model_len(
    config: SizedConfig,
    info: ModelInfo,
    room: CacheRoom,
    available: int,
    memory_bytes: int,
    bytes_per_block: int,
) -> int:
    fitting = room.longest(available - 1)  # tokens; block 0 is the null block
    if fitting < 2:
        needed = room.num_pages(2) + 1
        raise OutOfMemoryError(
            f"the KV cache has room for {counted(max(0, available), 'block')} of "
            f"{counted(config.block_size, 'token')}, but needs at least {needed} (including the null block): "
            f"{_remedy(config, memory_bytes, needed, bytes_per_block)}"
        )
    if config.max_model_len is None:
        return min(info.max_model_len, fitting)
    if config.max_model_len > fitting:
        needed = room.num_pages(config.max_model_len) + 1
        raise OutOfMemoryError(
            f"a request of max_model_len={counted(config.max_model_len, 'token')} needs {counted(needed, 'KV block')} "
            f"of {counted(config.block_size, 'token')} (including the null block), but the cache has {available}: set "
            f"max_model_len to at most {fitting}, or {_remedy(config, memory_bytes, needed, bytes_per_block)}"
        )
    return config.max_model_len


def _remedy(config: SizedConfig, memory_bytes: int, needed: int, bytes_per_block: int) -> str:
    if config.num_blocks_override is not None:
        return f"set num_blocks_override to at least {needed}"
    return f"set kv_cache_memory_bytes to at least {needed * bytes_per_block} (it is {memory_bytes})"


# What a model with recurrent layers requires of an engine's config.
#
# A row's recurrent state covers all tokens that it has computed. A request can start with some of another's tokens if
# the state after them is kept (core/batch/kept_states.py), and a row can go back to the state before a wrong draft
# (core/runner/state_rows.py).


def for_recurrent_layers(config: SizedConfig, info: ModelInfo, memory_bytes: int) -> SizedConfig:
    """Return the config of a model with recurrent layers, with a max_num_seqs whose states fit half of memory_bytes.

    At least a quarter of the states are kept for later requests, if there is a prefix cache.
    memory_bytes: for states and KV blocks together.

    Errors: ConfigError if there is no room for the state of a draft; OutOfMemoryError if there is none for one state.
    """
    fitting = memory_bytes // 2 // info.state_bytes
    if not fitting:
        raise OutOfMemoryError(
            f"the recurrent state of a request takes {info.state_bytes} bytes, more than half of "
            f"kv_cache_memory_bytes={memory_bytes}: set it to at least {2 * info.state_bytes}"
        )
    settled = msgspec.structs.replace(config, kv_cache_memory_bytes=memory_bytes)
    num_drafts = num_draft_states(settled, info.state_bytes)
    if config.speculative_config is not None and not most_drafts(settled, info.state_bytes):
        num_steps = num_sharing_steps(config)
        raise ConfigError(
            f"speculative_config: a draft of {info.name} needs a recurrent state of {info.state_bytes} bytes, and a "
            f"sixteenth of kv_cache_memory_bytes={memory_bytes} is too small for "
            f"{counted(num_steps, 'draft')} in flight: set it to at least {16 * num_steps * info.state_bytes}, or "
            "leave speculative_config out"
        )
    num_kept = fitting // 4 if config.enable_prefix_caching else 0
    most = fitting - num_kept - num_drafts
    return msgspec.structs.replace(
        config, enable_prefix_caching=num_kept > 0, max_num_seqs=min(config.max_num_seqs, most)
    )
