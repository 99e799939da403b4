"""LostSteps: an executor for the replay of a capture whose engine lost steps with its workers: it drops them, too."""

from typing import NamedTuple

import numpy as np

from core.capture.records import Step
from core.execution.executor import Executor, StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput


class LostSteps:
    """What an EngineCore uses of an Executor, around one. A step without a result in the capture yields none here.

    Which rows a step samples follows from its plan, so only a lost step can have tokens here and none in the capture. A
    step that computes a part of a prompt has none in both, and may have drafts.
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
        if step is not None and step.result_step == plan.step and not _has_result(step):
            return ModelRunnerOutput(plan.step, np.frombuffer(step.tokens, "<i4").astype(np.int32))
        return output


def _has_result(step: Step) -> bool:
    """Return whether anything of a step arrived, beside that its rows have no tokens."""
    if step.token_counts or step.draft_counts or step.candidate_rows or step.pooled is not None:
        return True
    return bool((np.frombuffer(step.tokens, "<i4") != NO_TOKEN).any())


class _Handle(NamedTuple):
    steps: LostSteps
    plan: SchedulerOutput
    handle: StepHandle

    def result(self) -> ModelRunnerOutput:
        return self.steps.output(self.plan, self.handle.result())
