"""NgramProposer: drafts by prompt lookup: what followed the row's last tokens when they stood there before.

Prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's method "ngram".
"""

import numpy as np

from core.batch.table import FREE_ROW, BatchTable
from core.proposers.gram_hash import GramHash
from core.proposers.proposer import Proposals
from ipc.arrays import Int32s, Ints, Rows
from ipc.columns import Columns, column

#: Slots of the index for each token that the rows can hold; fewer slots forget more.
_SLOTS_PER_TOKEN = 2
_MAX_SLOTS = 1 << 22
_MIN_SLOTS = 1 << 10


class NgramProposer(Columns):
    """An index of the n-grams of all running rows, for each of some lengths n.

    A slot holds the position after the most recent n-gram with its hash, of any row. Two n-grams with one slot forget
    one another; what is found is compared with the row's tokens.
    """

    _tenancy: Ints = column(FREE_ROW)
    _num_entered: Ints = column()  # tokens of the row that are the last of an n-gram in the index

    def __init__(self, table: BatchTable, lengths: tuple[int, ...], num_tokens: int) -> None:
        """Make an empty index. lengths: of the n-grams, the longest first. num_tokens: that all rows hold together."""
        super().__init__(len(table.tenancy))
        self._table = table
        self._hash = GramHash(lengths, min(max(_SLOTS_PER_TOKEN * num_tokens, _MIN_SLOTS), _MAX_SLOTS))
        self._positions = np.zeros((len(lengths), self._hash.num_slots), np.int32)  # 0: none

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return what followed the longest of the rows' last n-grams. Past the row's end, its last period repeats."""
        table, each = self._table, np.arange(len(rows))
        lengths = table.num_tokens[rows]
        slots, tails = self._enter(rows, lengths)
        found = self._positions[self._hash.lanes, slots].astype(np.int64)  # [n, N]
        places = np.maximum(found[:, :, None] - 1 - self._hash.back, 0)
        equal = table.tokens.get(rows[:, None, None], np.minimum(places, lengths[:, None, None])) == tails[:, None, :]
        matches = (equal | self._hash.is_beyond).all(-1) & (found >= self._hash.lengths) & (found < lengths[:, None])
        best = matches.argmax(1)
        is_found = matches[each, best]
        starts = np.where(is_found, found[each, best], 0)
        period = np.where(is_found, lengths - starts, 1)
        token_ids = table.tokens.get(rows[:, None], starts[:, None] + np.arange(most) % period[:, None])
        return Proposals(np.where(is_found, most, 0), token_ids, self._hash.lengths[best])

    def _enter(self, rows: Ints, lengths: Ints) -> tuple[Ints, Int32s]:
        """Enter the rows' new n-grams, but for the last ones, whose slots [n, N] and tokens, last first, it returns.

        The last n-gram is entered when a token follows it.
        """
        table = self._table
        is_new = self._tenancy[rows] != table.tenancy[rows]
        firsts = np.where(is_new, 0, self._num_entered[rows])
        self._tenancy[rows] = table.tenancy[rows]
        self._num_entered[rows] = lengths - 1
        counts = lengths - firsts
        ends = counts.cumsum()
        owners = rows.repeat(counts)
        places: Ints = np.arange(int(ends[-1])) + (firsts - ends + counts).repeat(counts)
        tails = table.tokens.get(owners[:, None], np.maximum(places[:, None] - self._hash.back, 0))  # [M, back]
        slots = self._hash.slots(table.tenancy[owners], tails)
        last = ends - 1
        if len(places) > len(rows):
            entered = np.ones(len(places), np.bool_)
            entered[last] = False
            self._positions[self._hash.lanes, slots[entered]] = (places[entered] + 1)[:, None]
        return slots[last], tails[last]

    def end(self, rows: Rows) -> None:
        """Do nothing: the n-grams of a request are found for this request only."""
