"""PacedExecutor: the fake executor with a minimum step duration, like a real model's steps.

Without it the executor runs far ahead of any reader, so that a measurement of a reader would only show how messages are
merged.
"""

import time

from core.execution.executor import StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import FakeExecutor
from ipc.options.config import EngineConfig


class PacedExecutor(FakeExecutor):
    """A FakeExecutor with steps of at least the option step_us."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._step_ns = self.options.step_us * 1000
        self._due_ns = 0  # monotonic; end of the previous step

    def warm_up(self) -> int:
        """Return the duration of every step."""
        return max(super().warm_up(), self._step_ns)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, and wait until its duration has passed."""
        begin_ns = max(self._due_ns, time.monotonic_ns())
        handle = super().execute(plan)
        self._due_ns = begin_ns + self._step_ns
        time.sleep(max(0, self._due_ns - time.monotonic_ns()) / 1e9)
        return handle


def create(config: EngineConfig) -> PacedExecutor:
    """Create the executor for this config."""
    return PacedExecutor(config)
