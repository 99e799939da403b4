"""ModelDrafter: drafts from a second, smaller model, drawn with the same noise as the rows' own tokens.

Its K and V are stored in blocks with the same numbers as the target's blocks. So no second allocator is needed, and a
block that several requests share is shared here too. For each block it counts how many tokens it has computed. So after
a prefix cache hit, a preemption or a swap it computes exactly what is missing.
"""

import numpy as np

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.models.interface import Model
from core.models.step import ModelInputs, StepResult
from core.runner.draft_blocks import DraftBlocks
from core.runner.draft_chain import NextLogits, draw_chain, num_drawn
from core.runner.draft_pause import DraftPause
from core.runner.drafter import RanStep
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import NO_INT32S, Int32s, Ints
from ipc.tables.columns import Columns, column

#: The most known tokens computed in one step. Catching up with a long prompt takes several steps.
_CATCH_UP = 512


class ModelDrafter(Columns):
    """The draft model, its KV cache, and how much of each row of the runner's table it has computed."""

    _num_valid: Ints = column()  # leading tokens of the row whose K and V are computed
    _num_chained: Ints = column()  # drafts after them whose K and V are also computed
    _room: Ints = column()  # tokens that the row's blocks held then; anything computed after them is lost

    def __init__(self, model: Model, *, num_rows: int, num_blocks: int, block_size: int, num_drafts: int) -> None:
        """Allocate the cache: num_blocks, and for each row the blocks needed for drafts after its own blocks.

        num_drafts: the most drafts per row. Errors: MemoryError.
        """
        super().__init__(num_rows)
        self._model, self._block_size, self._num_drafts = model, block_size, num_drafts
        self._placing = DraftBlocks(num_rows, num_blocks, block_size, num_drafts)
        self._cache = model.allocate_cache(self._placing.num_blocks, block_size)
        self._num_filled = np.zeros(num_blocks, np.int64)  # number of leading tokens of each block that are computed
        self._drafts = np.zeros((num_rows, num_drafts), np.int32)
        self._pause = DraftPause()

    def apply(self, plan: SchedulerOutput) -> None:
        """Handle which blocks have new contents, and which rows start."""
        self._num_filled[plan.block_ids] = 0
        self._num_filled[plan.swapped_in_blocks] = 0
        for new in plan.added:
            num_cached = new.num_computed_tokens // self._block_size
            self._num_filled[new.block_ids[num_cached:]] = 0
            filled = self._num_filled[new.block_ids[:num_cached]] == self._block_size
            self._num_valid[new.row] = self._block_size * int(np.append(filled, False).argmin())
            self._num_chained[new.row] = 0

    def propose(self, step: RanStep, table: RunnerTable, sampling: SamplingColumns) -> tuple[Int32s, Int32s]:
        """Return (counts [R], token ids, row after row) of drafts for the rows that have sampled in this step."""
        plan = step.plan
        rows = plan.rows.astype(np.int64)
        counts = np.zeros(len(rows), np.int32)
        if self._pause.begins(plan):
            return counts, NO_INT32S
        known = table.num_tokens[rows]
        decodes = table.num_computed_tokens[rows] == known - 1
        limit = self._model.max_model_len
        goals = np.minimum(np.where(decodes, known, table.num_computed_tokens[rows]), limit)
        self._take_chains(rows, table)
        goals = np.minimum(goals, self._num_valid[rows] + self._shares(goals - self._num_valid[rows]))
        drafting = np.flatnonzero(decodes & (goals == known))
        result = self._catch_up(rows, goals, drafting, table)
        self._pause.offer(bool(len(drafting)))
        if result is None or not len(drafting):
            return counts, NO_INT32S
        token_ids = self._chain(rows[drafting], goals[drafting], result, table, sampling)
        counts[drafting] = np.minimum(self._num_drafts, limit - goals[drafting] + 1)
        counts[drafting] = np.minimum(counts[drafting], num_drawn(token_ids))
        is_held = self._room[rows[drafting]] >= goals[drafting]  # otherwise all drafts are after the row's blocks
        self._num_chained[rows[drafting]] = np.where(is_held, np.maximum(counts[drafting] - 1, 0), 0)
        self._drafts[rows[drafting]] = token_ids
        kept = np.arange(self._num_drafts) < counts[drafting][:, None]
        return counts, token_ids[kept]

    def step(self, rows: Ints, table: RunnerTable, sampling: SamplingColumns) -> None:
        """Run one round of single-token drafts with meaningless contents, to measure it."""
        ends = np.ones(len(rows), np.int64)
        result = self._forward(rows, np.zeros(len(rows), np.int64), ends - 1, ends, np.arange(len(rows)), table)
        self._chain(rows, ends, result, table, sampling)

    def _take_chains(self, rows: Ints, table: RunnerTable) -> None:
        """Count drafts that became tokens as computed."""
        if self._num_drafts > 1:
            places = self._num_valid[rows][:, None] + np.arange(self._num_drafts - 1)
            inside = np.minimum(places, table.num_tokens[rows][:, None] - 1)
            right = (table.tokens.get(rows[:, None], inside) == self._drafts[rows, :-1]) & (places == inside)
            right &= np.arange(self._num_drafts - 1) < self._num_chained[rows][:, None]
            chained = right.cumprod(1).sum(1)
            chained = np.clip(self._room[rows] - self._num_valid[rows], 0, chained)
            owners = rows.repeat(chained)
            taken = places[np.arange(self._num_drafts - 1) < chained[:, None]]
            self._num_valid[rows] += chained
            self._fill(owners, taken, table)
        self._num_chained[rows] = 0
        self._num_valid[rows] = np.minimum(self._num_valid[rows], table.num_tokens[rows] - 1)

    @staticmethod
    def _shares(wanted: Ints) -> Ints:
        """Return how many of the wanted [R] tokens each row may compute in this step. Earlier rows go first."""
        wanted = np.maximum(wanted, 0)
        before = wanted.cumsum() - wanted
        shares: Ints = np.clip(max(_CATCH_UP, 2 * len(wanted)) - before, 0, wanted)
        return shares

    def _catch_up(self, rows: Ints, goals: Ints, drafting: Ints, table: RunnerTable) -> StepResult | None:
        """Compute the rows' tokens up to goals [R].

        The result has the logits after the last token of `drafting` rows.
        """
        behind = np.flatnonzero(goals > self._num_valid[rows])
        if not len(behind):
            return None
        rows, ends = rows[behind], goals[behind]
        counts = ends - self._num_valid[rows]
        last: Ints = counts.cumsum() - 1
        owners = rows.repeat(counts)
        positions: Ints = np.arange(int(last[-1]) + 1) + (ends - 1 - last).repeat(counts)
        logits_rows = last[np.searchsorted(behind, drafting)]
        tokens = table.tokens.get(owners, positions).astype(np.int64)
        result = self._forward(rows, tokens, positions, ends, logits_rows, table, counts)
        self._room[rows] = table.num_blocks[rows] * self._block_size
        held = positions < self._room[owners]
        self._fill(owners[held], positions[held], table)
        self._num_valid[rows] = np.minimum(ends, self._room[rows])
        return result

    def _fill(self, owners: Ints, positions: Ints, table: RunnerTable) -> None:
        """Count the tokens at these positions as computed in their blocks. The positions of a row ascend."""
        blocks = table.blocks.get(owners, positions // self._block_size)
        self._num_filled[blocks] = positions % self._block_size + 1  # if a block has several, the last one counts

    def _chain(
        self, rows: Ints, lengths: Ints, result: StepResult, table: RunnerTable, sampling: SamplingColumns
    ) -> Int32s:
        """Return drafts [n, num_drafts] that follow lengths [n] tokens of rows [n]; negative after the last one."""
        each = np.arange(len(rows))

        def go_on(index: int, tokens: Ints) -> NextLogits:
            positions = np.minimum(lengths + index - 1, self._model.max_model_len - 1)
            found = self._forward(rows, tokens, positions, positions + 1, each, table)
            return NextLogits(found.logits, found.largest)

        first = NextLogits(result.logits, result.largest)
        return draw_chain(rows, self._num_drafts, first, go_on, table, sampling, self._model.sampler)

    def _forward(
        self,
        rows: Ints,
        tokens: Ints,
        positions: Ints,
        ends: Ints,
        logits_rows: Ints,
        table: RunnerTable,
        counts: Ints | None = None,
    ) -> StepResult:
        """Run the model on tokens [T] of rows [n], counts[i] or one each, with contexts of ends [n] tokens."""
        counts = np.ones(len(rows), np.int64) if counts is None else counts
        block_tables = self._placing.tables(rows, int(ends.max()), table)
        owners = np.arange(len(rows)).repeat(counts)
        slots = block_tables[owners, positions // self._block_size] * np.int64(self._block_size)
        slots += positions % self._block_size
        attention = self._model.attention_metadata(counts, ends, block_tables, self._cache)
        return self._model.forward(ModelInputs(tokens, positions, slots, attention, self._cache, logits_rows))
