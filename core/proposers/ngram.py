"""NgramProposer: drafts by prompt lookup: what followed the row's last tokens at their previous occurrence.

Prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's method "ngram".
"""

import numpy as np

from core.batch.table import FREE_ROW, BatchTable
from core.proposers.gram_hash import GramHash
from core.proposers.proposer import Proposals
from ipc.tables.arrays import Int32s, Ints, Rows
from ipc.tables.columns import Columns, column

#: Index slots per token that the rows can hold. With fewer slots more is forgotten.
_SLOTS_PER_TOKEN = 2
_MAX_SLOTS = 1 << 22
_MIN_SLOTS = 1 << 10
#: Up to this many rows, with as few new tokens each, one by one is faster than columns.
FEW_ROWS = 6
_FEW_TOKENS = 16


class NgramProposer(Columns):
    """An index of the n-grams of all running rows, for some lengths n.

    A slot holds the position after the most recent n-gram with its hash, from any row. Two n-grams with the same slot
    overwrite each other. Whatever is found is compared with the row's tokens.
    """

    _tenancy: Ints = column(FREE_ROW)
    _num_entered: Ints = column()  # tokens of the row that end an n-gram in the index

    def __init__(self, table: BatchTable, lengths: tuple[int, ...], num_tokens: int) -> None:
        """Create an empty index.

        lengths: of the n-grams, longest first. num_tokens: how many tokens all rows can hold together.
        """
        super().__init__(len(table.tenancy))
        self._table, self._lengths = table, lengths
        self._hash = GramHash(lengths, min(max(_SLOTS_PER_TOKEN * num_tokens, _MIN_SLOTS), _MAX_SLOTS))
        self._positions = self._hash.make_table()

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return what followed the longest of each row's last n-grams. Past the row's end, its last period repeats."""
        if len(rows) <= FEW_ROWS and (few := self._propose_each(rows.tolist(), most)) is not None:
            return few
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
        """Enter the rows' new n-grams except the last ones. Return the slots [n, N] and tokens (last first) of these.

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

    def _propose_each(self, rows: list[int], most: int) -> Proposals | None:
        """Return the same as propose(), row by row, or None if some row has many new tokens."""
        table, spans = self._table, list[tuple[int, int, int, int]]()
        for row in rows:
            tenancy, length = table.tenancy.item(row), table.num_tokens.item(row)
            first = self._num_entered.item(row) if self._tenancy.item(row) == tenancy else 0
            if length - first > _FEW_TOKENS:
                return None
            spans.append((row, tenancy, first, length))
        counts, kinds = [0] * len(rows), [self._lengths[0]] * len(rows)
        token_ids = np.zeros((len(rows), most), np.int32)
        for index, (row, tenancy, first, length) in enumerate(spans):
            found = self._enter_one(row, tenancy, first, length)
            if found is not None:
                counts[index], (kinds[index], start) = most, found
                token_ids[index] = np.resize(table.tokens.read(row, start, min(length, start + most)), most)
            self._tenancy[row], self._num_entered[row] = tenancy, length - 1
        return Proposals(np.array(counts), token_ids, np.array(kinds))

    def _enter_one(self, row: int, tenancy: int, first: int, length: int) -> tuple[int, int] | None:
        """Enter a row's new n-grams except the last ones.

        Return the length of the longest last n-gram that was found, and the position of the token after it.
        """
        back, tokens = len(self._hash.back), self._table.tokens
        begin = max(0, first - back + 1)
        known = tokens.read(row, begin, length).tolist()
        known[:0] = known[:1] * (back - 1 - first + begin)  # as in _enter(): the first token is repeated before it
        known.reverse()
        last = length - 1
        for place in range(first, last):
            slots = self._hash.slots_of(tenancy, known[last - place : last - place + back])
            self._positions[self._hash.lanes, slots] = place + 1
        slots = self._hash.slots_of(tenancy, known[:back])
        for size, start in zip(self._lengths, self._positions[self._hash.lanes, slots].tolist(), strict=True):
            if size <= start < length and tokens.read(row, start - size, start).tolist() == known[size - 1 :: -1]:
                return size, start
        return None

    def end(self, rows: Rows) -> None:
        """Do nothing: a request's n-grams are only found for that request."""
