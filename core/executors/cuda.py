"""The CUDA executor: one model on one GPU, driven from the engine process; a step is begun and asked for later."""

import torch

from core.device import cuda_device, num_threads
from core.execution.executor import Costs, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.cuda_memory import CudaMemory
from core.executors.load import load
from core.executors.run import caches_that_fit, runner_sizes
from core.models.llama import Llama
from core.models.triton_operations import TritonOperations
from core.runner.cuda_model_runner import CudaModelRunner
from ipc.config import EngineConfig


class CudaExecutor:
    """Loads the model when it is made. Errors: ModelFileError, UnsupportedModelError, OutOfMemoryError; ConfigError
    where there is no device or the model is not one of ours."""

    def __init__(self, config: EngineConfig) -> None:
        device = cuda_device()
        torch.set_num_threads(num_threads(config))
        # Under Triton's interpreter bfloat16 is slow.
        model, self.info, *_ = load(config, torch.bfloat16 if device.type == "cuda" else torch.float32)
        assert isinstance(model, Llama), type(model)
        assert isinstance(model.operations, TritonOperations), type(model.operations)
        self._model, self._operations = model, model.operations
        self._memory = CudaMemory(model, model.operations, config)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        return memory_bytes // self._model.bytes_per_block(block_size)

    def cache_memory_bytes(self) -> int | None:
        return self._memory.cache_bytes()

    def initialize_cache(self, config: EngineConfig) -> None:
        assert config.max_model_len is not None, "the config is not resolved"
        with caches_that_fit():
            self.runner = CudaModelRunner(
                self._model,
                self._operations,
                max_model_len=config.max_model_len,
                use_graphs=not config.enforce_eager,
                **runner_sizes(config, self.info),
            )

    def measure_costs(self) -> Costs:
        return self.runner.measure_costs()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        return self.runner.begin(plan)

    def prepare_ahead(self) -> bool:
        """The cache's memory is the device's, and there from the start."""
        return False

    def close(self) -> None:
        """Memory goes with the process."""


def create(config: EngineConfig) -> CudaExecutor:
    return CudaExecutor(config)
