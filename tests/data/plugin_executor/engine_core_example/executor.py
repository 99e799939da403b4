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
        return self._inner.determine_num_available_blocks(memory_bytes, block_size)

    def cache_memory_bytes(self) -> int | None:
        return self._inner.cache_memory_bytes()

    def initialize_cache(self, config: EngineConfig) -> None:
        self._inner.initialize_cache(config)

    def measure_costs(self) -> Costs:
        return self._inner.measure_costs()

    def measure_steps(self) -> StepCosts:
        return self._inner.measure_steps()

    def warm_up(self) -> int:
        return self._inner.warm_up()

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        return self._inner.execute(plan)

    def prepare_ahead(self) -> bool:
        return self._inner.prepare_ahead()

    def close(self) -> None:
        self._inner.close()


def create(config: EngineConfig) -> ExampleExecutor:
    return ExampleExecutor(config)
