"""The model runners of the stages before the last: mirrors of the batch that learn tokens after their step."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.runner.model_runner import ModelRunner
from core.workers.rank_runners import FollowsTrials, LeadsTrials
from ipc.tables.arrays import NO_INT32S, Bools, Int32s, Ints


@dataclass
class _Awaited:
    """A step whose tokens are not known here yet."""

    plan: SchedulerOutput
    rows: Ints  # [R]
    live: Bools  # [R] whether the row still belongs to the same request


class EarlierRunner(ModelRunner):
    """The runner of a stage before the last. It samples nothing.

    The engine plans a row's next token when it knows the one before, and tells that first. A row may have been removed
    meanwhile, and belong to another request; then its token is nobody's here.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        none = dict.fromkeys(("grammars", "drafter", "pooler", "adapters", "features"))
        super().__init__(*arguments, **{**options, **none})
        self._awaited: deque[_Awaited] = deque()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run the stage's part of one step; the output is nobody's."""
        self.apply_blocks(plan)
        if len(plan.removed_rows):
            for one in self._awaited:
                one.live &= ~np.isin(one.rows, plan.removed_rows)
        self.model.wake()
        inputs = self.prepare(plan)
        self.forward(inputs)
        self._awaited.append(_Awaited(plan, inputs.rows, np.ones(len(inputs.rows), np.bool_)))
        return ModelRunnerOutput(plan.step, NO_INT32S)

    def learn(self, tokens: Int32s, counts: Int32s | None) -> None:
        """Append the tokens of the oldest step whose tokens were not told: columns of ModelRunnerOutput."""
        step = self._awaited.popleft()
        if counts is not None:
            self._learn_runs(step, tokens, counts)
            return
        known = step.live & (tokens >= 0)
        if not self._awaited and known.all():  # the newest inputs are of this step
            self._inputs.append(step.rows, tokens)
        else:
            self.table.append_tokens(step.rows[known], tokens[known])

    def _learn_runs(self, step: _Awaited, tokens: Int32s, counts: Int32s) -> None:
        owners = np.arange(len(counts)).repeat(counts)
        finite = (tokens >= 0) & step.live[owners]
        known = np.bincount(owners[finite], minlength=len(counts))
        going = known > 0
        self.table.append_tokens(step.rows[going], tokens[finite], known[going])
        self.table.accept(step.plan, np.where(step.live, counts, 0))

    def _trial_step(self, num_tokens: int) -> None:
        self.forward(self._trial_inputs(num_tokens, num_tokens))


class EarlierLeadingRunner(LeadsTrials, EarlierRunner):
    """The runner of the first rank of such a stage."""


class EarlierFollowingRunner(FollowsTrials, EarlierRunner):
    """The runner of another rank of such a stage."""
