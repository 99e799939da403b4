"""PacedExecutor: an executor whose steps take at least a given time, as those of a model do.

Without a pace, the fake executor runs ahead of whoever reads: a measurement of a reader would show merging only.
"""

import time

from core.execution.executor import Costs, Executor, StepHandle
from core.execution.plan import SchedulerOutput
from ipc.config import EngineConfig


class PacedExecutor:
    """Another executor, with steps of at least step_us microseconds."""

    def __init__(self, executor: Executor, step_us: int) -> None:
        self.info = executor.info
        self._executor = executor
        self._step_ns = step_us * 1000
        self._due_ns = 0  # monotonic; end of the step before

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the other executor's number."""
        return self._executor.determine_num_available_blocks(memory_bytes, block_size)

    def cache_memory_bytes(self) -> int | None:
        """Return the other executor's bytes."""
        return self._executor.cache_memory_bytes()

    def initialize_cache(self, config: EngineConfig) -> None:
        """Let the other executor allocate."""
        self._executor.initialize_cache(config)

    def measure_costs(self) -> Costs:
        """Return the other executor's costs."""
        return self._executor.measure_costs()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, and wait until its time is over."""
        begin_ns = max(self._due_ns, time.monotonic_ns())
        handle = self._executor.execute(plan)
        self._due_ns = begin_ns + self._step_ns
        time.sleep(max(0, self._due_ns - time.monotonic_ns()) / 1e9)
        return handle

    def prepare_ahead(self) -> bool:
        """Let the other executor prepare."""
        return self._executor.prepare_ahead()

    def close(self) -> None:
        """Close the other executor."""
        self._executor.close()
