"""accepted(): the verification of a row's draft tokens against its samples."""

import numpy as np

from core.execution.runner_table import RunnerTable
from ipc.arrays import Bools, Int32s, Ints, Rows


def accepted(rows: Rows, offsets: Ints, sampled: Int32s, table: RunnerTable) -> Bools:
    """Return the mask [S] of the samples that become tokens of their rows.

    A sample is accepted if every draft before it equals the sample in the draft's place. Each accepted sample is then
    the token that a step of its own would have sampled.

    rows [S]: rows of the table, the samples of one row together. offsets [S]: drafts before each sample: 0, 1, ...
    within a row. sampled [S]: token ids, negative where the logits are not finite. A negative sample behind a draft is
    not accepted: the row's next step samples it again, as its first.
    """
    has_draft = np.append(rows[1:] == rows[:-1], False)  # a draft of the same row follows
    drafts = table.tokens.get(rows, np.where(has_draft, table.num_tokens[rows] + offsets, 0))
    begins = np.flatnonzero(offsets == 0)
    ends = np.where(has_draft & (sampled == drafts), len(rows), offsets)
    last = np.minimum.reduceat(ends, begins).repeat(np.diff(begins, append=len(rows)))
    is_accepted: Bools = (offsets <= last) & ((sampled >= 0) | (offsets == 0))
    return is_accepted
