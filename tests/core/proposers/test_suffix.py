"""SuffixProposer and its memory against a search through the row's tokens and the outputs of earlier requests."""

import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch.request import request_from_message
from core.batch.table import BatchTable, RequestStart
from core.proposers.gram_hash import GramHash
from core.proposers.output_memory import OutputMemory
from core.proposers.suffix import SuffixProposer
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import NO_INT32S, Ints
from tests.core.driving import add_message
from tests.placed import PREFIX

LENGTHS = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
MOST = 8


def proposer(table: BatchTable, **settings: Any) -> SuffixProposer:
    return SuffixProposer(table, SpeculativeConfig(method="suffix", **settings), 100_000)


def start(table: BatchTable, prompts: list[list[int]], *, client: int = 0, salt: str = "") -> Ints:
    messages = [msgspec.structs.replace(add_message(n, one, 500), cache_salt=salt) for n, one in enumerate(prompts)]
    requests = [request_from_message(message, client, n, 1000) for n, message in enumerate(messages)]
    return table.add([RequestStart(one, NO_INT32S, 0, -1, 0, 0, 0, 0, False) for one in requests])


def append(table: BatchTable, row: int, tokens: list[int]) -> None:
    rows = np.array([row])
    table.num_computed_tokens[rows] = table.num_tokens[rows]
    table.append_tokens(rows, np.array(tokens, np.int32), np.array([len(tokens)]))


def end(table: BatchTable, one: SuffixProposer, rows: Ints) -> None:
    one.end(rows)
    table.remove(rows)


def longest(tokens: list[int], texts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Of the runs that tokens end with, the longest of LENGTHS that stands in a text and goes on there; the rests."""
    for length in LENGTHS:
        rests = [
            text[at + length :]
            for text in texts
            for at in range(len(text) - length)
            if len(tokens) >= length and text[at : at + length] == tokens[-length:]
        ]
        if rests:
            return length, rests
    return 0, []


def test_it_finds_what_a_search_finds() -> None:
    rng = np.random.default_rng(0)
    table = BatchTable(4)
    one, outputs, num_remembered = proposer(table), [], 0
    for _ in range(12):
        (row,) = rows = start(table, [rng.integers(4, size=30).tolist()])
        for _ in range(25):
            tokens = table.token_ids(int(row)).tolist()
            counts, token_ids, kinds = one.propose(rows, MOST)
            own, own_rests = longest(tokens, [tokens])
            other, rests = longest(tokens, outputs)
            length = max(own, other)
            if other > own:
                num_remembered += 1
                assert kinds[0] == 32 + other
                got = token_ids[0, : counts[0]].tolist()
                assert got in [rest[: min(other, MOST)] for rest in rests]
            else:
                assert kinds[0] == own
                assert token_ids[0, 0] == own_rests[-1][0]
            assert 1 <= counts[0] <= min(length, MOST)
            append(table, int(row), rng.integers(4, size=rng.integers(1, 4)).tolist())
        outputs.append(table.token_ids(int(row)).tolist()[30:])
        end(table, one, rows)
    assert num_remembered > 50


def test_few_rows_one_by_one_find_what_many_find_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, table, num_found = np.random.default_rng(2), BatchTable(3), 0
    few, many = proposer(table), proposer(table)
    for _ in range(8):
        rows = start(table, [rng.integers(3, size=size).tolist() for size in (1, 4, 40)])
        for _ in range(20):
            asked = rows[rng.random(3) < 0.8]
            if len(asked):
                one = few.propose(asked, MOST)
                with monkeypatch.context() as columns:
                    for module in ("ngram", "suffix"):
                        columns.setattr(f"{PREFIX}core.proposers.{module}.FEW_ROWS", 0)
                    other = many.propose(asked, MOST)
                found = one.counts > 0
                num_found += int(found.sum())
                assert one.counts.tolist() == other.counts.tolist()
                assert one.kinds[found].tolist() == other.kinds[found].tolist()
                shown = np.arange(MOST) < one.counts[:, None]
                assert one.token_ids[shown].tolist() == other.token_ids[shown].tolist()
            for row in rows.tolist():
                append(table, row, rng.integers(3, size=rng.choice([1, 1, 3, 20])).tolist())
        few.end(rows)
        end(table, many, rows)
    assert num_found > 300


def test_an_index_takes_memory_as_it_is_used() -> None:
    """Clearing all of it at the first entry, as huge pages do, would stop every stream for 0.1 s."""
    hashed = GramHash(LENGTHS, 1 << 21)
    before = resident_bytes()
    table = hashed.make_table()
    table[hashed.lanes, 12_345] = 1
    assert table.nbytes == 80 << 20
    assert resident_bytes() - before < 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("client", "salt", "found"), [(0, "a", True), (1, "a", False), (0, "b", False), (0, "", False)]
)
def test_nobody_gets_drafts_from_the_text_of_others(client: int, salt: str, found: bool) -> None:
    table = BatchTable(2)
    one = proposer(table)
    rows = start(table, [[1, 2, 3]], salt="a")
    append(table, int(rows[0]), [5, 6, 7, 8, 9])
    end(table, one, rows)
    rows = start(table, [[4, 5, 6, 7]], client=client, salt=salt)
    counts, token_ids, _ = one.propose(rows, MOST)
    assert counts.tolist() == ([2] if found else [0])
    if found:
        assert token_ids[0, :2].tolist() == [8, 9]


def test_a_factor_allows_more_drafts_and_no_memory_none() -> None:
    table = BatchTable(2)
    many, none = (
        proposer(table, suffix_decoding_max_spec_factor=3.0),
        proposer(table, suffix_decoding_max_cached_requests=0),
    )
    rows = start(table, [[1]])
    append(table, int(rows[0]), list(range(10, 30)))
    for one in (many, none):
        one.end(rows)
    table.remove(rows)
    rows = start(table, [[9, 14, 15]])
    assert many.propose(rows, MOST).counts.tolist() == [6]
    assert none.propose(rows, MOST).counts.tolist() == [0]


def test_the_memory_is_a_ring_of_so_many_outputs() -> None:
    """What is found stands in one of the last outputs, whole, and goes on in the same one."""
    rng = np.random.default_rng(1)
    memory, kept = OutputMemory((4, 2), 3), []
    for number in range(200):
        output = rng.integers(12, size=rng.integers(2, 400)).astype(np.int32)
        memory.add(1 + number % 2, output)
        kept = [*kept, (1 + number % 2, output.tolist())][-3:]
        tails = rng.integers(12, size=(20, 4)).astype(np.int32)
        scopes = rng.integers(1, 3, 20)
        found = memory.find(scopes, tails)
        rests = memory.read(found.places, 5).tolist()
        for scope, tail, length, count, rest in zip(
            scopes, tails.tolist(), found.lengths, found.counts, rests, strict=True
        ):
            if length:
                whole = tail[:length][::-1] + rest[:count]
                assert any(
                    whole == text[at : at + len(whole)]
                    for owner, text in kept
                    if owner == scope
                    for at in range(len(text))
                )
    assert len(memory) <= 3
