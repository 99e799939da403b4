"""The local executor: one model on this machine's CPU, in the engine process, one step at a time."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import torch

from core.device import num_threads
from core.execution.executor import Costs, FinishedStep, ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.model_files.loading import LoadedModel, load_model
from core.runner.model_runner import ModelRunner
from ipc.config import EngineConfig
from ipc.errors import OutOfMemoryError
from ipc.files.hub import hub_name
from ipc.files.model_files import resolve_model
from kernels.memory.blocks_ahead import BlocksAhead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LocalExecutor:
    """Loads the model when it is made. Errors: ModelFileError, UnsupportedModelError, ConfigError."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(num_threads(config))
        self._ahead: BlocksAhead | None = None  # of a cache in the machine's memory
        path = resolve_model(config.model)
        dtype = self._dtype = self.choose_dtype(config)
        self._loaded = load_model(path, dtype, config)
        self._model = self._loaded.model
        self.info = ModelInfo(
            name=hub_name(path) or path.name,
            fingerprint=_fingerprint(self._loaded, dtype),
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            numerics=self._model.numerics,
        )

    @staticmethod
    def choose_dtype(config: EngineConfig) -> torch.dtype:
        """auto: bfloat16 where the CPU multiplies it, else float32."""
        return DTYPES[config.dtype] if config.dtype != "auto" else torch.bfloat16 if _has_bfloat16() else torch.float32

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """On a CPU the budget is the cache's: a step's working memory is small beside it and bounded."""
        return memory_bytes // self._model.bytes_per_block(block_size)

    def cache_memory_bytes(self) -> int | None:
        return None

    def initialize_cache(self, config: EngineConfig) -> None:
        assert config.num_blocks_override is not None, "the config is not resolved"
        assert config.max_model_len is not None, "the config is not resolved"
        self._model.settle_length(config.max_model_len)
        self.info = msgspec.structs.replace(self.info, fingerprint=_fingerprint(self._loaded, self._dtype))
        try:
            self.runner = ModelRunner(
                self._model,
                num_rows=config.max_num_seqs,
                num_blocks=config.num_blocks_override,
                block_size=config.block_size,
                eos_token_ids=self.info.eos_token_ids,
                logprobs_mode=config.logprobs_mode,
                num_swap_blocks=config.num_swap_blocks or 0,
            )
        except MemoryError as error:
            raise OutOfMemoryError(
                f"{error}; lower kv_cache_memory_bytes, max_model_len or swap_space_bytes"
            ) from error

        self._ahead = BlocksAhead(self.runner.cache)

    def measure_costs(self) -> Costs:
        return self.runner.measure_costs()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        if self._ahead is not None:
            self._ahead.use(np.concatenate([plan.block_ids, *(new.block_ids for new in plan.added)]))
        return FinishedStep(self.runner.execute(plan))

    def prepare_ahead(self) -> bool:
        return self._ahead is not None and self._ahead.take()

    def close(self) -> None:
        """Memory goes with the process."""


def create(config: EngineConfig) -> LocalExecutor:
    return LocalExecutor(config)


def _has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    words = set(flags.split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})  # the last is aarch64's name


def _fingerprint(loaded: LoadedModel, dtype: torch.dtype) -> str:
    parts = (loaded.fingerprint, str(dtype), loaded.model.variant, torch.__version__)
    return loaded.label + hashlib.sha256("\n".join(parts).encode()).hexdigest()
