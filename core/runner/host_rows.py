"""HostRows: the host's table and sampling columns of a device's runner, which learn tokens after they are sampled."""

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import Int32s, Ints, Positions, Rows, TokenIds


class HostRows:
    """The rows by tenancy: tokens of a row that its request has left since their step was launched are dropped."""

    def __init__(self, table: RunnerTable, sampling: SamplingColumns, num_rows: int) -> None:
        self._table, self._sampling = table, sampling
        self.tenancies = np.zeros(num_rows, np.int64)  # requests that have left each row

    def leave(self, rows: Rows) -> None:
        """Count that the requests of these rows have left them."""
        self.tenancies[rows] += 1

    def count(self, rows: Rows) -> None:
        """Count a token of each of these rows, whose id learn() writes."""
        self._table.append_tokens(rows, np.zeros(len(rows), np.int32))

    def learn(self, rows: Int32s, positions: Positions, tenancies: Ints, tokens: TokenIds) -> None:
        """Write sampled tokens [n], which are counted already, at these positions [n] of these rows [n].

        tenancies [n]: of the rows when their step was launched.
        """
        here = self.tenancies[rows] == tenancies
        self._table.tokens.set(rows[here], positions[here], tokens[here])
        self._sampling.append_tokens(rows[here], tokens[here])

    def accept(self, rows: Int32s, tenancies: Ints, tokens: TokenIds, counts: Ints) -> None:
        """Append counts[i] > 0 tokens of rows[i], which had drafts, row after row: all but the last were drafts.

        The K and V of these drafts are computed.
        """
        here = self.tenancies[rows] == tenancies
        tokens, rows, counts = tokens[here.repeat(counts)], rows[here], counts[here]
        if len(rows):
            self._table.append_tokens(rows, tokens, counts)
            self._table.num_computed_tokens[rows] += counts - 1
            self._sampling.append_tokens(rows, tokens, counts)
