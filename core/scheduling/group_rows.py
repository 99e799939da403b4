"""GroupRows: the limit by which the rows of a beam search start together or not at all."""

from core.batch.batch import Batch
from core.batch.request import NO_ROW, Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft


class GroupRows:
    """A Limit of max_num_seqs rows, of which those that a running group still lacks are kept free for it.

    A group's first row starts where rows for all of the group are free, and a block for each of them.
    """

    def __init__(self, batch: Batch, max_num_seqs: int) -> None:
        self._batch = batch
        self._max_num_seqs = max_num_seqs
        self._groups: list[list[Request]] = []  # of which a row runs or starts
        self._draft: Draft | None = None  # the step that is being planned
        self._starting: list[Request] = []  # in that step

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Return NO_ROW where the free rows are promised to groups, or too few for this one; NO_BLOCKS for blocks."""
        self._begin(draft)
        request = start.request
        is_group = request.searches
        if is_group and any(request.choices is group for group in self._groups):
            return None
        needed = len(request.choices) if is_group else 1
        free = self._max_num_seqs - len(self._batch) - len(self._starting) - self._num_promised()
        if free < needed:
            return Examined(request, Verdict.NO_ROW, needed, max(0, free))
        if is_group and len(self._batch):
            blocks = start.num_lacking + (needed - 1) * self._batch.blocks_of_a_block
            left = self._batch.pool.num_free - self._batch.num_promised_blocks()
            if left < blocks:
                return Examined(request, Verdict.NO_BLOCKS, blocks, max(0, left))
        return None

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Count the row, and keep rows for the others of its group."""
        self._begin(draft)
        request = start.request
        self._starting.append(request)
        if request.searches and not any(request.choices is group for group in self._groups):
            self._groups.append(request.choices)

    def give_back(self, request: Request) -> None:
        """Do nothing: rows are counted in the batch."""

    def _begin(self, draft: Draft) -> None:
        if self._draft is not draft:
            self._draft, self._starting = draft, []
            self._groups = [group for group in self._groups if any(one.row != NO_ROW for one in group)]

    def _num_promised(self) -> int:
        """Return how many rows the groups lack."""
        return sum(one.row == NO_ROW and one not in self._starting for group in self._groups for one in group)
