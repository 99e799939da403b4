"""BeamSearches: the running beam searches. Each is a group of rows that advance together.

Each row of a group runs for one token at a time (max_total_tokens) and yields candidates instead of a token. When all
rows of the group have theirs, the rules (core/scheduling/beams/beam_rules.py) choose the next beams. Each row then
continues its own beam or becomes a copy of another row. A group that has lost a row gives up all its rows and waits.
"""

import numpy as np

from core.batch.request import NO_ROW, Request
from core.execution.plan import LogprobColumns, SchedulerOutput
from core.scheduling.beams.beam_rules import BeamSearch, Candidates, Finished, NextBeams, Token, reported, sequence
from core.scheduling.decisions import Cause
from core.scheduling.draft import Draft
from core.scheduling.ends import Ends
from core.scheduling.parts import SchedulerParts
from core.scheduling.preemption import Preemption
from ipc.params.beam_search import MAX_BEAM_TOKENS
from ipc.tables.arrays import Ints, Rows
from ipc.tables.rounding import ceil_div
from ipc.wire.messages import FinishReason

#: Number of steps without any computing row after which a group gives up its rows. It happens if rows of a group wait
#: for another of its rows that cannot start. If other rows compute, they end at some time, and then there is room.
_PATIENCE = 8


class _Group:
    """The rows of one search. beams: its requests, one a beam, best first."""

    def __init__(self, requests: list[Request], search: BeamSearch) -> None:
        self.beams = requests
        self.search = search
        self.candidates: dict[int, Candidates] = {}  # by choice
        self.is_broken = False
        self.num_idle_steps = 0


class BeamSearches:
    """All searches, by client and number. Without any, a step costs one check."""

    def __init__(
        self,
        parts: SchedulerParts,
        preemption: Preemption,
        ends: Ends,
        *,
        eos_token_ids: tuple[int, ...],
        num_watermark_blocks: int,
    ) -> None:
        self._batch, self._waiting, self._preemption, self._ends = parts.batch, parts.waiting, preemption, ends
        self._outputs, self._stats, self._eos = parts.outputs, parts.stats, eos_token_ids
        self._watermark = num_watermark_blocks
        self._groups: dict[tuple[int, int], _Group] = {}
        self._num_scheduled = 0  # number of tokens of all steps before the last one
        parts.batch.before_release.append(self._leave)

    def __len__(self) -> int:
        """Return the number of unfinished searches."""
        return len(self._groups)

    def never_fits(self, requests: list[Request], max_num_seqs: int) -> str | None:
        """Return why the search could not run even alone, with the numbers, or None if it could."""
        first, width, size = requests[0], len(requests), self._batch.block_size
        if width > max_num_seqs:
            return f"the search has {width} beams, and max_num_seqs is {max_num_seqs}"
        shared = self._batch.forks.num_sure(first.num_prompt_tokens)
        own = width * (ceil_div(first.max_computed_tokens, size) - shared)
        shared += shared if first.needs_whole_prompt else 0  # its first beam computes what the others find in the cache
        needed = self._batch.most_blocks_of_beams(shared, own)
        there_are = self._batch.pool.num_blocks - 1
        kept = self._watermark if width > 1 else 0  # a beam that starts while others run leaves this many blocks free
        if needed + kept > there_are:
            beside = f" in addition to the watermark of {kept}" if kept else ""
            return f"the search's {width} beams may need {needed} KV blocks together{beside}, and there are {there_are}"
        return None

    def enter(self, requests: list[Request]) -> None:
        """Add the rows of a new search. All start with the same prompt."""
        first = requests[0]
        assert first.sampling is not None, f"request {first.number} of client {first.client} pools"
        max_tokens = min(first.max_total_tokens - first.num_prompt_tokens, MAX_BEAM_TOKENS)
        search = BeamSearch(first.sampling, len(requests), max_tokens, self._eos)
        self._groups[first.client, first.number] = _Group(list(requests), search)
        for request in requests:
            request.max_total_tokens = request.num_tokens + 1

    def mend(self, draft: Draft) -> None:
        """Before a step is filled, make groups that have lost a row wait, and end those that have lost a beam."""
        before, self._num_scheduled = self._num_scheduled, self._stats.num_scheduled_tokens
        is_idle = self._num_scheduled == before  # in the last step
        for key, group in list(self._groups.items()):
            if any(beam.is_finished for beam in group.beams):
                del self._groups[key]
                self._abort([beam for beam in group.beams if not beam.is_finished])
                continue
            has_begun = any(beam.has_started for beam in group.beams)
            waits = any(beam.row == NO_ROW and not beam.follows for beam in group.beams)
            group.num_idle_steps = group.num_idle_steps + 1 if waits and group.candidates and is_idle else 0
            if group.is_broken or group.num_idle_steps > _PATIENCE:
                self._break(group, draft)
            for beam in group.beams:
                beam.has_started = has_begun  # a group starts as a whole

    def update(self, plan: SchedulerOutput, tenancies: Ints, columns: LogprobColumns) -> None:
        """Take the candidates that a step has produced, and advance the groups that have candidates for all rows."""
        table, ends = self._batch.table, columns.counts.cumsum()
        for index, end, count in zip(columns.rows.tolist(), ends.tolist(), columns.counts.tolist(), strict=True):
            row = int(plan.rows[index])
            request = table.request[row]
            if request is None or table.tenancy[row] != tenancies[index]:
                continue
            group = self._groups[request.client, request.number]
            part = slice(end - count, end)
            group.candidates[request.choice] = Candidates(columns.token_ids[part], columns.values[part])
            # A row with candidates may have been given up for this very step. Then the group starts again.
            if len(group.candidates) == len(group.beams) and not group.is_broken:
                self._advance(group)

    def _advance(self, group: _Group) -> None:
        chosen = group.search.advance([group.candidates[beam.choice] for beam in group.beams])
        group.candidates.clear()
        if chosen is None:
            self._finish(group)
            return
        group.beams = self._place(group.beams, chosen)
        rows = np.array([beam.row for beam in group.beams])
        table = self._batch.table
        table.append_tokens(rows, np.array(chosen.token_ids, np.int32))
        table.max_total_tokens[rows] += 1
        for beam in group.beams:
            beam.max_total_tokens += 1
        self._batch.carried.renewed_rows.update(dict.fromkeys(rows.tolist()))

    def _place(self, beams: list[Request], chosen: NextBeams) -> list[Request]:
        """Return the request for each next beam: its parent's if it is the first to extend that parent, else a free
        one.

        A free one is the request of a beam that no next beam extends. Its row becomes a copy of the parent's.
        """
        free = [beam for index, beam in enumerate(beams) if index not in chosen.parents]
        taken, placed = set[int](), list[Request]()
        for parent in chosen.parents:
            if parent not in taken:
                taken.add(parent)
                placed.append(beams[parent])
            else:
                placed.append(free.pop(0))
                self._batch.take_over(placed[-1].row, beams[parent].row)
        return placed

    def _finish(self, group: _Group) -> None:
        """Report the best sequences as the choices of the request, and end its rows."""
        first = group.beams[0]
        del self._groups[first.client, first.number]
        results = group.search.results(first.params.n)
        if results:
            self._report(first, results)
        for beam in group.beams:
            if len(results) <= beam.choice < first.params.n:  # there are no more sequences
                self._outputs.add_finish(beam, 0, FinishReason.ABORT)
        self._stats.num_finished += len(results) - len(group.beams)  # choices are counted, not beams
        self._ends.finish(np.array([beam.row for beam in group.beams]))

    def _report(self, request: Request, results: list[Finished]) -> None:
        count = len(results)
        sequences = [sequence(one.last) for one in results]
        counts = np.array([len(tokens) for tokens in sequences])
        client, number, choices = np.full(count, request.client), np.full(count, request.number), np.arange(count)
        if request.sampling is not None and request.sampling.logprobs is not None:
            columns = _logprobs(sequences, request.num_prompt_tokens, request.sampling.logprobs)
            self._outputs.add_logprobs(client.repeat(counts), number.repeat(counts), choices.repeat(counts), columns)
        self._stats.num_generation_tokens += int(counts.sum())
        self._outputs.add_tokens(
            client,
            number,
            choices,
            np.zeros(count, np.int64),
            np.array([token.token_id for tokens in sequences for token in tokens], np.int32),
            np.array([one.reason for one in results], np.uint8),
            np.array([one.stop_token is not None for one in results]),
            counts,
        )

    def _break(self, group: _Group, draft: Draft) -> None:
        """Make all rows of a group wait. One will compute the prompt, and the others follow it."""
        for beam in group.beams:
            if beam.row != NO_ROW:
                self._preemption.preempt(draft, beam.row, Cause.OLDER)
        for beam in group.beams:
            self._waiting.follow(beam, beam is not group.beams[0] and beam.num_prompt_tokens > 1)
        group.candidates.clear()
        group.is_broken, group.num_idle_steps = False, 0

    def _abort(self, beams: list[Request]) -> None:
        for beam in beams:
            self._ends.take_out(beam)
            if beam.choice < beam.params.n:
                self._outputs.add_finish(beam, 0, FinishReason.ABORT)

    def _leave(self, rows: Rows) -> None:
        if not self._groups:
            return
        for request in (self._batch.table.request[row] for row in rows.tolist()):
            group = None if request is None else self._groups.get((request.client, request.number))
            if group is not None:
                group.is_broken = True


def _logprobs(sequences: list[list[Token]], first: int, num_top: int) -> LogprobColumns:
    """Return what is reported of the tokens of some sequences, whose first tokens have the position `first`."""
    counts, token_ids, values = zip(*(reported(tokens, num_top) for tokens in sequences), strict=True)
    lengths = np.array([len(tokens) for tokens in sequences])
    return LogprobColumns(
        rows=np.arange(len(sequences)).repeat(lengths).astype(np.int32),
        positions=(first + np.concatenate([np.arange(length) for length in lengths])).astype(np.int32),
        counts=np.concatenate(counts),
        ranks=np.array([1 + token.place for tokens in sequences for token in tokens], np.int32),
        token_ids=np.concatenate(token_ids),
        values=np.concatenate(values),
    )
