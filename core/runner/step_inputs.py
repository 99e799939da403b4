"""StepInputs: a model's inputs for one plan (tokens, positions, slots, block tables), and the columns that make them.

In most steps each row of the previous step gets one more token. Then the previous inputs are advanced by one token
instead of being rebuilt: a step's weights evict everything else from the CPU's caches, so each function and array used
after it costs microseconds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import TOKENS_PER_PAGE, RunnerBlocks, RunnerTable
from core.models.step import ONCE
from ipc.tables.arrays import Bools, Int32s, Ints, Positions, Rows, TokenIds

#: Block tables have a multiple of this many columns, and at least one more than blocks, as room to advance.
_TABLE_COLUMNS = 8

_PAGE_MASK = TOKENS_PER_PAGE - 1

#: Generation numbers. All makers of inputs share them, so that no number is used twice.
_generations = itertools.count(ONCE + 1)


class KindInputs(NamedTuple):
    """A step's inputs for one kind of layer (core/kv/cache_kinds.py)."""

    table: RunnerBlocks
    slots: Ints  # [T]
    block_tables: Int32s  # [R, P]


class StepInputs(NamedTuple):
    """One step's T tokens of R rows, packed row after row, with S samples.

    They are valid until the next step's inputs are made. Inputs with the generation of the previous step are the same
    arrays, advanced by one token in each row.
    """

    rows: Ints  # [R] the plan's rows; int64 is NumPy's fastest index type
    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T] block * block_size + offset
    num_tokens: Ints  # [R]
    context_lens: Ints  # [R] tokens in the cache after this step
    block_tables: Int32s  # [R, P]; P is at least the number of blocks of the longest row
    samples: Bools  # [R]
    num_samples: int  # S
    #: [S] index of the token whose logits each sample needs: the row's last token if the row has one sample. A row with
    #: drafts has several adjacent samples: after its known tokens and after each of its drafts.
    logits_rows: Ints
    generation: int = ONCE  # see ModelInputs.generation
    sample_rows: Ints | None = None  # [S] index in rows of each sample's row; None: one sample per row
    sample_offsets: Ints | None = None  # [S] drafts before each sample: 0, 1, ... in a row; None if sample_rows is None
    others: Sequence[KindInputs] = ()  # one per further kind of layer


@dataclass(slots=True)
class Decoding:
    """The inputs of a step in which each of R rows computed and sampled one token, and the arrays behind them."""

    inputs: StepInputs
    plan: tuple[bytes, bytes]  # the plan's rows and their numbers of tokens, see _bytes()
    num_steps: int  # steps until some row's next token starts a new block
    num_table_steps: int  # steps until some row's next token starts a new page of the table
    token_ids: Ints  # [R]
    places: Ints  # [5, R] the columns that grow by one with each token; the fields below are views into it
    positions: Ints
    slots: Ints
    context_lens: Ints
    next_tokens: Ints  # table slot of each row's next token; valid only if num_table_steps > 0
    next_lengths: Ints  # number of the row's tokens, including the next one


class InputMaker:
    """Makes each step's inputs from the step's plan and the runner's table."""

    def __init__(self, table: RunnerTable, block_size: int) -> None:
        self._table, self._block_size = table, block_size
        self._shift, self._mask = block_size.bit_length() - 1, block_size - 1  # block sizes are powers of two
        self._decoding: Decoding | None = None  # inputs of the last step, if they can be advanced
        self._sampled: Int32s | None = None  # tokens that the last step sampled

    def __call__(self, plan: SchedulerOutput) -> StepInputs:
        """Return the inputs of a plan that has already been applied to the table.

        It uses only column operations: no Python loop over requests.
        """
        decoding, sampled = self._decoding, self._sampled
        self._sampled = None
        if decoding is None or sampled is None or not _goes_on(plan, decoding) or not self._move_on(decoding):
            return self._make(plan)
        decoding.token_ids[:] = sampled
        self._table.num_computed_tokens[decoding.inputs.rows] = decoding.context_lens
        return decoding.inputs

    def append(self, rows: Rows, tokens: TokenIds) -> None:
        """Append these tokens [R] of all rows of the last plan to the table.

        Do not call this for a step in which some row sampled no token.
        """
        table, decoding = self._table, self._decoding
        self._sampled = tokens
        if decoding is None or not decoding.num_table_steps:
            table.append_tokens(rows, tokens)
        else:
            table.tokens.put(decoding.next_tokens, tokens)
            table.num_tokens[rows] = decoding.next_lengths

    def _make(self, plan: SchedulerOutput) -> StepInputs:
        table, rows, counts = self._table, plan.rows.astype(np.int64), plan.num_scheduled_tokens.astype(np.int64)
        samples = table.advance(plan)
        num_samples = int(np.count_nonzero(samples))
        ends = table.num_computed_tokens[rows]
        if len(plan.num_draft_tokens):
            drafted = np.flatnonzero(plan.num_draft_tokens)
            table.write_drafts(rows[drafted], plan.draft_token_ids, plan.num_draft_tokens[drafted].astype(np.int64))
            ends = ends + plan.num_draft_tokens
        last: Ints = np.arange(len(rows))  # index of each row's last token
        token_rows, positions = rows, ends - 1
        if is_mixed := bool(counts.max() > 1):  # in most steps every row decodes
            last = np.cumsum(counts) - 1
            token_rows = np.repeat(rows, counts)
            positions = np.arange(int(last[-1]) + 1) + np.repeat(ends - 1 - last, counts)
        places = np.empty((5, len(positions)), np.int64)
        places[0] = positions
        places[1] = self._slots(table.blocks.get(token_rows, positions >> self._shift), positions)
        tokens = table.tokens.slots(token_rows, positions)
        if not is_mixed:
            places[2], ends = ends, places[2]
            places[3], places[4] = tokens + 1, ends + 1
        token_ids = table.tokens.take(tokens).astype(np.int64)
        num_columns = (int(ends.max()) >> self._shift) // _TABLE_COLUMNS * _TABLE_COLUMNS + _TABLE_COLUMNS
        inputs = StepInputs(
            rows=rows,
            token_ids=token_ids,
            positions=places[0],
            slots=places[1],
            num_tokens=counts,
            context_lens=ends,
            block_tables=table.block_tables(rows, num_columns),
            samples=samples,
            num_samples=num_samples,
            logits_rows=last[samples],
            generation=next(_generations),
            others=[self._other_inputs(other, token_rows, places[0], rows, num_columns) for other in table.others],
        )
        self._decoding = None
        if len(plan.num_draft_tokens):
            return _with_drafts(inputs, plan.num_draft_tokens, last)
        if not is_mixed and num_samples == len(rows):
            self._decoding = Decoding(
                inputs,
                _bytes(plan),
                _steps_to_end(positions, self._mask),
                _steps_to_end(positions, _PAGE_MASK),
                token_ids,
                places,
                *places,
            )
        return inputs

    def _other_inputs(
        self, table: RunnerBlocks, token_rows: Ints, positions: Positions, rows: Ints, num_columns: int
    ) -> KindInputs:
        """Return the inputs for one kind of layer: R rows, and T tokens at positions [T] of token_rows [T]."""
        blocks = table.blocks.get(token_rows, positions >> self._shift)
        return KindInputs(table, self._slots(blocks, positions), table.block_tables(rows, num_columns))

    def _slots(self, blocks: Int32s, positions: Positions) -> Ints:
        """Return the KV-cache slot (block * block_size + offset) of each position."""
        slots: Ints = blocks * np.int64(self._block_size) + (positions & self._mask)
        return slots

    def _move_on(self, decoding: Decoding) -> bool:
        """Advance the inputs by one token in each row.

        Return False, with nothing changed, if the block tables have too few columns.
        """
        inputs, positions = decoding.inputs, decoding.positions
        if decoding.num_steps:
            decoding.num_steps -= 1
            np.add(decoding.places, 1, out=decoding.places)
            for other in inputs.others:
                np.add(other.slots, 1, out=other.slots)
        else:
            entering = np.flatnonzero((positions & self._mask) == self._mask)
            entered = positions[entering] + 1
            if int(entered.max()) >> self._shift >= inputs.block_tables.shape[1]:
                return False
            np.add(decoding.places, 1, out=decoding.places)
            first = KindInputs(self._table, decoding.slots, inputs.block_tables)
            self._enter_blocks(first, inputs.rows, entering, entered)
            for other in inputs.others:
                np.add(other.slots, 1, out=other.slots)
                self._enter_blocks(other, inputs.rows, entering, entered)
            decoding.num_steps = _steps_to_end(positions, self._mask)
        if decoding.num_table_steps:
            decoding.num_table_steps -= 1
        else:
            begun = np.flatnonzero((positions & _PAGE_MASK) == 0)
            decoding.next_tokens[begun] = self._table.tokens.slots(inputs.rows[begun], positions[begun]) + 1
            decoding.num_table_steps = _steps_to_end(positions, _PAGE_MASK)
        return True

    def _enter_blocks(self, inputs: KindInputs, rows: Ints, entering: Ints, entered: Positions) -> None:
        """Write the blocks that rows[entering] enter into their tables, and the slots of their tokens.

        entered [n]: the positions of these tokens.
        """
        rows, places = rows[entering], entered >> self._shift
        num_blocks = inputs.table.num_blocks[rows]
        assert not np.count_nonzero(places >= num_blocks), f"rows enter blocks {places} of {num_blocks}"
        inputs.block_tables[entering, places] = blocks = inputs.table.blocks.get(rows, places)
        inputs.slots[entering] = self._slots(blocks, entered)


def _with_drafts(inputs: StepInputs, num_drafts: Int32s, last: Ints) -> StepInputs:
    """Return the inputs with one sample after the known tokens of each sampling row, and one after each draft.

    num_drafts, last [R]: drafts of each row, and the index of its last token.
    """
    assert not np.count_nonzero(num_drafts[~inputs.samples]), "a row with drafts has uncomputed tokens before them"
    sample_rows, offsets, logits_rows = draft_samples(np.flatnonzero(inputs.samples), num_drafts, last)
    return inputs._replace(
        num_samples=len(sample_rows),
        logits_rows=logits_rows,
        sample_rows=sample_rows,
        sample_offsets=offsets,
    )


def draft_samples(in_plan: Ints, num_drafts: Int32s, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (sample_rows, sample_offsets, logits_rows) of StepInputs for these sampling rows, indices in the plan.

    num_drafts, last [R]: drafts of each of the plan's rows, and the index of its last token.
    """
    counts = num_drafts[in_plan].astype(np.int64) + 1
    sample_rows = in_plan.repeat(counts)
    offsets: Ints = np.arange(len(sample_rows)) - (counts.cumsum() - counts).repeat(counts)
    return sample_rows, offsets, (last - num_drafts)[sample_rows] + offsets


def _steps_to_end(positions: Positions, mask: int) -> int:
    """Return how many steps all positions can advance before one leaves its run of mask + 1 positions."""
    return mask - int((positions & mask).max())


def _goes_on(plan: SchedulerOutput, decoding: Decoding) -> bool:
    """Return whether the plan gives each row of these inputs one more token, in the same order.

    The rows must still belong to the same requests: a plan that adds or removes rows does not continue.
    """
    return not plan.starts and not len(plan.removed_rows) and _bytes(plan) == decoding.plan


def _bytes(plan: SchedulerOutput) -> tuple[bytes, bytes]:
    return plan.rows.tobytes(), plan.num_scheduled_tokens.tobytes()
