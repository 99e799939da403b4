"""The CUDA executor: runs one model on one GPU from the engine process. Results are read after the launch."""

import torch

from core.device import cuda_device, num_threads
from core.execution.executor import Costs, StepCosts, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.cuda_memory import CudaMemory, most_alone
from core.executors.load import load
from core.executors.run import caches_that_fit, runner_sizes
from core.grammars.grammars import model_grammars
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.runner.cuda_model_runner import CudaModelRunner
from core.runner.trial_loop import loop_costs
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.workers import overlaps
from kernels.elements import BFLOAT16, FLOAT32


class CudaExecutor:
    """An Executor on a GPU."""

    adapters = None  # the config refuses them

    def __init__(self, config: EngineConfig) -> None:
        """Load the config's model.

        Errors: ModelFileError, UnsupportedModelError, OutOfMemoryError; ConfigError if there is no device or the model
        is not an in-tree one.
        """
        device = cuda_device()
        torch.set_num_threads(num_threads(config))
        # float32 without a GPU, because bfloat16 is slow in Triton's interpreter.
        self._loaded = load(config, lambda *_: BFLOAT16 if device.type == "cuda" else FLOAT32)
        model, self.info = self._loaded.model, self._loaded.info
        assert isinstance(model, Llama), type(model)
        assert isinstance(model.operations, TritonOperations), type(model.operations)
        self._model, self._operations = model, model.operations
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)
        self.memory = CudaMemory(model, model.operations, config)
        self._overlaps = overlaps(config)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes."""
        return memory_bytes // self._model.bytes_per_block(block_size)

    def cache_memory_bytes(self) -> int | None:
        """Return the bytes of GPU memory left for the KV cache; see CudaMemory. Errors: OutOfMemoryError."""
        return self.memory.cache_bytes()

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache of the resolved config. Errors: OutOfMemoryError."""
        self.info = self._loaded.settle_length(config.max_model_len)
        with caches_that_fit():
            self.runner = CudaModelRunner(
                self._model,
                self._operations,
                max_model_len=config.max_model_len,
                use_graphs=not config.enforce_eager,
                most_alone=most_alone(config),
                **runner_sizes(config, self.info, self.grammars),
            )

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        return self.runner.measure_costs()

    def measure_steps(self) -> StepCosts:
        """Return the measured durations of steps, and the additional cost of drafts.

        If steps overlap, a step takes as long as the longer of the host's and the device's work. A step whose rows all
        have drafts takes the sum of both, because nothing overlaps with it.
        """
        durations = self.runner.measure_steps()
        loop = self.runner.measure_loop() if self._overlaps else None
        if loop is None:
            return StepCosts(durations)
        return loop_costs(loop, durations, self.runner.measure_overlapping(durations))

    def warm_up(self) -> int:
        """Return 0: the first launch of a kernel may compile it, so the time of one short step predicts nothing."""
        return 0

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Launch one step and return its handle."""
        return self.runner.begin(plan)

    def prepare_ahead(self) -> bool:
        """Return False: all of the device's memory is allocated at the start."""
        return False

    def close(self) -> None:
        """Do nothing: the memory is freed when the process ends."""


def create(config: EngineConfig) -> CudaExecutor:
    """Create the executor for this config."""
    return CudaExecutor(config)
