"""Draft: the plan of a step while it is being made, with notes for the decision record."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.batch.batch import Batch
from core.batch.carried import CarriedColumns
from core.batch.new_blocks import NewBlocks
from core.batch.request import Request
from core.batch.table import RequestStart
from core.execution.plan import NONE_SAVED, NewPooling, NewRow, RowBlocks, SavedStates, SchedulerOutput
from core.scheduling.decisions import Decision, Examined, Preempted
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import NO_INT32S, NO_INTS, AnyInts, Int32s, Ints, Rows
from ipc.wire.feature_messages import FeatureUse

_NO_IMAGES: list[tuple[int, list[int]]] = []
_NONE_DROPPED: list[bytes] = []
_NO_PARTS: list[tuple[bytes, int]] = []


class DraftTokens(NamedTuple):
    """Guessed tokens (drafts) of some rows: counts[i] > 0 of rows[i], row after row."""

    rows: Ints
    counts: Ints
    token_ids: Int32s

    def counts_of(self, rows: Rows) -> Ints:
        """Return the number of drafts of each of these rows of a plan, which include all that have drafts."""
        counts: Ints = np.zeros(int(rows.max()) + 1, np.int64)  # by row; np.isin() takes 7 times as long
        counts[self.rows] = self.counts
        return counts[rows]


class Draft:
    """The plan of one step while it is being made.

    rows, counts [n]: running rows and their tokens, in the order in which they are served; a count may be 0.
    budget: tokens that are still available.
    """

    #: Images that this step encodes, and drops before; see SchedulerOutput. EncoderInputs sets them, so other steps do
    #: nothing for them. Those of starting requests, whose rows are not known yet, are added with the rows.
    encoded: list[tuple[int, list[int]]] = _NO_IMAGES
    encoded_at_start: Sequence[tuple[Request, list[int]]] = ()
    dropped: list[bytes] = _NONE_DROPPED
    image_parts: list[tuple[bytes, int]] = _NO_PARTS
    #: States that this step stores. Models without recurrent layers have none.
    saved: SavedStates = NONE_SAVED

    def __init__(self, step: int, now_ns: int, budget: int) -> None:
        self.step = step
        self.now_ns = now_ns
        self.budget = budget
        self.rows: Ints = NO_INTS
        self.counts: Ints = NO_INTS
        self.blocks = NewBlocks()
        self.starts: list[RequestStart] = []
        self.added: list[NewRow] = []
        self.added_pooling: list[NewPooling] = []
        self.adapters: list[tuple[int, str]] = []
        self.features: list[tuple[int, list[FeatureUse]]] = []
        self.preempted: list[Preempted] = []
        self.examined: list[Examined] = []
        self.num_skipped = 0  # rows that wanted tokens and got none
        self.guessed: DraftTokens | None = None  # not counted in `counts`; its rows are in the order of `rows`

    def drop(self, row: int) -> None:
        """Remove a preempted row from the plan, and return its tokens to the budget."""
        kept = self.rows != row
        self.budget += int(self.counts[~kept].sum())
        self.rows, self.counts = self.rows[kept], self.counts[kept]
        self.blocks.drop(row)

    def tokens_of(self, rows: Rows) -> int:
        """Return how many tokens these rows get in this step so far."""
        return int(self.counts[np.isin(self.rows, rows)].sum()) if len(rows) else 0

    def take_budget(self, victims: Ints, amount: int) -> None:
        """Return `amount` tokens from these rows to the budget, starting with the first row.

        The rows keep their blocks.
        """
        order = np.argsort(self.rows, kind="stable")
        index = order[np.searchsorted(self.rows, victims, sorter=order)]
        counts = self.counts[index]
        cuts = np.clip(amount - (np.cumsum(counts) - counts), 0, counts)
        self.counts[index] -= cuts
        self.num_skipped += int(np.count_nonzero((cuts == counts) & (counts > 0)))
        self.budget += int(cuts.sum())

    def add_rows(self, rows: Rows) -> None:
        """Tell the executor of the requests that start, in these rows."""
        for row, start in zip(rows.tolist(), self.starts, strict=True):
            request, num_computed, block_ids = start.request, start.num_computed_tokens, start.block_ids
            if (sampling := request.sampling) is not None:
                num_prompt, seed, choice = request.num_prompt_tokens, request.seed, request.choice
                new = NewRow(row, request.token_ids, num_prompt, num_computed, block_ids, sampling, seed, choice)
                self.added.append(new)
            elif isinstance(pooling := request.params, PoolingParams):
                self.added_pooling.append(NewPooling(row, request.token_ids, num_computed, block_ids, pooling))
            if request.adapter is not None:
                self.adapters.append((row, request.adapter.digest))
            if request.features:
                self.features.append((row, request.features))
                if self.encoded_at_start:
                    self.encoded += [(row, places) for one, places in self.encoded_at_start if one is request]
            if start.others:
                for number, other in enumerate(start.others):
                    self.blocks.add_other(number, np.full(len(other.block_ids), row), other.block_ids)

    def renew(self, batch: Batch) -> None:
        """Resend rows whose tokens and blocks have changed to the executor.

        Blocks that this plan allocates are left out.
        """
        table, carried = batch.table, batch.carried
        batch.renew(self.blocks)
        rows = list(carried.renewed_rows)
        for row in rows:
            request = table.request[row]
            assert request is not None, f"row {row} is sent again but is free"
            assert request.sampling is not None, f"row {row} is a pooling request, whose tokens cannot change"
            fresh = int(np.count_nonzero(self.blocks.rows == row))
            self.added.append(
                NewRow(
                    row,
                    table.token_ids(row),
                    request.num_prompt_tokens,
                    int(table.num_computed_tokens[row]),
                    table.blocks.read(row, 0, int(table.num_blocks[row]) - fresh),
                    request.sampling,
                    request.seed,
                    request.choice,
                )
            )
            if request.adapter is not None:
                self.adapters.append((row, request.adapter.digest))
            if request.features:
                self.features.append((row, request.features))
        carried.removed_rows.extend(rows)
        carried.renewed_rows.clear()

    def decision(self, rows: Rows, counts: Ints, num_waiting: int, num_free_blocks: int) -> Decision:
        """Return the record of the step that runs counts [R] known tokens of rows [R], and the drafts."""
        return Decision(
            step=self.step,
            now_ns=self.now_ns,
            rows=rows,
            counts=counts if self.guessed is None else counts + self.guessed.counts_of(rows),
            num_started=len(self.starts),
            num_skipped=self.num_skipped,
            preempted=self.preempted,
            examined=self.examined,
            num_waiting=num_waiting,
            budget=self.budget,
            num_free_blocks=num_free_blocks,
        )


def finish_plan(
    draft: Draft, rows: Rows, counts: Ints, carried: CarriedColumns, num_common_blocks: int = 0
) -> SchedulerOutput:
    """Return the finished plan: counts [R] known tokens for rows [R], with the changes since the last plan."""

    def column(values: AnyInts | list[int]) -> Int32s:
        return np.asarray(values, np.int32) if len(values) else NO_INT32S

    num_drafts = draft_ids = NO_INT32S
    if draft.guessed is not None:
        of_rows = draft.guessed.counts_of(rows)
        num_drafts, draft_ids, counts = column(of_rows), draft.guessed.token_ids, counts + of_rows
    blocks, saved = draft.blocks, draft.saved
    return SchedulerOutput(
        step=draft.step,
        removed_rows=carried.removed_rows,
        added=draft.added,
        block_rows=column(blocks.rows),
        block_ids=column(blocks.ids),
        rows=column(rows),
        num_scheduled_tokens=column(counts),
        swapped_out_blocks=carried.swapped_out_blocks,
        swapped_out_slots=carried.swapped_out_slots,
        swapped_in_slots=carried.swapped_in_slots,
        swapped_in_blocks=carried.swapped_in_blocks,
        num_draft_tokens=num_drafts,
        draft_token_ids=draft_ids,
        copied_blocks=carried.copied_blocks,
        copied_to=carried.copied_to,
        added_pooling=draft.added_pooling,
        adapters=draft.adapters,
        features=draft.features,
        copied_states=carried.copied_states,
        copied_states_to=carried.copied_states_to,
        others=[RowBlocks(column(rows), column(ids)) for rows, ids in blocks.others] if blocks.others else [],
        saved_rows=saved.rows,
        saved_after=saved.after,
        saved_slots=saved.slots,
        num_common_prefix_blocks=num_common_blocks,
        scheduled_encoder_inputs=draft.encoded,
        freed_encoder_inputs=draft.dropped,
        image_parts=draft.image_parts,
    )
