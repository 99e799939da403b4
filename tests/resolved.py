"""A ResolvedConfig for tests that start no engine: what core/process/resolve.py would have set, made by hand."""

from typing import Any

from ipc.options.resolved import ResolvedConfig

#: No blocks on the host, one kind of layers, one step at a time.
_USUAL: dict[str, Any] = {
    "executor": "fake",
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2**30,
    "num_host_blocks": 0,
    "num_swap_blocks": 0,
    "kv_window": 0,
    "kv_page_blocks": 0,
    "threads": 1,
    "async_scheduling": False,
    "recompute_ns_per_token": 1,
    "swap_ns_per_block": 1,
    "max_num_encoder_input_tokens": 64,
    "encoder_cache_size": 1024,
}


def resolved_config(num_blocks_override: int, max_model_len: int, **options: Any) -> ResolvedConfig:
    """Return a config of the fake executor with these options."""
    sizes = {"num_blocks_override": num_blocks_override, "max_model_len": max_model_len}
    return ResolvedConfig(**{**_USUAL, **sizes, **options})
