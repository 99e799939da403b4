"""RowShares: how many rows of the batch are due to each party, and which running rows are borrowed."""

import numpy as np

from core.scheduling.virtual_time import VirtualTime
from ipc.tables.arrays import Bools, Ints


class RowShares:
    """The rows [max_num_seqs] of the batch, divided among the parties with live requests by their weights.

    At least one row is due to each. A party may take more while nobody asks for them: these are borrowed. Only a party
    with fewer rows than are due to it may ask, so a row that is taken is never taken back by the same rule, and the
    rule preempts at most one row for each start.
    """

    def __init__(self, times: VirtualTime, max_num_seqs: int) -> None:
        self._times = times
        self._max_num_seqs = max_num_seqs

    def of(self, party: int) -> int:
        """Return the number of rows that are due to one party."""
        return int(self._due(np.array([party]))[0])

    def borrowed(self, parties: Ints) -> Bools:
        """Return which rows are beyond the share of their party, bool [n]: the last ones of each.

        parties: of all running rows [n]; a party's own rows are in the order in which it is served.
        """
        order = parties.argsort(kind="stable")
        together = parties[order]
        place = np.empty(len(parties), np.int64)  # of each row among those of its party
        place[order] = np.arange(len(parties)) - together.searchsorted(together)
        is_borrowed: Bools = place >= self._due(parties)
        return is_borrowed

    def _due(self, parties: Ints) -> Ints:
        weights, total = self._times.weights(parties)
        return np.maximum(1, self._max_num_seqs * weights // total)
