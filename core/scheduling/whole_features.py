"""WholeFeatures: computes tokens that see each other, such as those of an image, in one step."""

from collections.abc import Callable, Sequence

import numpy as np

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft
from core.scheduling.limits import Limit
from ipc.wire.feature_messages import FeatureUse


class WholeFeatures:
    """A Limit that never ends a chunk inside a whole feature: such a chunk ends where the feature begins.

    A prefix hit may end inside one, because its first tokens were computed together with the others. A step has room
    for the tokens of a whole feature plus one token for every other row (core/process/resolve.py), so no feature waits
    forever.
    """

    def __init__(self, batch: Batch, add_limit: Callable[[Limit], None], cuts: list[Callable[[Draft], None]]) -> None:
        """The limit is added with the first request that has a whole feature. add_limit: admission's; cuts: the
        scheduler's.
        """
        self._batch, self._add_limit, self._cuts = batch, add_limit, cuts
        self._are_used = False  # by any request so far

    def enter(self, request: Request) -> None:
        """Handle a new request with features."""
        if not self._are_used and any(use.is_whole for use in request.features):
            self._are_used = True
            self._add_limit(self)
            self._cuts.append(self.cut)

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Cut the start's tokens. Return NO_BUDGET if none are left."""
        begin, wanted = start.num_computed_tokens, start.num_tokens
        start.num_tokens = last_end(start.request.features, begin, begin + wanted) - begin
        if start.num_tokens:
            return None
        features = start.request.features
        needed = next(use.position + use.num_rows for use in features if use.position + use.num_rows > begin) - begin
        return Examined(start.request, Verdict.NO_BUDGET, needed, wanted)

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Do nothing: no resource is held."""

    def give_back(self, request: Request) -> None:
        """Do nothing."""

    def cut(self, draft: Draft) -> None:
        """Cut the tokens of running rows whose chunk would end inside a whole feature. The rows keep their blocks."""
        table, rows, counts = self._batch.table, draft.rows, draft.counts
        begins = table.num_computed_tokens[rows]
        ends = begins + counts
        for index in np.flatnonzero((counts > 0) & (ends < table.num_prompt_tokens[rows])).tolist():
            request = table.request[int(rows[index])]
            assert request is not None, f"row {rows[index]} is free"
            given, begin = int(counts[index]), int(begins[index])
            counts[index] = left = last_end(request.features, begin, begin + given) - begin
            draft.budget += given - left
            draft.num_skipped += not left


def last_end(features: Sequence[FeatureUse], begin: int, end: int) -> int:
    """Return the last allowed end, at most `end`, of a prompt's chunk from `begin` on; `begin` if there is none.

    features: in order of position.
    """
    for use in features:
        if use.is_whole and use.position < end < use.position + use.num_rows:
            return max(begin, use.position)
    return end
