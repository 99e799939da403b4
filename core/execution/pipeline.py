"""Pipeline: the steps in flight between the scheduler and the executor, and those who watch them."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from core.execution.executor import Executor, MortalExecutor, StepHandle
from core.execution.plan import ModelRunnerOutput, SchedulerOutput


class StepWatcher(Protocol):
    """An onlooker of the steps, such as a log. It changes nothing, and it stands beside the executor, not around it."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Take note of a plan that the executor is about to run."""

    def end(self, output: ModelRunnerOutput) -> None:
        """Take note of the output of the oldest step that has not ended."""


class Pipeline:
    """A queue of at most `depth` steps in flight.

    Depth 1 runs each step to its end. Depth 2 schedules a step before the last one's tokens are known (async
    scheduling). watchers: told of each step, in this order.
    """

    def __init__(self, executor: Executor, depth: int, watchers: Sequence[StepWatcher] = ()) -> None:
        self._executor = executor
        self._depth = depth
        self.watchers = tuple(watchers)
        self._steps: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps that have begun and whose results were not taken yet."""
        return len(self._steps)

    @property
    def plans(self) -> list[SchedulerOutput]:
        """Return the plans of the steps in flight, the oldest first."""
        return [plan for plan, _ in self._steps]

    def resume(self, plans: Sequence[SchedulerOutput]) -> None:
        """Begin steps again that were in flight in another pipeline, without telling watchers of them."""
        assert not self._steps, f"{len(self._steps)} steps are in flight already"
        self._steps.extend((plan, self._executor.execute(plan)) for plan in plans)

    def go_on(self) -> None:
        """Let an executor whose processes were lost and started again take plans. It knows of no request then."""
        if isinstance(self._executor, MortalExecutor):  # else it is that of a replay, which has lost nothing
            self._executor.go_on()

    def execute(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput] | None:
        """Begin the plan, and return a finished step's plan and output, or None.

        It waits for the oldest step when the pipeline is full, or when the plan is empty.
        """
        if not plan.is_empty:
            for watcher in self.watchers:
                watcher.begin(plan)
            self._steps.append((plan, self._executor.execute(plan)))
        if self._steps and (plan.is_empty or len(self._steps) == self._depth):
            oldest, handle = self._steps.popleft()
            output = handle.result()
            for watcher in self.watchers:
                watcher.end(output)
            return oldest, output
        return None
