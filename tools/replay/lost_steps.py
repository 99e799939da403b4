"""LostSteps: an executor for the replay of a capture whose engine lost steps with its workers: it drops them, too."""

from typing import NamedTuple

import numpy as np

from core.capture.records import Step
from core.execution.executor import Executor, StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput


class LostSteps:
    """What an EngineCore uses of an Executor, around one. A step without any token in the capture yields none here.

    Which rows a step samples follows from its plan, so only a lost step can have tokens here and none in the capture.
    """

    def __init__(self, executor: Executor) -> None:
        self.info, self.grammars = executor.info, executor.grammars
        self._executor = executor
        self._step: Step | None = None

    def feed(self, step: Step) -> None:
        """Set the step that is replayed next."""
        self._step = step

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Begin a step."""
        return _Handle(self, plan, self._executor.execute(plan))

    def output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the output of a plan as far as the captured engine had it."""
        step = self._step
        if step is not None and step.result_step == plan.step and not step.token_counts and step.pooled is None:
            recorded = np.frombuffer(step.tokens, "<i4")
            if not step.candidate_rows and (recorded == NO_TOKEN).all():
                return ModelRunnerOutput(plan.step, recorded.astype(np.int32))
        return output


class _Handle(NamedTuple):
    steps: LostSteps
    plan: SchedulerOutput
    handle: StepHandle

    def result(self) -> ModelRunnerOutput:
        return self.steps.output(self.plan, self.handle.result())
