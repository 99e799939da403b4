"""NgramProposer against a search through each row's tokens."""

import numpy as np
import pytest

from core.batch.request import request_from_message
from core.batch.table import BatchTable, RequestStart
from core.proposers.ngram import NgramProposer
from ipc.tables.arrays import NO_INT32S, Ints
from tests.core.driving import add_message
from tests.placed import PREFIX

MOST = 6
LENGTHS = (5, 4, 3, 2)


def table_with(prompts: list[list[int]]) -> tuple[BatchTable, Ints]:
    table = BatchTable(len(prompts) + 2)
    return table, start(table, prompts)


def start(table: BatchTable, prompts: list[list[int]]) -> Ints:
    requests = [request_from_message(add_message(n, prompt, 500), 0, n, 1000) for n, prompt in enumerate(prompts)]
    return table.add([RequestStart(one, NO_INT32S, 0, -1, 0, 0, 0, 0, False) for one in requests])


def searched(tokens: list[int], low: int, high: int) -> list[int]:
    """What followed the longest of the last n-grams, at its most recent place; repeated past the end."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return [tokens[end + place % (len(tokens) - end)] for place in range(MOST)]
    return []


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 5), (1, 3), (3, 8)])
@pytest.mark.parametrize("few_rows", [0, 6])
def test_it_finds_what_a_search_finds(few_rows: int, low: int, high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With five rows: all as columns, or one after the other."""
    monkeypatch.setattr(f"{PREFIX}core.proposers.ngram.FEW_ROWS", few_rows)
    rng = np.random.default_rng(low)
    table, rows = table_with([rng.integers(3, size=rng.integers(high, 40)).tolist() for _ in range(5)])
    proposer, num_found = NgramProposer(table, tuple(range(high, low - 1, -1)), 100_000), 0
    for step in range(60):
        asked = rows[rng.random(5) < 0.7] if step % 3 else rows
        if len(asked):
            counts, token_ids, kinds = proposer.propose(asked, MOST)
            for row, count, drafts, kind in zip(asked.tolist(), counts, token_ids.tolist(), kinds, strict=True):
                wanted = searched(table.token_ids(row).tolist(), low, high)
                assert (drafts[:count] if count else []) == wanted, (step, row)
                assert not count or low <= kind <= high
                num_found += bool(wanted)
        more = rng.integers(1, 4, 5)
        table.num_computed_tokens[rows] = table.num_tokens[rows]
        table.append_tokens(rows, rng.integers(3, size=int(more.sum())).astype(np.int32), more)
    assert num_found > 100


def test_a_row_of_another_request_begins_anew() -> None:
    table, rows = table_with([[1, 2, 3, 1, 2]])
    proposer = NgramProposer(table, LENGTHS, 1000)
    assert proposer.propose(rows, 3).token_ids[0, :3].tolist() == [3, 1, 2]
    table.remove(rows)
    (row,) = rows = start(table, [[7, 8, 9, 1, 2]])
    assert row == 0
    assert proposer.propose(rows, 3).counts.tolist() == [0]


def test_a_small_index_forgets_and_is_never_wrong_about_a_match() -> None:
    rng = np.random.default_rng(1)
    table, rows = table_with([rng.integers(60, size=900).tolist() for _ in range(8)])
    proposer = NgramProposer(table, LENGTHS, 1)
    counts, token_ids, kinds = proposer.propose(rows, 1)
    for row, count, (draft,), kind in zip(rows.tolist(), counts, token_ids.tolist(), kinds.tolist(), strict=True):
        tokens = table.token_ids(row).tolist()
        last = tokens[-kind:]
        followers = [tokens[at + kind] for at in range(len(tokens) - kind) if tokens[at : at + kind] == last]
        assert not count or draft in followers
