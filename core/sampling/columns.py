"""SamplingColumns: the sampling parameters of each row, as columns parallel to the runner's table."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.edit_group import Edit, EditGroup, SampledRows
from core.sampling.sample_index import SampleIndex
from core.sampling.sampler import NO_EDITS, SamplingInputs
from ipc.params.beam_search import num_candidates
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INTS, Bools, Floats, Int32s, Ints, Positions, Rows, TokenIds, UInt64s
from ipc.tables.columns import Columns, column

_NO_LOGPROBS = -1
_ALL_LOGPROBS = 2**31 - 1


class SamplingColumns(Columns):
    """Sampling parameters as columns [rows], and one group for each option that edits logits.

    A group holds the rows that use its option (core/sampling/logit_edits.py).
    """

    temperature: Floats = column()
    top_k: Ints = column()
    top_p: Floats = column(1)
    min_p: Floats = column()
    seed: UInt64s = column()
    choice: Ints = column()
    num_logprobs: Ints = column(_NO_LOGPROBS)
    num_prompt_logprobs: Ints = column(_NO_LOGPROBS)
    num_candidates: Ints = column()  # for a beam search row; 0 = the row draws its tokens
    search_temperature: Floats = column()  # for the same row
    _options_used: Ints = column()  # bit i: the row uses the option of group i; 0 = nothing edits the row's logits
    _asks_first: Bools = column()  # whether the row's only logit-editing option is asked about its token first

    def __init__(self, num_rows: int, groups: tuple[EditGroup, ...], num_eos: int = 0) -> None:
        """Create empty columns for num_rows rows.

        groups: for the options that edit logits; see edit_groups(). num_eos: how many EOS tokens the model has.
        """
        super().__init__(num_rows)
        self.num_reporting = 0  # rows that report log probabilities of sampled or prompt tokens
        self.num_searching = 0  # beam search rows
        self.num_drawing = 0  # rows with a temperature above 0
        self.num_edited = 0  # rows with options that edit their logits, some depending on the row's earlier tokens
        self.num_asking = 0  # edited rows that are handled by take()
        self._groups = groups
        self._num_using = [0] * len(groups)  # rows of each group
        self._in_use: list[EditGroup] = []  # the groups that have rows
        self._filtering: list[EditGroup] = []  # those of them that apply filters
        self._asking = next((group for group in groups if group.asks_first), None)
        self._num_eos = num_eos
        self._options = attrgetter(*(option for group in self._groups for option in group.options))
        self._unused = self._options(SamplingParams())

    def remove(self, row: int) -> None:
        """Reset the row's columns and remove it from the groups."""
        self.num_drawing -= bool(self.temperature[row] > 0)
        self.temperature[row] = 0
        self.num_reporting -= self._reports(row)
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = _NO_LOGPROBS
        self.num_searching -= bool(self.num_candidates[row])
        self.num_candidates[row] = 0
        if used := int(self._options_used[row]):
            self._count(used, -1)
            self._options_used[row] = 0
            for group in self._groups:
                group.remove(row)
            self.num_edited -= 1
            self.num_asking -= bool(self._asks_first[row])
            self._asks_first[row] = False

    def add(self, new: NewRow) -> None:
        """Write the row's parameters and add it to the groups whose options it uses.

        The row must be free: see remove().
        """
        row, params = new.row, new.params
        temperature = 0.0 if params.use_beam_search else params.temperature
        self.temperature[row] = temperature
        self.num_drawing += temperature > 0
        if params.use_beam_search:
            self.num_candidates[row] = num_candidates(params, self._num_eos)
            self.search_temperature[row] = params.temperature
            self.num_searching += 1
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.choice[row] = new.choice
        self.num_logprobs[row] = _num_logprobs(None if params.use_beam_search else params.logprobs)
        self.num_prompt_logprobs[row] = _num_logprobs(params.prompt_logprobs if new.wants_prompt_logprobs else None)
        self.num_reporting += self._reports(row)
        if self._options(params) != self._unused:
            uses = [group.add(new) for group in self._groups]
            used = sum(1 << index for index, is_used in enumerate(uses) if is_used)
            self._options_used[row] = used
            self._count(used, 1)
            self.num_edited += used > 0
            asks = sum(uses) == 1 and self._groups[uses.index(True)] is self._asking and _is_simple(params)
            self._asks_first[row] = asks
            self.num_asking += asks

    def reporting(self, rows: Rows) -> Ints:
        """Return the indices of these rows that report log probabilities of their sampled tokens."""
        return np.flatnonzero(self.num_logprobs[rows] >= 0) if self.num_reporting else NO_INTS

    def searching(self, rows: Rows) -> Ints:
        """Return the indices of these rows that belong to beam searches."""
        return np.flatnonzero(self.num_candidates[rows]) if self.num_searching else NO_INTS

    def _reports(self, row: int) -> bool:
        return bool(self.num_logprobs[row] >= 0 or self.num_prompt_logprobs[row] >= 0)

    def append_tokens(self, rows: Rows, token_ids: TokenIds, counts: Ints | None = None) -> None:
        """Pass sampled tokens to the groups that count them: one per row, or counts[i] of row i, row after row."""
        if self.num_edited:
            owners = rows if counts is None else rows.repeat(counts)
            for group in self._in_use:
                group.append(owners, token_ids, is_distinct=counts is None)

    def failures(self, in_plan: Ints, rows: Rows) -> list[tuple[int, str]]:
        """Return (index in the plan, text) of these rows [n] that failed for a reason given by a group."""
        found = []
        for index, row in zip(in_plan.tolist(), rows.tolist(), strict=True):
            texts = [text for group in self._groups if (text := group.failure(row)) is not None]
            found += [(index, text) for text in texts[:1]]
        return found

    def inputs(self, rows: Rows, table: RunnerTable, offsets: Ints | None = None) -> SamplingInputs:
        """Return the sampler's inputs for the next token of each of these rows [S], in the same order.

        offsets [S]: the number of the row's drafts before each sample; None: each row has one sample. Samples of a row
        are adjacent, and the table has its drafts after its tokens. A sample has the inputs that the row would have if
        the drafts before it were its tokens.
        """
        positions = positions_of(rows, table, offsets)
        return self.parameters(rows, positions, self.edits(rows, table, positions, offsets))

    def parameters(self, rows: Rows, positions: Ints, edits: tuple[Edit, ...] = NO_EDITS) -> SamplingInputs:
        """Return inputs() with these edits. positions [S]: the index in its row's output of each sample's token."""
        inputs = SamplingInputs(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=positions,
            choice=self.choice[rows],
            edits=edits,
        )
        for group in self._filtering:
            filtered = group.filtered(rows, positions)
            inputs.top_k[filtered], inputs.top_p[filtered], inputs.min_p[filtered] = 0, 1, 0
        return inputs

    def edits(
        self,
        rows: Rows,
        table: RunnerTable,
        positions: Positions,
        offsets: Ints | None = None,
        is_settled: Bools | None = None,
    ) -> tuple[Edit, ...]:
        """Return the edits of inputs(). is_settled [S]: the samples whose tokens take() has already determined."""
        return self._edits(rows, offsets, positions, table, self._in_use, is_settled) if self.num_edited else NO_EDITS

    def _count(self, used: int, change: int) -> None:
        """Add `change` to the number of rows of each group in these bits."""
        for index in range(len(self._groups)):
            self._num_using[index] += change * (used >> index & 1)
        self._in_use = [group for group, count in zip(self._groups, self._num_using, strict=True) if count]
        self._filtering = [group for group in self._in_use if group.applies_filters]

    @property
    def all_ask(self) -> bool:
        """Return whether any row can get the token of its unedited logits unless its option forbids it."""
        return self.num_asking == self.num_edited

    def is_edited(self, rows: Rows) -> Bools:
        """Return which of these rows have edits that apply whatever the tokens of their unedited logits are."""
        is_edited: Bools = (self._options_used[rows] != 0) & ~self._asks_first[rows]
        return is_edited

    def take(self, rows: Rows, tokens: Int32s, offsets: Ints | None = None) -> tuple[list[int], list[int]]:
        """Give rows the tokens [S] of their unedited logits if no option can forbid them, or if it allows them.

        Return (refused, closed): the indices of the other samples, see EditGroup.take(). Call append_tokens()
        afterwards with the tokens that rows got. offsets [S]: see inputs(). If a row with an option has several
        samples, all of them are closed.
        """
        assert self._asking is not None, "there are rows that ask"
        if self.all_ask and offsets is None:
            return self._asking.take(rows.tolist(), tokens.tolist())
        is_closed, asks = self._options_used[rows] != 0, self._asks_first[rows]
        if offsets is not None:
            begins = offsets == 0
            asks &= begins & np.append(begins[1:], True)
        asked = np.flatnonzero(asks)
        refused, closed = self._asking.take(rows[asked].tolist(), tokens[asked].tolist())
        is_closed[asked] = False
        is_closed[asked[closed]] = True
        return asked[refused].tolist(), np.flatnonzero(is_closed).tolist()

    def inputs_ahead(self, rows: Ints, table: RunnerTable, offset: int) -> SamplingInputs:
        """Return the sampler's inputs for the token `offset` positions after the next one of each row.

        The table has `offset` drafts after the row's tokens. Options that cannot look ahead (grammars) edit nothing.
        """
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows] + offset
        edits = NO_EDITS
        if self.num_edited:
            ahead = [group for group in self._in_use if group.looks_ahead]
            edits = self._edits(rows, np.full(len(rows), offset), positions, table, ahead)
        return self.parameters(rows, positions, edits)

    def _edits(
        self,
        rows: Rows,
        offsets: Ints | None,
        positions: Positions,
        table: RunnerTable,
        groups: Sequence[EditGroup],
        is_settled: Bools | None = None,
    ) -> tuple[Edit, ...]:
        sampled = SampledRows(SampleIndex(rows, len(self.seed), offsets), positions, table, is_settled)
        return tuple([edit for group in groups if (edit := group.edit(sampled)) is not None])


def positions_of(rows: Rows, table: RunnerTable, offsets: Ints | None) -> Ints:
    """Return the index [S] of each sample's token in its row's output."""
    positions = table.num_tokens[rows] - table.num_prompt_tokens[rows]
    return positions if offsets is None else positions + offsets


def _is_simple(params: SamplingParams) -> bool:
    """Return whether a token only depends on being the largest logit, and no edited logit is reported."""
    if params.use_beam_search or params.logprobs is not None:
        return False
    return params.temperature == 0 or (params.top_k <= 0 and params.top_p == 1 and params.min_p == 0)


def _num_logprobs(wanted: int | None) -> int:
    if wanted is None:
        return _NO_LOGPROBS
    return _ALL_LOGPROBS if wanted == -1 else wanted
