"""accepted(): which samples behind a row's drafts are its tokens."""

import numpy as np

from core.execution.runner_table import RunnerTable
from ipc.arrays import Bools, Int32s, Ints, Rows


def accepted(rows: Rows, offsets: Ints, sampled: Int32s, table: RunnerTable) -> Bools:
    """Mask [S] of the samples that are tokens of their rows: those before which every draft equals the sample in its
    place, so that each is what a step of its own would have sampled.

    rows [S] of the table, those of a row together; offsets [S]: drafts before each, 0, 1, ... of a row; sampled [S]: a
    negative one behind a draft is left out, since the row's next step meets it again, as its first.
    """
    has_draft = np.append(rows[1:] == rows[:-1], False)  # the row's next sample is behind it
    drafts = table.tokens.get(rows, np.where(has_draft, table.num_tokens[rows] + offsets, 0))
    begins = np.flatnonzero(offsets == 0)
    ends = np.where(has_draft & (sampled == drafts), len(rows), offsets)
    last = np.minimum.reduceat(ends, begins).repeat(np.diff(begins, append=len(rows)))
    is_accepted: Bools = (offsets <= last) & ((sampled >= 0) | (offsets == 0))
    return is_accepted
