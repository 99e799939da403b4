"""DraftPause: when an executor's drafter makes no drafts, since the last ones were not worth a place in a plan."""

from core.execution.plan import SchedulerOutput

#: While no plan takes the drafts, the next ones are made after 1, 2, 4, ... steps, at most so many.
_LONGEST = 64


class DraftPause:
    """What became of the last drafts that were offered, and how long to wait for the next ones."""

    def __init__(self) -> None:
        self._offered = False
        self._length, self._num_steps = 0, 0

    def begins(self, plan: SchedulerOutput) -> bool:
        """Return whether to make no drafts in this step. It is called once a step."""
        if self._offered:
            self._offered = False
            self._length = 0 if len(plan.num_draft_tokens) else min(2 * self._length + 1, _LONGEST)
            self._num_steps = 0
        self._num_steps += 1
        return self._num_steps <= self._length

    def offer(self, has_drafts: bool) -> None:
        """Learn whether this step's drafts are offered to the next plan."""
        self._offered = has_drafts
