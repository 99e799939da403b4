"""OracleExecutor: it returns the captured tokens of each request under any schedule."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from core.batch.table import BatchTable
from core.capture.recorded_executor import RecordedExecutor
from core.execution.executor import FinishedStep, ModelInfo, StepHandle
from core.execution.plan import (
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    PooledColumns,
    SchedulerOutput,
    concat_logprobs,
)
from core.executors.fake import checksum, fake_candidates
from ipc.options.resolved import ResolvedConfig
from ipc.params.beam_search import num_candidates
from ipc.tables.arrays import NO_INT32S, Bools, Floats, Int32s, Ints

#: (client, request number, choice)
ChoiceKey = tuple[int, int, int]
#: Candidates of beam searches by beam_key(): ids and log probabilities.
Candidates: TypeAlias = Mapping[bytes, tuple[Int32s, Floats]]
#: Drafts that the captured executor proposed, by the choice and its number of output tokens then.
Offers: TypeAlias = Mapping[tuple[int, int, int, int], Int32s]
_DIGEST_BYTES = 16


def beam_key(client: int, number: int, token_ids: Int32s) -> bytes:
    """Return a key for the tokens of a request's beam, including the prompt."""
    named = client.to_bytes(8, "little", signed=True) + number.to_bytes(8, "little")
    return blake2b(named + token_ids.astype("<i4", copy=False).tobytes(), digest_size=_DIGEST_BYTES).digest()


class OracleExecutor(RecordedExecutor):
    """An executor without a model for another schedule of recorded requests.

    tokens: output token ids of each choice, from its first. At numerics level L2 these are the tokens under any
    schedule, and candidates are those of beams with the same tokens. A choice that gets further than recorded, because
    it was aborted then, gets tokens that do not end it; they are counted in num_made_up. A draft is right if it equals
    the recorded token. table: the scheduler's, set once the engine exists; its rows are read, not kept.
    """

    table: BatchTable

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        tokens: Mapping[ChoiceKey, Sequence[int]],
        candidates: Candidates | None = None,
        *,
        offers: Offers | None = None,
    ) -> None:
        super().__init__(info)
        self._recorded_candidates, self._offers = candidates or {}, offers or {}
        self.num_made_up = 0
        counts = [len(one) for one in tokens.values()]
        self._flat = np.array([token for one in tokens.values() for token in one] + [0], np.int32)
        firsts = (np.cumsum([0, *counts])[:-1]).tolist()
        self._places = dict(zip(tokens, zip(firsts, counts, strict=True), strict=True))
        self._first: Ints = np.zeros(config.max_num_seqs, np.int64)  # by row: start of its tokens in _flat
        self._count: Ints = np.zeros(config.max_num_seqs, np.int64)  # by row: recorded tokens
        self._filler = np.zeros(config.max_num_seqs, np.int32)  # by row
        self._num_candidates: Ints = np.zeros(config.max_num_seqs, np.int64)  # by row: above 0 in a beam search
        self._num_searches = 0  # rows ever used for one
        self._pools: Bools = np.zeros(config.max_num_seqs, np.bool_)  # by row

    def next_end(self, rows: Ints, positions: Ints, most: Ints) -> Ints:
        """Return how many output tokens of each row are known [n]: its recorded tokens, or most[i]."""
        counts = self._count[rows]
        end: Ints = np.where(positions < counts, np.minimum(counts, most), most)
        return end

    def tokens_at(self, rows: Ints, positions: Ints) -> Int32s:
        """Return the output token at positions[i] of rows[i]."""
        known = positions < self._count[rows]
        tokens: Int32s = self._flat[np.where(known, self._first[rows] + positions, 0)]
        return np.where(known, tokens, self._filler[rows])

    def count_made_up(self, rows: Ints, positions: Ints) -> None:
        """Count the returned tokens that are not in the capture."""
        self.num_made_up += int(np.count_nonzero(positions >= self._count[rows]))

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step with the recorded tokens of its rows."""
        if plan.added or plan.added_pooling:
            self._take_in(plan)
        table, rows = self.table, plan.rows.astype(np.int64)
        ends = table.num_computed_tokens[rows]
        samples = ends >= table.num_tokens[rows]
        pooled = self._pool(rows, samples) if plan.added_pooling or self._pools[rows].any() else None
        candidates = self._search(rows, samples) if self._num_searches else None
        token_ids, counts = np.full(len(rows), NO_TOKEN, np.int32), None
        positions = ends - table.num_prompt_tokens[rows]
        if len(plan.num_draft_tokens):
            token_ids, counts = self._verify(plan, rows, samples, positions)
        else:
            sampling, at = rows[samples], positions[samples]
            token_ids[samples] = self.tokens_at(sampling, at)
            self.count_made_up(sampling, at)
        drafts: tuple[Int32s | None, Int32s] = (None, NO_INT32S)
        if self._offers:
            drafts = self._offered(rows, positions + (samples if counts is None else counts))
        output = ModelRunnerOutput(
            plan.step, token_ids, None, counts, [], *drafts, pooled=pooled, candidates=candidates
        )
        return FinishedStep(output)

    def _take_in(self, plan: SchedulerOutput) -> None:
        table = self.table
        for new in plan.added:
            key = (int(table.client[new.row]), int(table.number[new.row]), new.choice)
            self._first[new.row], self._count[new.row] = self._places.get(key, (0, 0))
            ends = {*self.info.eos_token_ids, *(new.params.stop_token_ids or ())}
            self._filler[new.row] = next(token for token in range(len(ends) + 1) if token not in ends)
            searches = new.params.use_beam_search
            self._num_candidates[new.row] = num_candidates(new.params, 1) if searches else 0
            self._num_searches += searches
            self._pools[new.row] = False
        for pooling in plan.added_pooling:
            self._num_candidates[pooling.row], self._pools[pooling.row] = 0, True

    def _verify(self, plan: SchedulerOutput, rows: Ints, samples: Bools, positions: Ints) -> tuple[Int32s, Int32s]:
        """Return (token_ids, counts [R]) of the plan's rows: tokens up to the first that is not the row's draft."""
        counts, tokens = samples.astype(np.int32), list[Int32s]()
        ends = plan.num_draft_tokens.cumsum()
        for index in np.flatnonzero(samples).tolist():
            most = int(plan.num_draft_tokens[index])
            drafts = plan.draft_token_ids[int(ends[index]) - most : int(ends[index])]
            known = int(self._count[rows[index]] - positions[index])  # no token is made up after the recorded ones
            row, at = rows[index : index + 1].repeat(most + 1), positions[index] + np.arange(most + 1)
            found = self.tokens_at(row, at)
            count = counts[index] = min(
                1 + int(np.append(found[:-1] == drafts, False).argmin()), known if known > 0 else most + 1
            )
            self.count_made_up(row[:count], at[:count])
            tokens.append(found[:count])
        return np.concatenate([NO_INT32S, *tokens]), counts

    def _offered(self, rows: Ints, positions: Ints) -> tuple[Int32s | None, Int32s]:
        """Return the drafts proposed for rows that have positions[i] output tokens now: counts [R], ids; or nothing."""
        columns = zip(*(one.tolist() for one in self.table.address(rows)), positions.tolist(), strict=True)
        found = [self._offers.get(key, NO_INT32S) for key in columns]
        if not any(map(len, found)):
            return None, NO_INT32S
        return np.array([len(one) for one in found], np.int32), np.concatenate(found)

    def _pool(self, rows: Ints, samples: Bools) -> PooledColumns | None:
        """Return a vector of one number for each pooling row whose tokens are all computed; no row of them samples."""
        ended = np.flatnonzero(samples & self._pools[rows])
        samples &= ~self._pools[rows]
        if not len(ended):
            return None
        ones = np.ones(len(ended), np.int32)
        return PooledColumns(ended.astype(np.int32), ones, ones, np.zeros(len(ended), np.float32))

    def _search(self, rows: Ints, samples: Bools) -> LogprobColumns | None:
        """Return the candidates of the beams whose tokens are all computed; no row of them samples."""
        which, parts = np.flatnonzero(samples & (self._num_candidates[rows] > 0)), []
        for index in which.tolist():
            ids, values = self._candidates_of(int(rows[index]))
            ones, length = np.ones(1, np.int32), self.table.num_tokens[rows[index : index + 1]].astype(np.int32)
            parts.append(LogprobColumns(ones * index, length, ones * len(ids), ones, ids, values))
        samples[which] = False
        return concat_logprobs(parts)

    def _candidates_of(self, row: int) -> tuple[Int32s, Floats]:
        """Return the recorded candidates of a beam with these tokens; an unknown beam gets made-up ones."""
        known = self.table.token_ids(row)
        key = beam_key(int(self.table.client[row]), int(self.table.number[row]), known)
        if key in self._recorded_candidates:
            return self._recorded_candidates[key]
        self.num_made_up += 1
        ids, values = fake_candidates(
            np.array([checksum(known)]),
            np.array([len(known)], np.uint64),
            int(self._num_candidates[row]),
            self.info.vocab_size,
        )
        return ids[0], values[0]
