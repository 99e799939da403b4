"""OfferedDrafts: drafts made elsewhere, kept for the next plan of their rows."""

import numpy as np

from core.batch.table import FREE_ROW, BatchTable
from core.proposers.proposer import Proposals
from ipc.tables.arrays import NO_INTS, Bools, Int32s, Ints, Rows
from ipc.tables.columns import Columns, column


class OfferedDrafts(Columns):
    """The last drafts offered for each row. They are dropped with the row's next token, or if its request changes."""

    _tenancy: Ints = column(FREE_ROW)
    _length: Ints = column()  # number of tokens of the row when they were offered
    _count: Ints = column()

    def __init__(self, table: BatchTable, most: int) -> None:
        super().__init__(len(table.tenancy))
        self._table = table
        self._tokens = np.zeros((len(table.tenancy), most), np.int32)
        self.is_used = False  # whether anything was ever offered
        self._open: Ints = NO_INTS  # rows whose drafts may still be for their next tokens

    def offer(self, rows: Rows, tenancies: Ints, counts: Ints, token_ids: Int32s) -> None:
        """Keep counts[i] drafts of rows[i], row after row. They are cut at the width of the table."""
        self.is_used = True
        width = self._tokens.shape[1]
        places = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
        kept = places < width
        self._tokens[rows.repeat(counts)[kept], places[kept]] = token_ids[kept]
        self._tenancy[rows] = tenancies
        self._length[rows] = self._table.num_tokens[rows]
        self._count[rows] = np.minimum(counts, width)
        self._open = np.union1d(self._open, rows[counts > 0])

    @property
    def is_open(self) -> bool:
        """Return whether some drafts are for the next tokens of their rows."""
        if len(rows := self._open):
            rows = rows[self._is_current(rows)]
        self._open = rows
        return len(rows) > 0

    def _is_current(self, rows: Ints) -> Bools:
        table = self._table
        is_same: Bools = self._tenancy[rows] == table.tenancy[rows]
        is_same &= self._length[rows] == table.num_tokens[rows]
        return is_same

    def blank(self) -> None:
        """Replace all drafts by token 0, for a capture without content. Which ones were right is recorded."""
        self._tokens[:] = 0

    def end(self, rows: Rows) -> None:
        """Do nothing: the drafts end with the request's tenancy."""

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return the drafts that are still for the row's next tokens."""
        counts = np.where(self._is_current(rows), np.minimum(self._count[rows], most), 0)
        token_ids = np.zeros((len(rows), most), np.int32)
        width = min(most, self._tokens.shape[1])
        token_ids[:, :width] = self._tokens[rows, :width]
        return Proposals(counts, token_ids, np.zeros(len(rows), np.int64))
