"""accepted(): the verification of a row's draft tokens against its samples."""

import numpy as np

from core.execution.runner_table import RunnerTable
from ipc.tables.arrays import Bools, Int32s, Ints, Rows


def accepted(rows: Rows, offsets: Ints, sampled: Int32s, table: RunnerTable) -> Bools:
    """Return accepted_of() with the drafts that the table has after the rows' tokens."""
    drafts = table.tokens.get(rows, np.where(_has_draft(rows), table.num_tokens[rows] + offsets, 0))
    return accepted_of(rows, offsets, sampled, drafts)


def accepted_of(rows: Rows, offsets: Ints, sampled: Int32s, drafts: Int32s) -> Bools:
    """Return the mask [S] of the samples that become tokens of their rows.

    A sample is accepted if every draft before it equals the sample at the draft's position. Each accepted sample is
    then the token that would have been sampled without drafts.

    rows [S]: rows of the table; the samples of one row are adjacent. offsets [S]: drafts before each sample: 0, 1, ...
    within a row. sampled [S]: token ids, negative if the logits are not finite. A negative sample after a draft is not
    accepted: the row's next step samples it again, as its first. drafts [S]: the draft at each sample's position;
    arbitrary for a row's last sample, where there is none.
    """
    begins = np.flatnonzero(offsets == 0)
    ends = np.where(_has_draft(rows) & (sampled == drafts), len(rows), offsets)
    last = np.minimum.reduceat(ends, begins).repeat(np.diff(begins, append=len(rows)))
    is_accepted: Bools = (offsets <= last) & ((sampled >= 0) | (offsets == 0))
    return is_accepted


def _has_draft(rows: Rows) -> Bools:
    return np.append(rows[1:] == rows[:-1], False)  # a draft of the same row follows
