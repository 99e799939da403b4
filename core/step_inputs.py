"""StepInputs: what a plan is to a model - tokens, positions, slots, block tables - and how it is made, as columns.

In most steps the rows of the step before get one token more each. What they had is then moved on by one token instead
of made again: a step's weights push all else out of the CPU's caches, so that each function and array touched after it
costs microseconds.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.plan import SchedulerOutput
from core.runner_table import RunnerTable
from ipc.paged_rows import Int32s, Ints

#: Columns of block tables are made in multiples of so many, at least one more than there are blocks: room to move on.
_TABLE_COLUMNS = 8


class StepInputs(NamedTuple):
    """One step's tokens, packed request after request. T tokens of R rows, of which S sample. Good until the next
    step's are made."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64 block * block_size + offset
    num_tokens: Ints  # [R]
    context_lens: Ints  # [R] tokens in the cache after this step
    block_tables: Int32s  # [R, P], P at least the blocks of the longest row
    samples: npt.NDArray[np.bool_]  # [R]
    num_samples: int  # S
    logits_rows: torch.Tensor  # [S] int64 index of each sampling row's last token


class _Decoding(NamedTuple):
    """Inputs of a step in which each row had one token and got another, and the arrays behind their tensors, [R]."""

    inputs: StepInputs
    rows: bytes  # the plan's
    token_ids: Ints
    positions: Ints
    slots: Ints
    places: Ints  # [3, R]: positions, slots and context_lens, which are views of it


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
        if decoding is None or sampled is None or not _goes_on(plan, decoding):
            return self._make(plan)
        return decoding.inputs if self._move_on(decoding, plan.rows, sampled) else self._make(plan)

    def note_sampled(self, tokens: Int32s) -> None:
        """Each row of the last plan got its token [R], and the table has it. Not told where one did not."""
        self._sampled = tokens

    def _make(self, plan: SchedulerOutput) -> StepInputs:
        table, rows, counts = self._table, plan.rows, plan.num_scheduled_tokens.astype(np.int64)
        samples = table.advance(plan)
        num_samples = int(np.count_nonzero(samples))
        ends = table.num_computed_tokens[rows]
        last: Ints = np.arange(len(rows))  # index of each row's last token
        token_rows, positions = rows, ends - 1
        if is_mixed := bool(counts.max() > 1):  # in most steps every row decodes
            last = np.cumsum(counts) - 1
            token_rows = np.repeat(rows, counts)
            positions = np.arange(int(last[-1]) + 1) + np.repeat(ends - 1 - last, counts)
        places = np.empty((3, len(positions)), np.int64)
        places[0] = positions
        places[1] = table.blocks.get(token_rows, positions >> self._shift) * np.int64(self._block_size)
        places[1] += positions & self._mask
        if not is_mixed:
            places[2], ends = ends, places[2]
        token_ids = table.tokens.get(token_rows, positions).astype(np.int64)
        num_columns = (int(ends.max()) >> self._shift) // _TABLE_COLUMNS * _TABLE_COLUMNS + _TABLE_COLUMNS
        inputs = StepInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(places[0]),
            slots=torch.from_numpy(places[1]),
            num_tokens=counts,
            context_lens=ends,
            block_tables=table.block_tables(rows, num_columns),
            samples=samples,
            num_samples=num_samples,
            logits_rows=torch.from_numpy(last[samples]),
        )
        is_decoding = not is_mixed and num_samples == len(rows)
        columns = (token_ids, places[0], places[1], places)
        self._decoding = _Decoding(inputs, rows.tobytes(), *columns) if is_decoding else None
        return inputs

    def _move_on(self, decoding: _Decoding, rows: Int32s, sampled: Int32s) -> bool:
        """By one token; False, and nothing is done, where the block tables have no room."""
        starts = (decoding.positions & self._mask) == self._mask  # rows whose next token is the first of a block
        entering = starts.nonzero()[0] if np.count_nonzero(starts) else None
        if entering is not None and not self._enter_blocks(decoding, rows, entering):
            return False
        decoding.token_ids[:] = sampled
        np.add(decoding.places, 1, out=decoding.places)
        if entering is not None:
            places = decoding.positions[entering] >> self._shift
            decoding.slots[entering] = decoding.inputs.block_tables[entering, places] * np.int64(self._block_size)
        self._table.num_computed_tokens[rows] = decoding.inputs.context_lens
        return True

    def _enter_blocks(self, decoding: _Decoding, rows: Int32s, entering: Ints) -> bool:
        """The block tables get the blocks that these rows [n] of the batch enter; False where there is no room."""
        table, block_tables = self._table, decoding.inputs.block_tables
        rows, places = rows[entering], (decoding.positions[entering] + 1) >> self._shift
        if int(places.max()) >= block_tables.shape[1]:
            return False
        num_blocks = table.num_blocks[rows]
        assert not np.count_nonzero(places >= num_blocks), f"rows enter blocks {places} of {num_blocks}"
        block_tables[entering, places] = table.blocks.get(rows, places)
        return True


def _goes_on(plan: SchedulerOutput, decoding: _Decoding) -> bool:
    """Whether the plan gives the rows of these inputs, in their order, one token more each, and they are the same
    requests' still."""
    return (
        not plan.added
        and not len(plan.removed_rows)
        and len(plan.rows) == len(decoding.positions) == np.add.reduce(plan.num_scheduled_tokens)
        and plan.rows.tobytes() == decoding.rows
    )
