"""The local executor: it runs one model on this machine's CPU, in the engine process, one step at a time."""

from pathlib import Path

import numpy as np

from core.execution.executor import Costs, FinishedStep, StepCosts, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.load import load, load_draft_model
from core.executors.run import caches_that_fit, runner_sizes
from core.grammars.grammars import model_grammars
from core.runner.model_drafter import num_spare_blocks
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
        self._draft_model, self._max_num_seqs = load_draft_model(config, self._loaded), config.max_num_seqs
        settings = config.speculative_config
        self._num_drafts = 0 if settings is None or self._draft_model is None else settings.num_speculative_tokens
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes.

        On a CPU the whole budget is for the cache: a step's working memory is bounded, and small in comparison. A draft
        model has as many blocks, and some of its own.
        """
        each, own = self._model.bytes_per_block(block_size), 0
        if self._draft_model is not None:
            of_draft = self._draft_model.bytes_per_block(block_size)
            each, own = each + of_draft, of_draft * num_spare_blocks(self._max_num_seqs, self._num_drafts, block_size)
        return max(0, memory_bytes - own) // each

    def cache_memory_bytes(self) -> int | None:
        """Return None: there is no device with memory of its own."""
        return None

    def initialize_cache(self, config: EngineConfig) -> None:
        """Allocate the KV cache of the resolved config. Errors: OutOfMemoryError."""
        assert config.max_model_len is not None, "the config is not resolved"
        self.info = self._loaded.settle_length(config.max_model_len)
        drafter, num_drafts = self._draft_model, self._num_drafts
        if drafter is not None:
            drafter.settle_length(min(config.max_model_len, drafter.max_model_len))
        sizes, pooler = runner_sizes(config, self.info, self.grammars), self._loaded.source.pooler
        with caches_that_fit():
            self.runner = ModelRunner(self._model, **sizes, draft_model=drafter, num_drafts=num_drafts, pooler=pooler)
        self._ahead = BlocksAhead(self.runner.cache)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        return self.runner.measure_costs()

    def measure_steps(self) -> StepCosts:
        """Return the measured durations of steps and drafts."""
        return StepCosts(self.runner.measure_steps(), self.runner.measure_drafts())

    def warm_up(self) -> int:
        """Run a short step and return its duration in ns."""
        return self.runner.warm_up()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step; the returned step is finished."""
        self._ahead.use(np.concatenate([plan.block_ids, *(new.block_ids for new in plan.starts)]))
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
