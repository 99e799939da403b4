"""SamplingColumns: what the sampler must know of each row, as columns of the runner's table."""

import numpy as np

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.bad_words import BadWords
from core.sampling.logit_edits import NO_EDITS, LogitEdits
from core.sampling.row_group import RowGroup
from core.sampling.sampler import SamplingInputs
from core.sampling.token_counts import TokenCounts
from ipc.arrays import NO_INTS, Bools, Floats, Ints, Positions, Rows, TokenIds, UInt64s
from ipc.columns import Columns, column
from ipc.sampling_params import SamplingParams

_NOT_SAMPLED = -1
_NO_LOGPROBS = -1
_ALL_LOGPROBS = 2**31 - 1


class SamplingColumns(Columns):
    """The columns below, and index groups of the rows that have min_tokens, allowed_token_ids, logit_bias, bad words or
    penalties."""

    temperature: Floats = column()
    top_k: Ints = column()
    top_p: Floats = column(1)
    min_p: Floats = column()
    seed: UInt64s = column()
    choice: Ints = column()
    min_tokens: Ints = column()
    num_logprobs: Ints = column(_NO_LOGPROBS)
    num_prompt_logprobs: Ints = column(_NO_LOGPROBS)
    _repetition: Floats = column(1)
    _frequency: Floats = column()
    _presence: Floats = column()
    _has_edits: Bools = column()
    _is_penalized: Bools = column()

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(num_rows)
        self.num_reporting = 0  # rows with log probabilities of either kind
        self._num_drawing = 0  # rows whose tokens are drawn
        self._eos_token_ids = eos_token_ids
        self._num_edited = 0
        self._early = RowGroup(token=np.int64)  # tokens forbidden below min_tokens
        self._allowed = RowGroup(token=np.int64)
        self._bias = RowGroup(token=np.int64, bias=np.float32)
        self._bad_words = BadWords()
        self._counts = TokenCounts()

    @property
    def has_edits(self) -> bool:
        """Some row has options that change its logits; with some of them, by what it has been given so far."""
        return self._num_edited > 0

    @property
    def is_greedy(self) -> bool:
        """Every row's token is the one with its largest logit."""
        return not (self._num_drawing or self._num_edited)

    def remove(self, row: int) -> None:
        self._num_drawing -= bool(self.temperature[row] > 0)
        self.temperature[row] = 0
        self.num_reporting -= self._reports(row)
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = _NO_LOGPROBS
        if not self._has_edits[row]:
            return
        for group in (self._early, self._allowed, self._bias, self._bad_words):
            group.remove(row)
        if self._is_penalized[row]:
            self._counts.remove(row)
        self._has_edits[row] = self._is_penalized[row] = False
        self._num_edited -= 1

    def add(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.temperature[row] = params.temperature
        self._num_drawing += params.temperature > 0
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.choice[row] = new.choice
        self.num_logprobs[row] = _num_logprobs(params.logprobs)
        self.num_prompt_logprobs[row] = _num_logprobs(params.prompt_logprobs if new.wants_prompt_logprobs else None)
        self.num_reporting += self._reports(row)
        if _has_edits(params):
            self._has_edits[row] = True
            self._num_edited += 1
            self._add_edits(new)

    def reporting(self, rows: Rows) -> Ints:
        """Which of these rows want their tokens' log probabilities: indices into them."""
        return np.flatnonzero(self.num_logprobs[rows] >= 0) if self.num_reporting else NO_INTS

    def _reports(self, row: int) -> bool:
        return bool(self.num_logprobs[row] >= 0 or self.num_prompt_logprobs[row] >= 0)

    def _add_edits(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.min_tokens[row] = params.min_tokens
        early = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)]
        if params.min_tokens:
            self._early.add(row, token=early)
        if params.allowed_token_ids:
            self._allowed.add(row, token=params.allowed_token_ids)
        if params.logit_bias:
            self._bias.add(row, token=list(params.logit_bias), bias=list(params.logit_bias.values()))
        self._bad_words.add(row, params.bad_words_token_ids or [])
        if _is_penalized(params):
            self._is_penalized[row] = True
            self._repetition[row] = params.repetition_penalty
            self._frequency[row] = params.frequency_penalty
            self._presence[row] = params.presence_penalty
            repeated = new.num_prompt_tokens if params.repetition_penalty != 1 else 0  # the others count outputs
            self._counts.add(row, new.token_ids[:repeated], new.token_ids[new.num_prompt_tokens :])

    def append_tokens(self, rows: Rows, token_ids: TokenIds) -> None:
        """One sampled token for each of these rows."""
        if self._num_edited:
            counted = self._is_penalized[rows]
            if counted.any():
                self._counts.append(rows[counted], token_ids[counted])

    def inputs(self, rows: Rows, table: RunnerTable) -> SamplingInputs:
        """The columns of these rows [S], in their order, for the token that each is about to get."""
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows]
        return SamplingInputs(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=positions,
            choice=self.choice[rows],
            edits=self._edits(rows, positions, table) if self._num_edited else NO_EDITS,
        )

    def _edits(self, rows: Rows, positions: Positions, table: RunnerTable) -> LogitEdits:
        place = np.full(len(self.seed), _NOT_SAMPLED)  # row of the table -> row of the batch
        place[rows] = np.arange(len(rows))
        output_len = np.zeros(len(self.seed), np.int64)
        output_len[rows] = positions
        is_sampled = place != _NOT_SAMPLED
        allowed, bias, early = self._allowed, self._bias, self._early
        is_allowed, is_biased = is_sampled[allowed["row"]], is_sampled[bias["row"]]
        is_early = is_sampled[early["row"]] & (output_len[early["row"]] < self.min_tokens[early["row"]])
        bad_row, bad_token = self._bad_words.forbidden(is_sampled, output_len, table)
        is_counted = is_sampled[self._counts.rows]
        counted = self._counts.rows[is_counted]
        allowed_row = place[allowed["row"][is_allowed]]
        return LogitEdits(
            limited=np.unique(allowed_row),
            allowed_row=allowed_row,
            allowed_token=allowed["token"][is_allowed],
            forbidden_row=place[np.append(bad_row, early["row"][is_early])],
            forbidden_token=np.append(bad_token, early["token"][is_early]),
            bias_row=place[bias["row"][is_biased]],
            bias_token=bias["token"][is_biased],
            bias=bias["bias"][is_biased],
            counted_row=place[counted],
            counted_token=self._counts.tokens[is_counted],
            occurrences=self._counts.counts[is_counted],
            repetition=self._repetition[counted],
            frequency=self._frequency[counted],
            presence=self._presence[counted],
        )


def _has_edits(params: SamplingParams) -> bool:
    options = (params.min_tokens, params.allowed_token_ids, params.logit_bias, params.bad_words_token_ids)
    return any(options) or _is_penalized(params)


def _num_logprobs(wanted: int | None) -> int:
    if wanted is None:
        return _NO_LOGPROBS
    return _ALL_LOGPROBS if wanted == -1 else wanted


def _is_penalized(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return penalties != (1.0, 0.0, 0.0)
