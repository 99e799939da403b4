"""StatefulExecutor: a PagedExecutor whose rows also have a recurrent state, and which reads every state back.

A state is the checksum of the tokens that it covers. So a row that goes on from a state of other tokens, of another
request, of another salt or of a wrong draft is found in the step in which it does.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.execution.state_slots import num_states
from ipc.options.resolved import ResolvedConfig
from tools.lab.check_scheduler.paged_executor import PagedExecutor


class StatefulExecutor(PagedExecutor):
    """Errors: AssertionError for a state of other tokens, also if it is copied or stored too early or too late."""

    def __init__(self, config: ResolvedConfig, poison: int | None = None) -> None:
        super().__init__(config, poison)
        self.info = msgspec.structs.replace(self.info, state_bytes=1)
        self.states = np.zeros(num_states(config, 1), np.uint64)  # by their numbers in plans: those of rows come first
        self.num_copied = self.num_saved = 0

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        super()._copy_blocks(plan)
        for source, target in zip(plan.copied_states.tolist(), plan.copied_states_to.tolist(), strict=True):
            self.states[target] = self.states[source]
        self.num_copied += len(plan.copied_states)
        self._starts = self.table.num_computed_tokens[plan.rows].tolist()

    def sample(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        """Let each row's state go on, and store what the plan wants; then sample, and go on by right drafts."""
        rows, counts = plan.rows.tolist(), plan.num_scheduled_tokens.copy()
        if len(plan.num_draft_tokens):
            counts -= plan.num_draft_tokens
        for row, start, count in zip(rows, self._starts, counts.tolist(), strict=True):
            sums = self._prefix_sums(row, start + count)
            assert not start or self.states[row] == sums[start - 1], f"row {row}: its state is not of {start} tokens"
            self.states[row] = sums[-1]
        saved = zip(plan.saved_rows.tolist(), plan.saved_after.tolist(), plan.saved_slots.tolist(), strict=True)
        for index, after, slot in saved:
            assert 0 < after <= counts[index], (after, counts[index])
            self.states[slot] = self._prefix_sums(rows[index], self._starts[index] + after)[-1]
        self.num_saved += len(plan.saved_rows)
        output = super().sample(plan, samples)
        for row in rows if len(plan.num_draft_tokens) else ():
            self.states[row] = self._prefix_sums(row, int(self.table.num_computed_tokens[row]))[-1]
        return output
