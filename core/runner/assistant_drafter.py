"""AssistantDrafter: drafts from an assistant (core/models/assistant.py), which reads the model's states, K and V.

It keeps nothing from step to step: whatever happens to a row's blocks, its drafts follow from the last step.
"""

import numpy as np

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.models.assistant import Assistant
from core.runner.draft_chain import NextLogits, draw_chain, num_drawn
from core.runner.draft_pause import DraftPause
from core.runner.drafter import RanStep, kept_tokens
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import NO_INT32S, Floats, Int32s, Ints
from ipc.tables.rounding import ceil_div
from kernels.memory.kv_cache import KVCache


class AssistantDrafter:
    """An assistant and the most drafts of a row. head: may be replaced by one for other weights of the model."""

    cache: KVCache  # that of the model, once it is there

    def __init__(self, head: Assistant, *, num_drafts: int) -> None:
        """num_drafts: the most drafts per row."""
        self.head, self._num_drafts, self._pause = head, num_drafts, DraftPause()

    def apply(self, plan: SchedulerOutput) -> None:
        """Do nothing: it has no blocks."""

    def propose(self, step: RanStep, table: RunnerTable, sampling: SamplingColumns) -> tuple[Int32s, Int32s]:
        """Return (counts [R], token ids, row after row) of drafts for the rows that have sampled in this step."""
        inputs = step.states
        assert inputs is not None, "an assistant reads the model's states"
        _, num_kept, drafts = kept_tokens(inputs, table, self.head.max_model_len)
        counts = np.zeros(len(inputs.rows), np.int32)
        drafting = np.flatnonzero(drafts)
        if self._pause.begins(step.plan):
            return counts, NO_INT32S
        self._pause.offer(bool(len(drafting)))
        if not len(drafting):
            return counts, NO_INT32S
        first = inputs.num_tokens.cumsum() - inputs.num_tokens
        taps = inputs.of_tokens((first + num_kept - 1)[drafting])
        token_ids = self._chain(inputs.rows[drafting], self.head.states(taps), table, sampling)
        counts[drafting] = num_drawn(token_ids)
        return counts, token_ids[np.arange(self._num_drafts) < counts[drafting][:, None]]

    def step(self, rows: Ints, table: RunnerTable, sampling: SamplingColumns) -> None:
        """Run one round of single-token drafts with meaningless contents, to measure it."""
        self._chain(rows, self.head.trial_states(len(rows)), table, sampling)

    def _chain(self, rows: Ints, states: Floats, table: RunnerTable, sampling: SamplingColumns) -> Int32s:
        """Return drafts [n, num_drafts] that follow the tokens of rows [n]; negative after the last one.

        states [n, width]: after the second-to-last tokens.
        """
        lengths = np.maximum(table.num_tokens[rows], 2)
        tables = table.block_tables(rows, ceil_div(int(lengths.max()) - 1, self.cache.block_size))
        tables[table.num_blocks[rows] == 0] = 0  # of a row that is measured

        def go_on(index: int, tokens: Ints) -> NextLogits:
            nonlocal states
            logits, states = self.head.forward(tokens, states, lengths, tables, self.cache)
            return NextLogits(logits)

        first = go_on(0, table.tokens.get(rows, lengths - 1).astype(np.int64))
        return draw_chain(rows, self._num_drafts, first, go_on, table, sampling, self.head.sampler)
