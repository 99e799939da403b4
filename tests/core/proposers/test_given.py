"""GivenDrafts: the tokens that were given for an answer, from where its row is."""

import numpy as np

from core.batch.request import request_from_message
from core.batch.table import BatchTable, RequestStart
from core.proposers.given import GivenDrafts
from ipc.tables.arrays import NO_INT32S
from tests.core.driving import add_message


def test_it_proposes_what_was_given_and_nothing_else() -> None:
    table = BatchTable(4)
    requests = [request_from_message(add_message(number, [5, 6, 7], 500), 1, number, 1000) for number in range(3)]
    rows = table.add([RequestStart(one, NO_INT32S, 0, -1, 0, 0, 0, 0, False) for one in requests])
    drafts = GivenDrafts(table)
    drafts.give((1, 0, 0), [10, 11, 12, 13], after_prompt=True)
    drafts.give((1, 1, 0), [20, 21], after_prompt=False)
    drafts.give((9, 2, 0), [30], after_prompt=True)  # of another client
    found = drafts.propose(rows, 3)
    assert found.counts.tolist() == [3, 0, 0], "the second answer's are not for the step of its prompt"
    assert found.token_ids[0].tolist() == [10, 11, 12]
    table.append_tokens(rows[:2], np.array([10, 20], np.int32))
    found = drafts.propose(rows[::-1], 9)
    assert found.counts.tolist() == [0, 1, 3], "behind the given tokens there are none"
    assert found.token_ids[2, :3].tolist() == [11, 12, 13]
    assert found.token_ids[1, 0] == 21
    drafts.forget((1, 0, 0))
    drafts.forget((1, 0, 0))
    assert drafts.propose(rows, 9).counts.tolist() == [0, 1, 0]
    drafts.forget((1, 1, 0))
    assert not drafts.propose(rows, 9).counts.any()
