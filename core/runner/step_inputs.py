"""StepInputs: what a plan is to a model - tokens, positions, slots, block tables - and how it is made, as columns.

In most steps the rows of the step before get one token more each. What they had is then moved on by one token instead
of made again: a step's weights push all else out of the CPU's caches, so that each function and array touched after it
costs microseconds.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import TOKENS_PER_PAGE, RunnerTable
from core.models.step import ONCE
from ipc.arrays import Bools, Int32s, Ints, Positions, Rows, TokenIds

#: Columns of block tables are made in multiples of so many, at least one more than there are blocks: room to move on.
_TABLE_COLUMNS = 8

_PAGE_MASK = TOKENS_PER_PAGE - 1

#: Numbers of arrays, of all makers together: no two share one.
_generations = itertools.count(ONCE + 1)


class StepInputs(NamedTuple):
    """One step's tokens, packed request after request. T tokens of R rows, of which S sample. Good until the next
    step's are made. Inputs of the generation before are these same arrays, moved on by one token for each row."""

    rows: Ints  # [R] the plan's, int64: as an index NumPy takes no other type as fast
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64 block * block_size + offset
    num_tokens: Ints  # [R]
    context_lens: Ints  # [R] tokens in the cache after this step
    block_tables: Int32s  # [R, P], P at least the blocks of the longest row
    samples: Bools  # [R]
    num_samples: int  # S
    #: [S] int64 index of each sampling row's last token; of each sample's, where there are several of a row: these
    #: stand together, behind the row's known tokens and behind each of its drafts.
    logits_rows: torch.Tensor
    generation: int = ONCE  # of the arrays, as ModelInputs has it
    sample_rows: Ints | None = None  # [S] index in rows of each sample's row; None: one of each row of samples
    sample_offsets: Ints | None = None  # [S] drafts before each sample, 0, 1, ... of a row; None with sample_rows


@dataclass(slots=True)
class _Decoding:
    """Inputs of a step in which each of R rows had one token and got another, and the arrays behind them."""

    inputs: StepInputs
    plan: tuple[bytes, bytes]  # its rows and their tokens
    num_steps: int  # that can be moved on before some row's next token begins a block,
    num_table_steps: int  # or a page of the table's
    token_ids: Ints  # [R]
    places: Ints  # [5, R] what grows by one with each token: the columns below, which are views of it
    positions: Ints
    slots: Ints
    context_lens: Ints
    next_tokens: Ints  # where in the table the next token goes; only if num_table_steps > 0
    next_lengths: Ints  # tokens of the rows with it


class InputMaker:
    """Makes each step's inputs from its plan and the runner's table."""

    def __init__(self, table: RunnerTable, block_size: int) -> None:
        self._table, self._block_size = table, block_size
        self._shift, self._mask = block_size.bit_length() - 1, block_size - 1  # block sizes are powers of two
        self._decoding: _Decoding | None = None  # what the last step left to move on
        self._sampled: Int32s | None = None  # its tokens

    def __call__(self, plan: SchedulerOutput) -> StepInputs:
        """Column operations only: no Python per request. The plan's changes are in the table already."""
        decoding, sampled = self._decoding, self._sampled
        self._sampled = None
        if decoding is None or sampled is None or not _goes_on(plan, decoding) or not self._move_on(decoding):
            return self._make(plan)
        decoding.token_ids[:] = sampled
        self._table.num_computed_tokens[decoding.inputs.rows] = decoding.context_lens
        return decoding.inputs

    def append(self, rows: Rows, tokens: TokenIds) -> None:
        """The rows of the last plan, all of them, got these tokens [R]: into the table. Not for steps in which some row
        got none."""
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
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(places[0]),
            slots=torch.from_numpy(places[1]),
            num_tokens=counts,
            context_lens=ends,
            block_tables=table.block_tables(rows, num_columns),
            samples=samples,
            num_samples=num_samples,
            logits_rows=torch.from_numpy(last[samples]),
            generation=next(_generations),
        )
        self._decoding = None
        if not is_mixed and num_samples == len(rows):
            num_steps = _steps_to_end(positions, self._mask), _steps_to_end(positions, _PAGE_MASK)
            self._decoding = _Decoding(inputs, _bytes(plan), *num_steps, token_ids, places, *places)
        return inputs

    def _slots(self, blocks: Int32s, positions: Positions) -> Ints:
        """Of the cache."""
        slots: Ints = blocks * np.int64(self._block_size) + (positions & self._mask)
        return slots

    def _move_on(self, decoding: _Decoding) -> bool:
        """By one token; False, and nothing is done, where the block tables have no room."""
        inputs, positions = decoding.inputs, decoding.positions
        if decoding.num_steps:
            decoding.num_steps -= 1
            np.add(decoding.places, 1, out=decoding.places)
        else:
            entering = np.flatnonzero((positions & self._mask) == self._mask)
            entered = positions[entering] + 1
            if not self._enter_blocks(inputs, entering, entered >> self._shift):
                return False
            np.add(decoding.places, 1, out=decoding.places)
            decoding.slots[entering] = self._slots(inputs.block_tables[entering, entered >> self._shift], entered)
            decoding.num_steps = _steps_to_end(positions, self._mask)
        if decoding.num_table_steps:
            decoding.num_table_steps -= 1
        else:
            begun = np.flatnonzero((positions & _PAGE_MASK) == 0)
            decoding.next_tokens[begun] = self._table.tokens.slots(inputs.rows[begun], positions[begun]) + 1
            decoding.num_table_steps = _steps_to_end(positions, _PAGE_MASK)
        return True

    def _enter_blocks(self, inputs: StepInputs, entering: Ints, places: Ints) -> bool:
        """The block tables get the blocks that these rows [n] of the batch enter, at these places of theirs; False
        where there is no room."""
        table, rows, block_tables = self._table, inputs.rows[entering], inputs.block_tables
        if int(places.max()) >= block_tables.shape[1]:
            return False
        num_blocks = table.num_blocks[rows]
        assert not np.count_nonzero(places >= num_blocks), f"rows enter blocks {places} of {num_blocks}"
        block_tables[entering, places] = table.blocks.get(rows, places)
        return True


def _steps_to_end(positions: Positions, mask: int) -> int:
    """How often all can go on by one before one is past the end of its run of mask + 1."""
    return mask - int((positions & mask).max())


def _goes_on(plan: SchedulerOutput, decoding: _Decoding) -> bool:
    """Whether the plan gives the rows of these inputs, in their order, one token more each, and they are the same
    requests' still."""
    return not plan.added and not len(plan.removed_rows) and _bytes(plan) == decoding.plan


def _bytes(plan: SchedulerOutput) -> tuple[bytes, bytes]:
    return plan.rows.tobytes(), plan.num_scheduled_tokens.tobytes()
