"""The local executor: one model on this machine's CPU, in the engine process, one step at a time."""

from pathlib import Path

import numpy as np
import torch

from core.device import num_threads
from core.execution.executor import Costs, FinishedStep, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.load import load
from core.executors.run import caches_that_fit, runner_sizes
from core.runner.model_runner import ModelRunner
from ipc.config import EngineConfig
from kernels.memory.blocks_ahead import BlocksAhead


class LocalExecutor:
    """Loads the model when it is made. Errors: ModelFileError, UnsupportedModelError, ConfigError."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(num_threads(config))
        self._loaded = load(config, usual_dtype())
        self._model, self.info = self._loaded.model, self._loaded.info

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """On a CPU the budget is the cache's: a step's working memory is small beside it and bounded."""
        return memory_bytes // self._model.bytes_per_block(block_size)

    def cache_memory_bytes(self) -> int | None:
        return None

    def initialize_cache(self, config: EngineConfig) -> None:
        assert config.max_model_len is not None, "the config is not resolved"
        self.info = self._loaded.settle_length(config.max_model_len)
        with caches_that_fit():
            self.runner = ModelRunner(self._model, **runner_sizes(config, self.info))
        self._ahead = BlocksAhead(self.runner.cache)

    def measure_costs(self) -> Costs:
        return self.runner.measure_costs()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        self._ahead.use(np.concatenate([plan.block_ids, *(new.block_ids for new in plan.added)]))
        return FinishedStep(self.runner.execute(plan))

    def prepare_ahead(self) -> bool:
        return self._ahead.take()

    def close(self) -> None:
        """Memory goes with the process."""


def create(config: EngineConfig) -> LocalExecutor:
    return LocalExecutor(config)


def usual_dtype() -> torch.dtype:
    """Return bfloat16 where the CPU multiplies it, else float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    words = set(flags.split())
    has_bfloat16 = words & {"avx512_bf16", "amx_bf16", "bf16"}  # the last is aarch64's name
    return torch.bfloat16 if has_bfloat16 else torch.float32
