"""MortalExecutor of the tests: a PagedExecutor that loses all that it holds when it is told to, in this process."""

from collections.abc import Callable

import numpy as np

from core.execution.executor import StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.inputs import ExecutorLost, ExecutorNews, ExecutorRestored
from ipc.options.config import EngineConfig
from tools.lab.check_scheduler.paged_executor import PagedExecutor


class MortalPagedExecutor(PagedExecutor):
    """After lose() every step is lost, those in flight too; after go_on() it is a new one that knows no request."""

    def __init__(self, config: EngineConfig, poison: int | None = None) -> None:
        super().__init__(config, poison)
        self.is_lost = False
        self.num_lost_steps = 0
        self.lives = 0

    def lose(self) -> ExecutorLost:
        self.is_lost = True
        return ExecutorLost("a test")

    def restore(self) -> ExecutorRestored:
        return ExecutorRestored()

    def follow(self, tell: Callable[[ExecutorNews], None]) -> None:
        raise AssertionError("the tests tell the core themselves")

    def go_on(self) -> None:
        self.forget()
        self.is_lost = False
        self.lives += 1

    def execute(self, plan: SchedulerOutput) -> "_MortalHandle":  # type: ignore[override]
        if self.is_lost:
            return _MortalHandle(self, plan, None, self.lives)
        return _MortalHandle(self, plan, super().execute(plan), self.lives)


class _MortalHandle:
    def __init__(self, executor: MortalPagedExecutor, plan: SchedulerOutput, inner: StepHandle | None, life: int):
        self._executor, self._plan, self._inner, self._life = executor, plan, inner, life

    def result(self) -> ModelRunnerOutput:
        executor = self._executor
        if self._inner is None or executor.is_lost or executor.lives != self._life:
            executor.num_lost_steps += 1
            return ModelRunnerOutput(self._plan.step, np.full(len(self._plan.rows), NO_TOKEN, np.int32))
        return self._inner.result()
