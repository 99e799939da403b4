"""Speculation: which drafts a step verifies, and how many of them were right.

Drafts only use what is left over. They get the token budget that no known token wants in the step, and free blocks
beyond the watermark, those promised to rows, and one for each row. While requests wait, drafts get no new blocks. So
drafts never preempt a row or delay a request's start.
"""

import numpy as np

from core.batch.table import FREE_ROW
from core.execution.plan import SchedulerOutput
from core.proposers.build import build_proposer
from core.proposers.offered import OfferedDrafts
from core.proposers.proposer import NUM_KINDS, OFFERED, Proposals, Proposer
from core.scheduling.draft import Draft, DraftTokens
from core.scheduling.draft_rule import AllDrafts, DraftRule
from core.scheduling.outputs import OutputCollector
from core.scheduling.parts import SchedulerParts
from ipc.options.speculation import MAX_DRAFTS
from ipc.options.workers import overlaps
from ipc.tables.arrays import Bools, Doubles, Int32s, Ints, Rows
from ipc.tables.columns import Columns, column

#: A row's counts are halved when it has tried this many drafts, so that recent results count most.
_ROW_MEMORY = 32
#: The same for a kind of drafts, over all rows.
_KIND_MEMORY = 1024
#: How many of the three drafts that each kind starts with count as right, before any is tried.
_FIRST_RIGHT = np.where(np.arange(NUM_KINDS) == OFFERED, 2, 1)
#: A row's own record has the same weight as its kind's once it has tried this many drafts.
_PRIOR_WEIGHT = 4


class Speculation(Columns):
    """The drafts of running rows. Sources are asked in turn; a row gets the drafts of the first one that has any."""

    _tenancy: Ints = column(FREE_ROW)  # of the row's record
    _kind: Ints = column()  # of the drafts in flight
    _num_tried: Ints = column()  # drafts up to and including the first wrong one
    _num_right: Ints = column()

    def __init__(self, parts: SchedulerParts, num_watermark_blocks: int) -> None:
        config, batch = parts.config, parts.batch
        super().__init__(config.max_num_seqs)
        settings = config.speculative_config
        self._batch, self._waiting, self._policy, self._stats = batch, parts.waiting, parts.policy, parts.stats
        self._watermark = num_watermark_blocks
        self._most = MAX_DRAFTS if settings is None else settings.num_speculative_tokens
        self.most_in_step = config.max_num_seqs * MAX_DRAFTS
        self._rule = DraftRule()
        if settings is not None:
            # otherwise each row waits for its turn anyway
            loses_turn = overlaps(config) and config.pipeline_parallel_size == 1
            self._rule = DraftRule(settings.step_ns, settings.draft_ns, settings.alone_ns, loses_turn=loses_turn)
        self._first_right = np.full(NUM_KINDS, 2) if self._rule.weighs_pairs else _FIRST_RIGHT.copy()
        self._kinds_tried = np.zeros(NUM_KINDS, np.int64)
        self._kinds_right = np.zeros(NUM_KINDS, np.int64)
        self.offered = OfferedDrafts(batch.table, self._most)
        self.proposers: list[Proposer] = []
        if settings is not None and (proposer := build_proposer(config, settings, batch.table)) is not None:
            self.proposers.append(proposer)

    def use_only(self, source: Proposer, most: int, *, after_prompts: bool) -> None:
        """Take drafts from this source alone, whatever they cost, `most` in a step. after_prompts: see DraftRule.

        It is called before the first step, of engines that verify given answers. These are not captured.
        """
        self.proposers, self.offered = [source], OfferedDrafts(self._batch.table, 0)
        self._rule, self._most, self.most_in_step = AllDrafts(after_prompts=after_prompts), most, most

    def fill(self, draft: Draft, rows: Ints, counts: Ints) -> None:
        """Add drafts to a step, out of its budget.

        rows, counts [R]: the step's rows, those that start now last, and how many known tokens each computes.
        """
        budget = min(draft.budget, self.most_in_step)
        is_offered = self.offered.is_used and self.offered.is_open
        if not (self.proposers or is_offered) or not budget or not len(rows):
            return
        num_tokens = int(counts.sum())
        first_kind = OFFERED if self.offered.is_used else OFFERED + 1
        if not self._rule.may_pay(num_tokens, float(self._kind_chances()[first_kind:].max())):
            return
        if not self._rule.after_prompts:
            rows, counts = self._decoding(rows, counts, len(rows) - len(draft.starts))
        rows, ends = self._sampling(rows, counts)
        if not len(rows):
            return
        if self._rule.weighs_pairs and np.count_nonzero(self._batch.table.num_in_draft[draft.rows]):
            return  # otherwise the rows would split into two groups, each waiting while the other runs
        room = np.minimum(self._batch.table.max_total_tokens[rows] - 1 - ends, self._most)
        found = self._propose(rows, room)
        if not np.count_nonzero(found.counts):
            return
        chosen = self._rule.choose(num_tokens, self._chances(rows, found.kinds), found.counts, budget)
        chosen = self._give_blocks(draft, rows, ends, chosen)
        given = chosen > 0
        if not given.any():
            return
        rows, counts, token_ids = rows[given], chosen[given], found.token_ids[given]
        self._kind[rows] = found.kinds[given]
        kept = np.arange(token_ids.shape[1]) < counts[:, None]
        draft.guessed = DraftTokens(rows, counts, token_ids[kept].astype(np.int32, copy=False))
        draft.budget -= int(counts.sum())

    def begin(self, guessed: DraftTokens) -> None:
        """Count the drafts of a step that starts now."""
        table, rows = self._batch.table, guessed.rows
        table.num_in_draft[rows] = guessed.counts
        table.num_placeholders[rows] -= 1

    def end(self, plan: SchedulerOutput, rows: Ints, live: Bools, yielded: Int32s) -> None:
        """Record how many tokens each of the plan's rows yielded, before they are appended.

        rows, live, yielded [R]; rows that are not live now belong to other requests. Drafts of a row without a token
        were in flight when the row got several, so nothing was verified.
        """
        if not len(plan.num_draft_tokens):
            return
        verified = live & (plan.num_draft_tokens > 0) & (yielded > 0)
        rows, counts = rows[verified], plan.num_draft_tokens[verified].astype(np.int64)
        right = np.maximum(yielded[verified].astype(np.int64) - 1, 0)
        assert not np.count_nonzero(right > counts), f"{right} of {counts} drafts were accepted"
        table = self._batch.table
        self._policy.serve(rows, right)
        table.num_computed_tokens[rows] += right
        table.num_in_draft[rows] = 0
        table.num_drafted[rows] += counts
        table.num_accepted[rows] += right
        self._stats.count_drafts(counts, right)
        self._remember(rows, np.minimum(right + 1, counts), right)

    def report(self, rows: Rows, outputs: OutputCollector) -> None:
        """Report the drafts of rows that end. By now the sources of drafts know their tokens."""
        for source in self.proposers:
            source.end(rows)
        if not self._stats.num_drafts:
            return
        table = self._batch.table
        ended = rows[table.num_drafted[rows] > 0]
        columns = table.number, table.choice, table.num_drafted, table.num_accepted
        for client, *entry in zip(table.client[ended].tolist(), *(one[ended].tolist() for one in columns), strict=True):
            number, choice, num_drafted, num_accepted = entry
            outputs.add_drafts(client, (number, choice, num_drafted, num_accepted))

    # --- which rows ----------------------------------------------------------------------------------------------

    def _decoding(self, rows: Ints, counts: Ints, num_running: int) -> tuple[Ints, Ints]:
        """Return those of the first num_running rows that compute one token behind the prompt, and their counts."""
        table, rows, counts = self._batch.table, rows[:num_running], counts[:num_running]
        decodes = (counts == 1) & (table.num_tokens[rows] > table.num_prompt_tokens[rows])
        return rows[decodes], counts[decodes]

    def _sampling(self, rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return the rows that sample, and how many known tokens each will have computed after this step."""
        table = self._batch.table
        ends = table.num_computed_tokens[rows] + counts
        takes = ends == table.num_tokens[rows] + table.num_placeholders[rows]
        return rows[takes], ends[takes]

    def _propose(self, rows: Ints, room: Ints) -> Proposals:
        """Return at most room[i] drafts for each row. They follow the tokens that steps in flight sample."""
        shift = self._batch.table.num_placeholders[rows]
        most = self._most + int(shift.max())
        first, *others = (self.offered, *self.proposers) if self.offered.is_used else self.proposers
        found = first.propose(rows, most)
        counts, token_ids, kinds = np.minimum(found.counts, most), found.token_ids[:, :most], found.kinds
        for source in others:
            without = np.flatnonzero(counts == 0)
            if len(without):
                found = source.propose(rows[without], most)
                counts[without], kinds[without] = np.minimum(found.counts, most), found.kinds
                token_ids[without] = found.token_ids[:, :most]
        if np.count_nonzero(shift):
            places = np.minimum(np.arange(most) + shift[:, None], most - 1)
            token_ids = np.take_along_axis(token_ids, places, 1)
        is_feature = token_ids < 0  # copied from the prompt; not a token
        if is_feature.any():
            counts = np.minimum(counts, np.where(is_feature.any(1), is_feature.argmax(1), most) + shift)
        return Proposals(np.minimum(np.maximum(counts - shift, 0), np.maximum(room, 0)), token_ids, kinds)

    def _give_blocks(self, draft: Draft, rows: Ints, ends: Ints, counts: Ints) -> Ints:
        """Allocate the blocks for counts [n] drafts. Return the counts, reduced where blocks are short."""
        batch, pool = self._batch, self._batch.pool
        needs = batch.lacking(rows, ends + counts)
        spare = 0
        if needs.any() and not len(self._waiting):
            spare = pool.num_free - self._watermark - batch.num_promised_blocks() - len(batch)
        short = needs.cumsum() > spare
        needs[short] = 0
        counts = np.where(short, np.minimum(counts, batch.room_of(rows) - ends), counts)
        growing = needs > 0
        if growing.any():
            added = (ends + counts - batch.table.num_computed_tokens[rows])[growing]
            batch.grow(draft.blocks, rows[growing], needs[growing], added)
        return counts

    # --- what drafts are worth -----------------------------------------------------------------------------------

    def _kind_chances(self) -> Doubles:
        """Return how often a draft of each kind is right, float64 [NUM_KINDS].

        A new kind starts at a third. Offered drafts, which an executor spent time on, start at two thirds. So do all
        kinds if a row loses a turn by its drafts: at a third they would never be tried.
        """
        chances: Doubles = (self._kinds_right + self._first_right) / (self._kinds_tried + 3)
        return chances

    def _chances(self, rows: Rows, kinds: Ints) -> Doubles:
        """Return how often the next draft of each row [n] is right: by the row's record, and at first by its kind's."""
        is_own = self._tenancy[rows] == self._batch.table.tenancy[rows]
        tried, right = np.where(is_own, self._num_tried[rows], 0), np.where(is_own, self._num_right[rows], 0)
        chances: Doubles = (right + _PRIOR_WEIGHT * self._kind_chances()[kinds]) / (tried + _PRIOR_WEIGHT)
        return chances

    def _remember(self, rows: Ints, tried: Ints, right: Ints) -> None:
        tenancies = self._batch.table.tenancy[rows]
        others = rows[self._tenancy[rows] != tenancies]
        self._num_tried[others] = self._num_right[others] = 0
        self._tenancy[rows] = tenancies
        self._num_tried[rows] += tried
        self._num_right[rows] += right
        full = rows[self._num_tried[rows] >= _ROW_MEMORY]
        self._num_tried[full] //= 2
        self._num_right[full] //= 2
        kinds = self._kind[rows]
        self._kinds_tried += np.bincount(kinds, tried, NUM_KINDS).astype(np.int64)
        self._kinds_right += np.bincount(kinds, right, NUM_KINDS).astype(np.int64)
        full = np.flatnonzero(self._kinds_tried >= _KIND_MEMORY)
        self._kinds_tried[full] //= 2
        self._kinds_right[full] //= 2

    def offer(self, rows: Rows, tenancies: Ints, counts: Ints, token_ids: Int32s) -> None:
        """Keep drafts for the next plans of the rows that still have these tenancies."""
        is_live = self._batch.table.tenancy[rows] == tenancies
        if np.count_nonzero(is_live) < len(rows):
            token_ids = token_ids[is_live.repeat(counts)]
        self.offered.offer(rows[is_live], tenancies[is_live], counts[is_live].astype(np.int64), token_ids)
