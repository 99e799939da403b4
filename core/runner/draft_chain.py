"""draw_chain(): draws drafts one after the other, each from the logits after the previous one."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from core.sampling.sampler import sample
from ipc.tables.arrays import Floats, Int32s, Ints
from kernels.cpu.sampling import CpuSampler


class NextLogits(NamedTuple):
    """The logits [n, vocab] of the next draft of n rows, and their sample_greedily() [n], if it is known."""

    logits: Floats
    largest: Int32s | None = None


def draw_chain(
    rows: Ints,
    num_drafts: int,
    first: NextLogits,
    go_on: Callable[[int, Ints], NextLogits],
    table: RunnerTable,
    sampling: SamplingColumns,
    sampler: CpuSampler | None,
) -> Int32s:
    """Return drafts [n, num_drafts] of rows [n], drawn like the rows' own tokens; negative after the last one.

    go_on(index, token_ids [n]): computes the logits of draft `index` from the previous draft.
    """
    drafts = np.full((len(rows), num_drafts), -1, np.int32)
    found = first
    for index in range(num_drafts):
        if index:
            if sampling.num_edited:
                known = np.maximum(drafts[:, :index], 0).ravel()
                table.write_drafts(rows, known, np.full(len(rows), index))
            found = go_on(index, np.maximum(drafts[:, index - 1], 0).astype(np.int64))
        drafts[:, index] = sample(found.logits, sampling.inputs_ahead(rows, table, index), sampler, found.largest)
    return drafts


def num_drawn(drafts: Int32s) -> Ints:
    """Return how many of each row's drafts [n, num_drafts] are tokens, counted up to the first negative one."""
    count: Ints = (drafts >= 0).cumprod(1).sum(1)
    return count
