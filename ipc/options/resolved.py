"""ResolvedConfig: an EngineConfig in which the engine has decided every size. core/process/resolve.py makes it."""

import msgspec

from ipc.options.step_sizes import SizedConfig


class ResolvedConfig(SizedConfig, frozen=True, kw_only=True, omit_defaults=True):
    """The options that an engine runs with, once it knows its model and its machine.

    Only options that are off without a value are still None. The options declared here are None in an EngineConfig
    until the engine decides them; their bounds and texts are EngineConfig's.
    """

    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    num_blocks_override: int  # including the null block
    num_host_blocks: int
    num_swap_blocks: int
    kv_window: int
    kv_page_blocks: int
    threads: int
    async_scheduling: bool
    recompute_ns_per_token: int
    swap_ns_per_block: int
    max_num_encoder_input_tokens: int = 0  # 0: the model has no images
    encoder_cache_size: int = 0

    def __post_init__(self) -> None:
        undecided = [name for name in DECIDED if getattr(self, name) is None]
        assert not undecided, f"not resolved: {', '.join(undecided)}"
        super().__post_init__()


#: The options that the engine decides. Those with a default are missing from captures of earlier versions.
DECIDED = tuple(field.name for field in msgspec.structs.fields(ResolvedConfig) if field.required)
