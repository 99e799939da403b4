"""StopCheck: which of the sampled tokens end their requests, and why."""

from collections.abc import Callable

import numpy as np

from core.batch.request import Request
from core.batch.table import BatchTable
from ipc.tables.arrays import Bools, Ints, Rows, TokenIds, UInt8s
from ipc.wire.messages import FinishReason

#: For models without an EOS token: no sampled token has this id.
_NO_EOS = -1


class StopCheck:
    """The stop rules. EOS is compared for all rows, stop_token_ids only for the rows that have them."""

    def __init__(self, table: BatchTable, eos_token_ids: tuple[int, ...]) -> None:
        self._table = table
        self._first_eos, *self._other_eos = eos_token_ids or (_NO_EOS,)
        self._keys = np.zeros(0, np.int64)  # sorted row << 32 | token id of the rows with stop_token_ids

    def add(self, row: int, stop_token_ids: list[int]) -> None:
        """End the request of the row at each of these tokens."""
        keys = (np.int64(row) << 32) | np.array(stop_token_ids, np.int64)
        self._keys = np.union1d(self._keys, keys)

    def remove(self, rows: Rows) -> None:
        """Remove the stop_token_ids of these rows; rows without any are ignored."""
        if len(self._keys):
            self._keys = self._keys[~np.isin(self._keys >> 32, rows)]

    def rename(self, name: Callable[[int], int]) -> None:
        """Rename the token ids in the rows' stop_token_ids."""
        keys = [key >> 32 << 32 | name(key & 0xFFFFFFFF) for key in self._keys.tolist()]
        self._keys = np.array(sorted(keys), np.int64)

    def finish_of_delivered(self, request: Request) -> tuple[FinishReason, int | None]:
        """Return the finish reason of a request that arrives with its tokens, and its stop token.

        NONE: the request goes on. The stop token is the one of stop_token_ids that ended the request, or None.
        """
        params, num_output_tokens = request.sampling, request.num_output_tokens
        if params is not None and num_output_tokens and num_output_tokens >= params.min_tokens:
            last = int(request.token_ids[-1])
            if (last == self._first_eos or last in self._other_eos) and not params.ignore_eos:
                return FinishReason.STOP, None
            if last in (params.stop_token_ids or ()):
                return FinishReason.STOP, last
        return FinishReason.LENGTH if request.num_tokens >= request.max_total_tokens else FinishReason.NONE, None

    def __call__(self, rows: Rows, tokens: TokenIds, lengths: Ints) -> tuple[UInt8s, Bools]:
        """Return each row's FinishReason after its new token, uint8 [n], and whether a stop token ended it, bool [n].

        lengths [n]: number of tokens of each row, including the new one. The order is vLLM's: EOS, stop tokens, length.
        Below min_tokens, only the length ends a request.
        """
        table = self._table
        finish = np.zeros(len(rows), np.uint8)
        by_stop_token = np.zeros(len(rows), np.bool_)
        is_full = lengths >= table.max_total_tokens[rows]
        if np.count_nonzero(is_full):
            finish[is_full] = int(FinishReason.LENGTH)
        by_eos: Bools = tokens == self._first_eos  # a comparison per EOS id is faster than a table of all
        for eos in self._other_eos:
            by_eos |= tokens == eos
        if not (np.count_nonzero(by_eos) or len(self._keys)):
            return finish, by_stop_token
        group = table.has_stop_ids[rows] > 0
        may_stop = lengths >= table.min_total_tokens[rows]
        by_eos &= (table.ignore_eos[rows] == 0) & may_stop
        by_stop_token[group] = self._match(rows[group], tokens[group])
        by_stop_token &= may_stop & ~by_eos
        finish[by_eos | by_stop_token] = int(FinishReason.STOP)
        return finish, by_stop_token

    def cut(self, rows: Rows, tokens: TokenIds, counts: Ints) -> tuple[Ints, TokenIds, UInt8s, Bools]:
        """Cut counts[i] > 0 new tokens of rows[i], given row after row, after the first token that ends the row.

        Returns the kept counts [n], the kept tokens, and finish and by_stop_token [n] of each row after its last token.
        """
        firsts = counts.cumsum() - counts
        offsets = np.arange(len(tokens)) - firsts.repeat(counts)
        lengths = (self._table.num_tokens[rows] + 1).repeat(counts) + offsets
        finish, by_stop_token = self(rows.repeat(counts), tokens, lengths)
        ends = np.where(finish > 0, offsets + 1, counts.repeat(counts))
        kept: Ints = np.minimum.reduceat(ends, firsts)
        last = firsts + kept - 1
        return kept, tokens[offsets < kept.repeat(counts)], finish[last], by_stop_token[last]

    def _match(self, rows: Rows, tokens: TokenIds) -> Bools:
        """Return whether tokens[i] is a stop token of rows[i], bool [n]."""
        keys = (rows.astype(np.int64) << 32) | tokens
        if not len(keys):
            return np.zeros(0, np.bool_)
        places = np.searchsorted(self._keys, keys)
        found: Bools = self._keys[np.minimum(places, len(self._keys) - 1)] == keys
        return found
