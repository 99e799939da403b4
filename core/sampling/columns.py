"""SamplingColumns: the sampling parameters of each row, as columns beside the runner's table."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.edit_group import Edit, EditGroup, SampledRows
from core.sampling.sample_index import SampleIndex
from core.sampling.sampler import NO_EDITS, SamplingInputs
from ipc.arrays import NO_INTS, Bools, Floats, Int32s, Ints, Positions, Rows, TokenIds, UInt64s
from ipc.beam_search import num_candidates
from ipc.columns import Columns, column
from ipc.sampling_params import SamplingParams

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
    num_candidates: Ints = column()  # of a row of a beam search; 0 = the row draws its tokens
    search_temperature: Floats = column()  # of the same row
    _has_edits: Bools = column()
    _takes_largest: Bools = column()  # if the only option that edits the row's logits leaves it allowed

    def __init__(self, num_rows: int, groups: tuple[EditGroup, ...], num_eos: int = 0) -> None:
        """Make empty columns for num_rows rows.

        groups: of the options that edit logits; see edit_groups(). num_eos: how many EOS tokens the model has.
        """
        super().__init__(num_rows)
        self.num_reporting = 0  # rows that report log probabilities of sampled or prompt tokens
        self.num_searching = 0  # rows of beam searches
        self._num_drawing = 0  # rows with a temperature above 0
        self._num_edited = 0
        self._groups = groups
        self._num_eos = num_eos
        self._options = attrgetter(*(option for group in self._groups for option in group.options))
        self._unused = self._options(SamplingParams())

    @property
    def has_edits(self) -> bool:
        """Whether some row has options that edit its logits. Some of these options read the row's earlier tokens."""
        return self._num_edited > 0

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the token with its largest logit, unedited."""
        return not (self._num_drawing or self._num_edited)

    def remove(self, row: int) -> None:
        """Reset the row's columns and remove it from the groups."""
        self._num_drawing -= bool(self.temperature[row] > 0)
        self.temperature[row] = 0
        self.num_reporting -= self._reports(row)
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = _NO_LOGPROBS
        self.num_searching -= bool(self.num_candidates[row])
        self.num_candidates[row] = 0
        if not self._has_edits[row]:
            return
        for group in self._groups:
            group.remove(row)
        self._has_edits[row] = False
        self._num_edited -= 1

    def add(self, new: NewRow) -> None:
        """Write the row's parameters and add it to the groups whose options it uses.

        The row must be free: see remove()."""
        row, params = new.row, new.params
        temperature = 0.0 if params.use_beam_search else params.temperature
        self.temperature[row] = temperature
        self._num_drawing += temperature > 0
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
        self._takes_largest[row] = False
        if self._options(params) != self._unused:
            uses = [group.add(new) for group in self._groups]
            self._has_edits[row] = any(uses)
            self._num_edited += any(uses)
            is_read = (
                params.use_beam_search or params.logprobs is not None
            )  # the row's logits, after its token is known
            self._takes_largest[row] = temperature == 0 and sum(uses) == 1 and not is_read

    def reporting(self, rows: Rows) -> Ints:
        """Return the indices of those of these rows that report log probabilities of their sampled tokens."""
        return np.flatnonzero(self.num_logprobs[rows] >= 0) if self.num_reporting else NO_INTS

    def searching(self, rows: Rows) -> Ints:
        """Return the indices of those of these rows that belong to beam searches."""
        return np.flatnonzero(self.num_candidates[rows]) if self.num_searching else NO_INTS

    def _reports(self, row: int) -> bool:
        return bool(self.num_logprobs[row] >= 0 or self.num_prompt_logprobs[row] >= 0)

    def append_tokens(self, rows: Rows, token_ids: TokenIds, counts: Ints | None = None) -> None:
        """Pass sampled tokens to the groups that count them: one a row, or counts[i] of row i, row after row."""
        if self._num_edited:
            owners = rows if counts is None else rows.repeat(counts)
            for group in self._groups:
                group.append(owners, token_ids, is_distinct=counts is None)

    def failures(self, in_plan: Ints, rows: Rows) -> list[tuple[int, str]]:
        """Return (index in the plan, text) of those of these rows [n] that failed for a reason of a group's."""
        found = []
        for index, row in zip(in_plan.tolist(), rows.tolist(), strict=True):
            texts = [text for group in self._groups if (text := group.failure(row)) is not None]
            found += [(index, text) for text in texts[:1]]
        return found

    def inputs(
        self, rows: Rows, table: RunnerTable, offsets: Ints | None = None, largest: Int32s | None = None
    ) -> SamplingInputs:
        """Return the sampler's inputs for the next token of each of these rows [S], in their order.

        offsets [S]: the number of the row's drafts before each sample; None: each row has one sample. Samples of a row
        are adjacent, and the table has its drafts behind its tokens. A sample has the inputs that the row would have if
        the drafts before it were its tokens. largest [S]: see sample(); then the edits of greedy rows may be made for
        the token that they take.
        """
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows]
        if offsets is not None:
            positions += offsets
        edits = NO_EDITS
        if self._num_edited:
            likely = None if largest is None else np.where(self._takes_largest[rows], largest, np.int32(-1))
            edits = self._edits(rows, offsets, positions, table, self._groups, likely)
        return self._inputs(rows, positions, edits)

    def inputs_ahead(self, rows: Ints, table: RunnerTable, offset: int) -> SamplingInputs:
        """Return the sampler's inputs for the token `offset` places behind the next one of each row.

        The table has `offset` drafts behind the row's tokens. Options that cannot look ahead, grammars, edit nothing.
        """
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows] + offset
        edits = NO_EDITS
        if self._num_edited:
            ahead = [group for group in self._groups if group.looks_ahead]
            edits = self._edits(rows, np.full(len(rows), offset), positions, table, ahead)
        return self._inputs(rows, positions, edits)

    def _inputs(self, rows: Rows, positions: Ints, edits: tuple[Edit, ...]) -> SamplingInputs:
        return SamplingInputs(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=positions,
            choice=self.choice[rows],
            edits=edits,
        )

    def _edits(
        self,
        rows: Rows,
        offsets: Ints | None,
        positions: Positions,
        table: RunnerTable,
        groups: Sequence[EditGroup],
        likely: Int32s | None = None,
    ) -> tuple[Edit, ...]:
        sampled = SampledRows(SampleIndex(rows, len(self.seed), offsets), positions, table, likely)
        return tuple([edit for group in groups if (edit := group.edit(sampled)) is not None])


def _num_logprobs(wanted: int | None) -> int:
    if wanted is None:
        return _NO_LOGPROBS
    return _ALL_LOGPROBS if wanted == -1 else wanted
