"""DraftPause: pauses an executor's drafter if plans did not take the last drafts."""

from core.execution.plan import SchedulerOutput

#: As long as no plan takes the drafts, the next ones are made after 1, 2, 4, ... steps, but at most this many.
_LONGEST = 64


class DraftPause:
    """Whether the last offered drafts were taken, and how long to wait before making new ones."""

    def __init__(self) -> None:
        self._offered = False
        self._length, self._num_steps = 0, 0

    def begins(self, plan: SchedulerOutput) -> bool:
        """Return whether to skip drafts in this step. Called once per step."""
        if self._offered:
            self._offered = False
            self._length = 0 if len(plan.num_draft_tokens) else min(2 * self._length + 1, _LONGEST)
            self._num_steps = 0
        self._num_steps += 1
        return self._num_steps <= self._length

    def offer(self, has_drafts: bool) -> None:
        """Record whether this step's drafts are offered to the next plan."""
        self._offered = has_drafts
