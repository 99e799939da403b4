"""The local executor: it runs one model on this machine's CPU, in the engine process, one step at a time."""

from pathlib import Path

import numpy as np

from core.execution.executor import Costs, FinishedStep, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.load import load
from core.executors.run import caches_that_fit, runner_sizes
from core.grammars.grammars import model_grammars
from core.runner.model_runner import ModelRunner
from ipc.config import EngineConfig
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory.blocks_ahead import BlocksAhead


class LocalExecutor:
    """An Executor on the CPU."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the config's model. Errors: ModelFileError, UnsupportedModelError, ConfigError."""
        self._loaded = load(config, usual_dtype())
        self._model, self.info = self._loaded.model, self._loaded.info
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes.

        On a CPU the whole budget is for the cache: a step's working memory is bounded, and small in comparison.
        """
        return memory_bytes // self._model.bytes_per_block(block_size)

    def cache_memory_bytes(self) -> int | None:
        """Return None: there is no device with memory of its own."""
        return None

    def initialize_cache(self, config: EngineConfig) -> None:
        """Allocate the KV cache of the resolved config. Errors: OutOfMemoryError."""
        assert config.max_model_len is not None, "the config is not resolved"
        self.info = self._loaded.settle_length(config.max_model_len)
        with caches_that_fit():
            self.runner = ModelRunner(self._model, **runner_sizes(config, self.info, self.grammars))
        self._ahead = BlocksAhead(self.runner.cache)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        return self.runner.measure_costs()

    def measure_steps(self) -> tuple[int, ...]:
        """Return the measured durations of steps of 1, 2, 4, ... tokens with logits each, in ns."""
        return self.runner.measure_steps()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step; the returned step is finished."""
        self._ahead.use(np.concatenate([plan.block_ids, *(new.block_ids for new in plan.added)]))
        return FinishedStep(self.runner.execute(plan))

    def prepare_ahead(self) -> bool:
        """Take memory for blocks of later steps; return False if no more is needed for now."""
        return self._ahead.take()

    def close(self) -> None:
        """Do nothing: the memory is freed when the process ends."""


def create(config: EngineConfig) -> LocalExecutor:
    """Create the executor for this config."""
    return LocalExecutor(config)


def usual_dtype() -> Dtype:
    """Return bfloat16 if the CPU can multiply it, else float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return FLOAT32
    words = set(flags.split())
    has_bfloat16 = words & {"avx512_bf16", "amx_bf16", "bf16"}  # bf16 is aarch64's name
    return BFLOAT16 if has_bfloat16 else FLOAT32
