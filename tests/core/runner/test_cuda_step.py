"""The columns of a device's step with drafts, and what becomes of its samples when they reach the host."""

import numpy as np
import torch

from core.execution.plan import FAILED_TOKEN, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.runner.cuda_step import Sampled, behind_drafts
from core.runner.device_columns import draft_columns
from core.runner.host_rows import HostRows
from core.sampling.columns import SamplingColumns
from core.sampling.logit_edits import edit_groups
from ipc.tables.arrays import NO_INT32S, NO_INTS, Int32s


def int32s(*values: int) -> Int32s:
    return np.array(values, np.int32)


def plan(rows: Int32s, counts: Int32s, num_drafts: Int32s, drafts: Int32s) -> SchedulerOutput:
    nothing = (NO_INT32S, [], NO_INT32S, NO_INT32S)
    return SchedulerOutput(7, *nothing, rows, counts, num_draft_tokens=num_drafts, draft_token_ids=drafts)


def test_each_token_of_a_row_with_drafts_is_a_piece_of_its_own() -> None:
    """Row 3 has two drafts behind its token 20, row 5 computes 4 tokens of its prompt, row 1 decodes."""
    step = plan(int32s(3, 5, 1), int32s(3, 4, 1), int32s(2, 0, 0), int32s(70, 71))
    ends, in_plan = np.array([21, 8, 9]), np.array([0, 2])
    columns = draft_columns(step, ends, in_plan, most_alone=4, group_size=8)
    assert columns.rows.tolist() == [3, 3, 3, 5, 5, 5, 5, 1]
    assert columns.positions.tolist() == [20, 21, 22, 4, 5, 6, 7, 8]
    assert columns.context_lens.tolist() == [23, 8, 9]
    assert columns.in_plan.tolist() == [0, 0, 0, 2]
    assert columns.logits_tokens.tolist() == [0, 1, 2, 7]
    assert columns.offsets is not None
    assert columns.offsets.tolist() == [0, 1, 2, 0]
    assert [piece.tolist() for piece in columns.pieces] == [[1, 1, 1, 4, 1], [21, 22, 23, 8, 9]]
    assert [each.tolist() for each in columns.shared] == [[2, 0, 1, 1]], "16 rows of a product are two tokens"
    together = draft_columns(step, ends, in_plan, most_alone=3, group_size=8)
    assert not together.shared
    assert [piece.tolist() for piece in together.pieces] == [[3, 4, 1], [23, 8, 9]]


def test_the_host_keeps_what_was_right_of_the_rows_that_are_still_there() -> None:
    """Row 0: one of two drafts is right. Row 1 has none, and is counted at the launch. Row 2 has been left since. Row 3
    fails. Row 4 is of a beam search. Row 5: both drafts are right."""
    table = RunnerTable(6, 16)
    host = HostRows(table, SamplingColumns(6, edit_groups(6, ())), 6)
    table.append_tokens(np.arange(6), np.full(6, 9))
    rows = int32s(0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 5, 5)
    step = plan(int32s(*range(6)), int32s(3, 1, 2, 2, 1, 3), int32s(2, 0, 1, 1, 0, 2), int32s(20, 21, 40, 50, 60, 61))
    offsets = np.array([0, 1, 2, 0, 0, 1, 0, 1, 0, 0, 1, 2])
    table.num_computed_tokens[:] = 1
    tokens = torch.tensor([20, 22, 23, 30, 40, 41, -1, 50, 7, 60, 61, 62], dtype=torch.int32)
    nothing = NO_INTS, NO_INTS, torch.zeros(0, 0)
    tenancies = host.tenancies[rows]
    sampled = Sampled(rows, rows.astype(np.int64), 1 + offsets, tenancies, tokens, *nothing, rows != 4, None)
    verified = behind_drafts(sampled, step, offsets)
    assert verified.counted.tolist() == [1]
    host.count(verified.counted)
    host.leave(int32s(2))
    token_ids, counts, failed = verified.take(6)
    assert counts is not None
    assert counts.tolist() == [2, 1, 2, 1, 0, 3]
    assert token_ids.tolist() == [20, 22, 30, 40, 41, FAILED_TOKEN, 60, 61, 62]
    assert failed.tolist() == [6]
    verified.tell(host)
    assert table.num_tokens.tolist() == [3, 2, 1, 1, 1, 4]
    assert table.num_computed_tokens.tolist() == [2, 1, 1, 1, 1, 3]
    known = [table.tokens.read(row, 1, int(table.num_tokens[row])).tolist() for row in range(6)]
    assert known == [[20, 22], [30], [], [], [], [60, 61, 62]]
