"""Tokens drawn from unedited logits, before it is asked whether the row may have them.

An option that only forbids tokens, and takes long to say which, is first asked about one: the token of the unedited
logits. A draw takes the largest of logit / temperature + noise (kernels/gumbel.py). So it remains what it is when other
tokens are forbidden, where no filter (top_k, top_p, min_p) looks at them.
"""

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns, positions_of
from core.sampling.edit_group import Edit
from core.sampling.logit_edits import apply_edits
from core.sampling.sampler import NOT_A_TOKEN, sample
from ipc.arrays import Floats, Int32s, Ints, Rows
from kernels.cpu.sampling import CpuSampler

#: Up to one sample in so many is drawn from a copy of its logits: 0.2 MB each, where a call for all takes 0.1 ms.
_FEW = 4


def sample_rows(
    columns: SamplingColumns,
    table: RunnerTable,
    rows: Rows,
    logits: Floats,
    largest: Int32s | None,
    kernel: CpuSampler | None,
    offsets: Ints | None = None,
    *,
    keeps_logits: bool,
) -> Int32s:
    """Return the next token [S] of each of these rows, as sample(). The logits [S, V] are overwritten.

    offsets [S]: see SamplingColumns.inputs().
    """
    positions = positions_of(rows, table, offsets)
    if not columns.num_edited:
        return sample(logits, columns.parameters(rows, positions), kernel, largest)
    first = None
    if columns.num_asking and largest is not None and kernel is not None:
        first = _tokens_before_edits(columns, rows, positions, logits, largest, kernel)
    edits = columns.edits(rows, table, positions, offsets, first)
    if first is not None and not keeps_logits:
        is_open = first < 0
        for edit in edits:
            is_open[edit.row] = True
        which = np.flatnonzero(is_open)
        if len(which) <= len(rows) // _FEW:
            return _sample_few(columns, rows, positions, logits, edits, first, which, kernel)
    inputs = columns.parameters(rows, positions, edits)
    return sample(logits, inputs, kernel, largest, first, keeps_logits=keeps_logits)


def _sample_few(
    columns: SamplingColumns,
    rows: Rows,
    positions: Ints,
    logits: Floats,
    edits: tuple[Edit, ...],
    first: Int32s,
    which: Ints,
    kernel: CpuSampler | None,
) -> Int32s:
    """Return the first tokens, but for the samples `which` [n]: those of their edited logits."""
    if len(which):
        apply_edits(logits, edits)
        first[which] = sample(logits[which], columns.parameters(rows[which], positions[which]), kernel)
    return first


def _tokens_before_edits(
    columns: SamplingColumns, rows: Rows, positions: Ints, logits: Floats, largest: Int32s, kernel: CpuSampler
) -> Int32s:
    """Return the tokens [S] of the unedited logits for the rows that ask for them; NOT_A_TOKEN for others."""
    asking = columns.asking(rows)
    if columns.num_drawing:
        inputs = columns.parameters(rows, positions)
        temperature = np.where(asking, inputs.temperature, np.float32(0))  # the others' largest logits are known
        others = (inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.position, inputs.choice)
        largest = kernel(logits, (temperature, *others), largest)
    return np.where(asking, largest, np.int32(NOT_A_TOKEN))
