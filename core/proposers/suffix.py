"""SuffixProposer: drafts from the request's own tokens and from earlier outputs.

They are what followed the longest run of tokens that the request ends with.

Suffix decoding: Oliaro et al. 2024, arXiv 2411.04975; vLLM's method "suffix". Instead of a suffix tree it uses hash
tables of runs of some lengths, so that a step works on columns.
"""

import numpy as np

from core.batch.table import FREE_ROW, BatchTable
from core.proposers.ngram import FEW_ROWS, NgramProposer
from core.proposers.output_memory import Matches, OutputMemory
from core.proposers.proposer import Proposals
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import Ints, Rows
from ipc.tables.columns import Columns, column

#: Lengths of the runs that can be found, in tokens. A longer match counts as the largest of these that fits.
_LENGTHS = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
#: Added to the kinds of drafts from earlier outputs.
_REMEMBERED = 32


class SuffixProposer(Columns):
    """The longer match wins, whether in the request's own tokens or in the memory. On a tie the request's own wins."""

    _tenancy: Ints = column(FREE_ROW)
    _scope: Ints = column()

    def __init__(self, table: BatchTable, settings: SpeculativeConfig, num_tokens: int) -> None:
        """Start with an empty memory. num_tokens: how many tokens all rows can hold together."""
        super().__init__(len(table.tenancy))
        lengths = tuple(length for length in _LENGTHS if length <= settings.suffix_decoding_max_tree_depth)
        max_outputs = settings.suffix_decoding_max_cached_requests
        self._table = table
        self._own = NgramProposer(table, lengths, num_tokens)
        self._memory = OutputMemory(lengths, max_outputs) if max_outputs else None
        self._back: Ints = np.arange(lengths[0])
        self._factor = settings.suffix_decoding_max_spec_factor

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return at most `factor` drafts per token of the match, and at least one."""
        counts, token_ids, kinds = self._own.propose(rows, most)
        lengths = np.where(counts > 0, kinds, 0)
        if self._memory is not None:
            found = self._find(self._memory, rows)
            better = np.flatnonzero(found.lengths > lengths)
            if len(better):
                counts[better], kinds[better] = found.counts[better], found.lengths[better] + _REMEMBERED
                token_ids[better] = self._memory.read(found.places[better], most)
                lengths[better] = found.lengths[better]
        allowed = np.maximum((lengths * self._factor).astype(np.int64), 1)
        return Proposals(np.minimum(np.minimum(counts, most), allowed), token_ids, kinds)

    def _find(self, memory: OutputMemory, rows: Rows) -> Matches:
        table, back = self._table, len(self._back)
        scopes, lengths = self._scopes(rows), table.num_tokens[rows]
        if len(rows) > FEW_ROWS:
            places = lengths[:, None] - 1 - self._back
            return memory.find(scopes, np.where(places < 0, -1, table.tokens.get(rows[:, None], np.maximum(places, 0))))
        found = []
        for row, scope, length in zip(rows.tolist(), scopes.tolist(), lengths.tolist(), strict=True):
            tail = table.tokens.read(row, max(0, length - back), length)[::-1].tolist()
            found.append(memory.find_one(scope, tail + [-1] * (back - length)))
        return Matches(*np.array(found, np.int64).T)

    def end(self, rows: Rows) -> None:
        """Remember the outputs of these rows."""
        if self._memory is None:
            return
        table = self._table
        columns = rows, self._scopes(rows), table.num_prompt_tokens[rows], table.num_tokens[rows]
        for row, scope, begin, end in zip(*(one.tolist() for one in columns), strict=True):
            self._memory.add(scope, table.tokens.read(row, begin, end))

    def _scopes(self, rows: Rows) -> Ints:
        """Return numbers [n], not 0, that are equal for requests of one client with the same cache salt and tenant."""
        tenancies = self._table.tenancy[rows]
        for row in rows[self._tenancy[rows] != tenancies].tolist():  # requests that are new here
            request = self._table.request[row]
            assert request is not None, f"row {row} has no request"
            self._scope[row] = ((request.client * 0x9E3779B97F4A7C15 + request.root) % 2**62) + 1
        self._tenancy[rows] = tenancies
        return self._scope[rows]
