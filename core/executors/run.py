"""RunnerSizes: the arguments of a model runner, from a config; a part of the executors that run a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from core.execution.executor import ModelInfo
from core.grammars.grammars import Grammars
from ipc.errors import OutOfMemoryError
from ipc.options.config import LogprobsMode
from ipc.options.resolved import ResolvedConfig


class RunnerSizes(TypedDict):
    """The keyword arguments common to all model runners."""

    num_rows: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    logprobs_mode: LogprobsMode
    num_swap_blocks: int
    grammars: Grammars


def runner_sizes(config: ResolvedConfig, info: ModelInfo, grammars: Grammars) -> RunnerSizes:
    """Return the runner's arguments."""
    return RunnerSizes(
        num_rows=config.max_num_seqs,
        num_blocks=config.num_blocks_override * max(1, config.kv_page_blocks),
        block_size=config.block_size,
        eos_token_ids=info.eos_token_ids,
        logprobs_mode=config.logprobs_mode,
        num_swap_blocks=config.num_host_slots,
        grammars=grammars,
    )


def num_blocks_in(memory_bytes: int, each: int, of_draft: int = 0, num_spare: int = 0) -> int:
    """Return the number of KV blocks of `each` bytes in memory_bytes.

    of_draft: bytes of a draft model's block, of which there are as many, and num_spare more.
    """
    return max(0, memory_bytes - of_draft * num_spare) // (each + of_draft)


@contextmanager
def caches_that_fit() -> Iterator[None]:
    """Turn the MemoryError of a cache that does not fit into an OutOfMemoryError that names the options."""
    try:
        yield
    except MemoryError as error:
        options = "kv_cache_memory_bytes, max_model_len, swap_space_bytes or kv_host_bytes"
        raise OutOfMemoryError(f"{error}; lower {options}") from error
