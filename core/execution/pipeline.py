"""Pipeline: the steps in flight between the scheduler and the executor."""

from collections import deque

from core.execution.executor import Executor, StepHandle
from core.execution.plan import ModelRunnerOutput, SchedulerOutput


class Pipeline:
    """A queue of at most `depth` steps in flight.

    Depth 1 runs each step to its end. Depth 2 schedules a step before the last one's tokens are known (async
    scheduling).
    """

    def __init__(self, executor: Executor, depth: int) -> None:
        self._executor = executor
        self._depth = depth
        self._steps: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps that have begun and whose results were not taken yet."""
        return len(self._steps)

    def execute(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput] | None:
        """Begin the plan, and return a finished step's plan and output, or None.

        It waits for the oldest step when the pipeline is full, or when the plan is empty.
        """
        if not plan.is_empty:
            self._steps.append((plan, self._executor.execute(plan)))
        if self._steps and (plan.is_empty or len(self._steps) == self._depth):
            oldest, handle = self._steps.popleft()
            return oldest, handle.result()
        return None
