"""HostRows: the host's table and sampling columns for a device runner, which get tokens after they are sampled."""

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import Int32s, Ints, Positions, Rows, TokenIds


class HostRows:
    """Rows by tenancy. Tokens are dropped if the request has left the row since their step was launched."""

    def __init__(self, table: RunnerTable, sampling: SamplingColumns, num_rows: int) -> None:
        self._table, self._sampling = table, sampling
        self.tenancies = np.zeros(num_rows, np.int64)  # number of requests that have left each row

    def leave(self, rows: Rows) -> None:
        """Record that the requests of these rows have left them."""
        self.tenancies[rows] += 1

    def count(self, rows: Rows) -> None:
        """Count one more token for each of these rows. learn() will write its id."""
        self._table.append_tokens(rows, np.zeros(len(rows), np.int32))

    def learn(self, rows: Int32s, positions: Positions, tenancies: Ints, tokens: TokenIds) -> None:
        """Write sampled tokens [n], which are already counted, at these positions [n] of these rows [n].

        tenancies [n]: the rows' tenancies when their step was launched.
        """
        here = self.tenancies[rows] == tenancies
        self._table.tokens.set(rows[here], positions[here], tokens[here])
        self._sampling.append_tokens(rows[here], tokens[here])

    def accept(self, rows: Int32s, tenancies: Ints, tokens: TokenIds, counts: Ints) -> None:
        """Append counts[i] > 0 tokens of rows[i], which had drafts, row after row. All but the last one were drafts.

        The K and V of these drafts are computed.
        """
        here = self.tenancies[rows] == tenancies
        tokens, rows, counts = tokens[here.repeat(counts)], rows[here], counts[here]
        if len(rows):
            self._table.append_tokens(rows, tokens, counts)
            self._table.num_computed_tokens[rows] += counts - 1
            self._sampling.append_tokens(rows, tokens, counts)
