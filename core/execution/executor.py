"""What the engine needs of an executor."""

import importlib.util
from typing import NamedTuple, Protocol

import msgspec

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.config import EngineConfig
from ipc.errors import ConfigError


class ModelInfo(msgspec.Struct, frozen=True):
    """What an executor tells of its model once it is loaded."""

    name: str
    fingerprint: str  # hex: config, weights ("dummy-" before it if made up), dtype, kernels; equal at L2 = equal tokens
    dtype: str  # of the weights and the KV cache: what EngineConfig.dtype "auto" has become
    vocab_size: int
    max_model_len: int  # tokens the model was made for
    eos_token_ids: tuple[int, ...]
    numerics: str  # "L0" | "L1" | "L2"


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's tokens. Handles are asked in the order of their steps, each once."""


class FinishedStep(NamedTuple):
    """The handle of a step that execute() has run to its end."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return the step's output at once."""
        return self.output


class Costs(NamedTuple):
    """Of bringing a preempted request back; at least 1 each."""

    recompute_ns_per_token: int
    swap_ns_per_block: int  # one way


class Executor(Protocol):
    """Runs plans. It sees requests only through them, in step order; its constructor loads the model."""

    info: ModelInfo

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """KV blocks (null block included) of block_size tokens that fit memory_bytes."""

    def cache_memory_bytes(self) -> int | None:
        """What is free for the KV cache on a device of its own; None: it shares the machine's memory. Errors:
        OutOfMemoryError."""

    def initialize_cache(self, config: EngineConfig) -> None:
        """Allocate the KV cache and the host's blocks; config is resolved. Errors: OutOfMemoryError."""

    def measure_costs(self) -> Costs:
        """Once, before the first step: it writes into free blocks."""

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Begin a step; plan is not empty."""

    def prepare_ahead(self) -> bool:
        """There is nothing to run: use some milliseconds for steps to come. Whether more could be of use."""

    def close(self) -> None:
        """Give back what the executor holds; it is not used afterwards."""


def check_triton() -> None:
    """Raise a ConfigError where device=cuda has no Triton to run its kernels with."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device=cuda needs triton, which is not installed: pip install 'llm-engine-core[cuda]'")
