"""An executor in another distribution: the fake executor's tokens, from a vocabulary of its own size."""

import msgspec

from engine_core.executors import (
    ConfigError,
    Costs,
    EngineConfig,
    FakeExecutor,
    FakeOptions,
    SchedulerOutput,
    StepCosts,
    StepHandle,
)

#: The version of engine_core.executors for which this module is written.
EXECUTOR_API = (1, 0)


class ExampleExecutor:
    """An Executor made of another one; the methods are described in engine_core.executors.Executor."""

    def __init__(self, config: EngineConfig) -> None:
        options = dict(config.executor_options)
        size = options.pop("vocabulary", "1000")
        if options or not size.isdecimal():
            raise ConfigError(f"executor 'example' has the option vocabulary=N; got {config.executor_options}")
        self._inner = FakeExecutor(config, FakeOptions(vocab_size=int(size)))
        self.info = msgspec.structs.replace(self._inner.info, name="example", fingerprint=f"example-1-{size}")
        self.grammars, self.adapters = self._inner.grammars, self._inner.adapters

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return how many KV blocks fit into this memory."""
        return self._inner.determine_num_available_blocks(memory_bytes, block_size)

    def cache_memory_bytes(self) -> int | None:
        """Return the memory for KV blocks that is left; None = the engine decides."""
        return self._inner.cache_memory_bytes()

    def initialize_cache(self, config: EngineConfig) -> None:
        """Allocate the KV cache of the resolved configuration."""
        self._inner.initialize_cache(config)

    def measure_costs(self) -> Costs:
        """Measure what a copy of a block and the computation of a token cost."""
        return self._inner.measure_costs()

    def measure_steps(self) -> StepCosts:
        """Measure how long steps take."""
        return self._inner.measure_steps()

    def warm_up(self) -> int:
        """Run what the first step would otherwise wait for."""
        return self._inner.warm_up()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Begin a step."""
        return self._inner.execute(plan)

    def prepare_ahead(self) -> bool:
        """Use idle time for later steps; return whether another call could be of use."""
        return self._inner.prepare_ahead()

    def close(self) -> None:
        """Release all that the executor holds."""
        self._inner.close()


def create(config: EngineConfig) -> ExampleExecutor:
    """Return the executor for this configuration. Errors: ConfigError."""
    return ExampleExecutor(config)
