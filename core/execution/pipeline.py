"""Pipeline: the steps in flight between the scheduler and the executor, and the objects that watch them."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from core.execution.executor import Executor, MortalExecutor, StepHandle, UpdatesWeights
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.wire.weights_messages import WeightsMark


class StepWatcher(Protocol):
    """Watches steps, for example to log them.

    It changes nothing, and is called next to the executor rather than wrapping it.
    """

    def begin(self, plan: SchedulerOutput) -> None:
        """Handle a plan that the executor is about to run."""

    def end(self, output: ModelRunnerOutput) -> None:
        """Handle the output of the oldest unfinished step."""


class Pipeline:
    """A queue of at most `depth` steps in flight.

    Depth 1 finishes each step before the next. Depth 2 schedules a step before the previous one's tokens are known
    (async scheduling). watchers: called for each step, in this order.
    """

    def __init__(self, executor: Executor, depth: int, watchers: Sequence[StepWatcher] = ()) -> None:
        self._executor = executor
        self._depth = depth
        self.watchers = tuple(watchers)
        self._steps: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps that were started and whose results have not been taken yet."""
        return len(self._steps)

    @property
    def plans(self) -> list[SchedulerOutput]:
        """Return the plans of the steps in flight, oldest first."""
        return [plan for plan, _ in self._steps]

    def resume(self, plans: Sequence[SchedulerOutput]) -> None:
        """Restart steps that were in flight in another pipeline, without calling the watchers."""
        assert not self._steps, f"{len(self._steps)} steps are in flight already"
        self._steps.extend((plan, self._executor.execute(plan)) for plan in plans)

    def go_on(self) -> None:
        """Let an executor whose processes were lost and restarted take plans. It has no requests then."""
        if isinstance(self._executor, MortalExecutor):  # otherwise it belongs to a replay, which has lost nothing
            self._executor.go_on()

    def use_weights(self, mark: WeightsMark) -> None:
        """Let the executor compute with these weights from the next plan on, which adds all rows from scratch.

        Errors: ModelFileError.
        """
        if isinstance(self._executor, UpdatesWeights):  # otherwise it belongs to a replay with recorded tokens
            assert not self._steps, f"{len(self._steps)} steps are in flight"
            self._executor.use_weights(mark)

    def sleep(self, level: int) -> None:
        """Let the executor free its memory; see UpdatesWeights."""
        if isinstance(self._executor, UpdatesWeights):
            self._executor.sleep(level)

    def wake_up(self) -> None:
        """Tell the executor that plans come again; see UpdatesWeights."""
        if isinstance(self._executor, UpdatesWeights):
            self._executor.wake_up()

    def execute(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput] | None:
        """Start the plan, and return the plan and output of a finished step, or None.

        It waits for the oldest step if the pipeline is full or the plan is empty.
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
