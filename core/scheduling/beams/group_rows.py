"""GroupRows: the limit that makes the rows of a beam search start together or not at all."""

from core.batch.batch import Batch
from core.batch.request import NO_ROW, Request
from core.batch.table import RequestStart
from core.scheduling.admission import Admission
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft


class GroupRows:
    """A limit on rows (max_num_seqs) and blocks that keeps free what running groups still lack.

    A group's first row starts only if rows are free for the whole group, and the blocks to start them. Otherwise groups
    could each hold what the others lack, and none would ever get all of its rows.
    """

    def __init__(self, batch: Batch, admission: Admission, max_num_seqs: int) -> None:
        self._batch, self._admission = batch, admission
        self._max_num_seqs = max_num_seqs
        self._left = 0  # blocks that can still be given to starting requests in the step being planned
        self._groups: list[list[Request]] = []  # with a row that runs or starts
        self._draft: Draft | None = None  # the step being planned
        self._starting: list[Request] = []  # requests that start in that step

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Return NO_ROW or NO_BLOCKS if too few are free, apart from those reserved for groups; None if enough."""
        self._begin(draft)
        request = start.request
        is_group = request.searches
        if is_group and any(request.choices is group for group in self._groups):
            return None
        needed = len(request.choices) if is_group else 1
        lacking = [one for group in self._groups for one in group if one.row == NO_ROW and one not in self._starting]
        free = self._max_num_seqs - len(self._batch) - len(self._starting) - len(lacking)
        if free < needed:
            return Examined(request, Verdict.NO_ROW, needed, max(0, free))
        if (is_group or lacking) and (len(self._batch) or self._starting):
            others = [one for one in request.choices if one is not request] if is_group else []
            before = [one for one in lacking if one.level <= request.level]  # a more urgent request may take their room
            blocks, left = start.num_lacking + self._blocks_of(others), self._left - self._blocks_of(before)
            if left < blocks:
                return Examined(request, Verdict.NO_BLOCKS, blocks, max(0, left))
        return None

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Count the row, and reserve rows for the rest of its group."""
        self._begin(draft)
        request = start.request
        self._starting.append(request)
        self._left -= start.num_lacking
        if request.searches and not any(request.choices is group for group in self._groups):
            self._groups.append(request.choices)

    def give_back(self, request: Request) -> None:
        """Do nothing: the batch counts rows."""

    def _begin(self, draft: Draft) -> None:
        if self._draft is not draft:
            self._draft, self._starting = draft, []
            self._groups = [group for group in self._groups if any(one.row != NO_ROW for one in group)]
            promised = self._batch.num_promised_blocks() + self._admission.num_watermark_blocks
            self._left = self._batch.pool.num_free - promised

    def _blocks_of(self, beams: list[Request]) -> int:
        """Return the most blocks these beams need to start, each as a fork of another one with its prompt."""
        return sum(map(self._own_blocks_of, beams)) * len(self._batch.tables)

    def _own_blocks_of(self, beam: Request) -> int:
        shared, first = self._batch.forks.num_sure(beam.num_prompt_tokens), beam.choices[0].sampling
        # If the first beam computes a prompt regardless of the cache, the second one may bring back the cached copy of
        # it.
        is_there_twice = beam.choice == 1 and first is not None and first.prompt_logprobs is not None
        return self._admission.blocks_to_start(beam) - (0 if is_there_twice else shared)
