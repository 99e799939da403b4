"""The journal: exactly-once delivery from columns, rows and numbers over long sessions."""

import random
import sys
import tracemalloc

import numpy as np
import pytest

from frontend.client.journal import Journal
from ipc.errors import MalformedMessageError, RequestFailedError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import PART_BYTES, FeatureUse, PutFeature
from ipc.wire.messages import AddRequest, FinishReason, Outputs


def add(journal: Journal, number: int, *, streaming: bool = True, now: float = 1.0, n: int = 1) -> int:
    prompt = np.arange(3, dtype="<i4").tobytes()
    return journal.add(AddRequest(number, prompt, SamplingParams(n=n), 0), streaming=streaming, now=now)


def outputs(
    rows: list[tuple[int, int, list[int], int]],
    *,
    choices: list[int] | None = None,
    stop_tokens: list[tuple[int, int]] | None = None,
    started: list[tuple[int, int]] | None = None,
) -> Outputs:
    """rows: (number, position, tokens, finish code)."""
    return Outputs(
        epoch=0,
        step=7,
        numbers=np.array([row[0] for row in rows], "<u4").tobytes(),
        positions=np.array([row[1] for row in rows], "<u4").tobytes(),
        counts=np.array([len(row[2]) for row in rows], "<u2").tobytes(),
        tokens=np.array([token for row in rows for token in row[2]], "<i4").tobytes(),
        finish=bytes(row[3] for row in rows) if any(row[3] for row in rows) else b"",
        choices=b"" if choices is None else np.array(choices, "<u2").tobytes(),
        stop_tokens=stop_tokens or [],
        started=np.array(started or [], "<u4").tobytes(),
    )


def tokens_of(journal: Journal, number: int) -> list[int]:
    return journal.read(number).token_ids.tolist()


def test_a_request_from_its_start_to_its_end():
    journal = Journal()
    row = add(journal, 0)
    journal.apply(outputs([(0, 0, [11], 0)], started=[(0, 2)]), 2.0)
    touched = journal.apply(outputs([(0, 1, [12, 13], FinishReason.STOP)], stop_tokens=[(0, 13)]), 3.0)
    assert touched.tolist() == [row]
    progress = journal.read(0)
    assert progress.token_ids.tolist() == [11, 12, 13]
    assert journal.read(0, 2).token_ids.tolist() == [13]
    assert (progress.finish, progress.stop_token, progress.num_cached_tokens) == (FinishReason.STOP, 13, 2)
    assert progress[4:] == (1.0, 2.0, 3.0, 3.0, None, None, (), 0, 0, None, (), ())


def test_duplicates_and_overlaps_are_dropped():
    journal = Journal()
    add(journal, 0)
    add(journal, 1)
    journal.apply(outputs([(0, 0, [1, 2, 3], 0), (1, 0, [9], 0)]), 2.0)
    again = journal.apply(outputs([(0, 0, [1, 2, 3], 0), (1, 0, [9], 0)]), 3.0)
    assert again.tolist() == []
    journal.apply(outputs([(0, 1, [2, 3, 4, 5], 0), (1, 1, [8], 0)]), 4.0)
    assert tokens_of(journal, 0) == [1, 2, 3, 4, 5]
    assert tokens_of(journal, 1) == [9, 8]
    assert journal.read(0).last_token_time == 4.0


def test_rows_of_one_message_in_any_mix():
    journal = Journal()
    for number in range(4):
        add(journal, number)
    journal.apply(outputs([(0, 0, [1], 0), (1, 0, [2], 0), (2, 0, [3], 0), (3, 0, [4], 0)]), 2.0)
    journal.remove(2)
    journal.apply(
        outputs([(3, 0, [4, 41], 0), (2, 1, [31, 32], 0), (0, 1, [], FinishReason.ABORT), (1, 1, [21], 0)]), 3.0
    )
    assert [tokens_of(journal, number) for number in (0, 1, 3)] == [[1], [2, 21], [4, 41]]
    assert journal.read(0).finish == FinishReason.ABORT


def test_a_gap_is_an_error_with_the_numbers():
    journal = Journal()
    add(journal, 0)
    journal.apply(outputs([(0, 0, [1, 2], 0)]), 2.0)
    with pytest.raises(AssertionError, match="request 0: 2 tokens were delivered, the next begin at position 3"):
        journal.apply(outputs([(0, 3, [4], 0)]), 3.0)


def test_what_comes_after_the_end_is_dropped():
    journal = Journal()
    add(journal, 0)
    journal.apply(outputs([(0, 0, [1], FinishReason.LENGTH)]), 2.0)
    assert journal.apply(outputs([(0, 1, [2], FinishReason.STOP)]), 3.0).tolist() == []
    progress = journal.read(0)
    assert (progress.token_ids.tolist(), progress.finish, progress.finished_time) == ([1], FinishReason.LENGTH, 2.0)


def test_failed_requests_keep_their_tokens_and_their_reason():
    journal = Journal()
    add(journal, 0, streaming=False)
    journal.apply(outputs([(0, 0, [1], 0)]), 2.0)
    assert journal.fail(0, RequestFailedError("no blocks"), 3.0)
    assert not journal.fail(0, RequestFailedError("again"), 4.0)
    assert not journal.fail(5, RequestFailedError("unknown"), 4.0)
    progress = journal.read(0)
    assert str(progress.error) == "no blocks"
    assert (progress.token_ids.tolist(), progress.finish) == ([1], FinishReason.ABORT)
    assert journal.take_ready().tolist() == [0]


def test_news_of_final_only_requests_is_their_end():
    journal = Journal()
    add(journal, 0, streaming=True)
    add(journal, 1, streaming=False)
    rows = journal.apply(outputs([(0, 0, [1], 0), (1, 0, [1], 0)]), 2.0)
    assert journal.any_ready(rows)
    assert journal.take_ready(np.array([1, 0])).tolist() == [0]
    rows = journal.apply(outputs([(1, 1, [1], 0)]), 2.0)
    assert not journal.any_ready(rows)
    journal.apply(outputs([(1, 2, [1], FinishReason.STOP)]), 2.0)
    assert journal.take_ready().tolist() == [1]
    assert journal.take_ready().tolist() == []


def test_rows_are_reused_and_clean():
    journal = Journal()
    first = add(journal, 0)
    journal.apply(outputs([(0, 0, list(range(200)), FinishReason.STOP)], stop_tokens=[(0, 5)], started=[(0, 3)]), 2.0)
    journal.remove(0)
    assert add(journal, 1, streaming=False, now=9.0) == first
    assert journal.apply(outputs([(0, 200, [1], 0)]), 3.0).tolist() == []
    progress = journal.read(1)
    assert progress[1:] == (FinishReason.NONE, None, 0, 9.0, 0.0, 0.0, 0.0, None, None, (), 0, 0, None, (), ())
    assert len(progress.token_ids) == 0
    assert journal.take_ready().tolist() == []
    assert journal.unfinished().tolist() == [1]


def test_the_number_index_stays_small_over_a_long_session():
    journal = Journal()
    for number in range(5000):
        add(journal, number)
        if number >= 10:
            assert journal.remove(number - 10)
    assert journal.num_live == 10
    assert [journal.request(number).number for number in range(4990, 5000)] == list(range(4990, 5000))
    assert journal.row(4989) == -1
    assert journal.row(5000) == -1
    tracemalloc.start()
    for number in range(5000, 10_000):
        add(journal, number)
        journal.remove(number - 10)
    assert tracemalloc.get_traced_memory()[0] < 16 << 10  # an entry for each number would take 40 KB
    tracemalloc.stop()


def test_one_old_request_among_many_new_ones():
    journal = Journal()
    add(journal, 0)
    for number in range(1, 1000):
        add(journal, number)
        journal.remove(number)
    journal.apply(outputs([(0, 0, [5], 0), (999, 0, [6], 0)]), 2.0)
    assert tokens_of(journal, 0) == [5]


def test_thousands_of_rows_at_once():
    journal = Journal()
    for number in range(3000):
        add(journal, number)
    for position in range(3):
        journal.apply(outputs([(number, position, [number + position], 0) for number in range(3000)]), 2.0)
    assert tokens_of(journal, 2999) == [2999, 3000, 3001]
    assert journal.num_live == 3000


def test_any_redelivery_gives_every_token_once():
    """At least once on the wire, in any overlap and with any batching, is exactly once here."""
    random.seed(5)
    journal = Journal()
    streams = {number: [random.randrange(1000) for _ in range(random.randrange(1, 200))] for number in range(20)}
    sent = dict.fromkeys(streams, 0)
    for number in streams:
        add(journal, number)
    while any(sent[number] < len(tokens) for number, tokens in streams.items()):
        rows = []
        for number in random.sample(sorted(streams), 8):
            start = random.randrange(max(0, sent[number] - 5), sent[number] + 1)
            end = min(len(streams[number]), start + random.randrange(0, 9))
            finish = FinishReason.LENGTH if end == len(streams[number]) else 0
            rows.append((number, start, streams[number][start:end], finish))
            sent[number] = max(sent[number], end)
        journal.apply(outputs(rows), 2.0)
    assert {number: tokens_of(journal, number) for number in streams} == streams
    assert journal.unfinished().tolist() == []


@pytest.mark.parametrize(
    "broken",
    [
        Outputs(0, 0, b"\0\0\0", b"", b"", b""),
        Outputs(0, 0, b"\0\0\0\0", b"", b"", b""),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\1\0", b""),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\0\0", b"", finish=b"\1\1"),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\0\0", b"", finish=b"\x09"),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\0\0", b"", choices=b"\1\0"),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\0\0", b"", started=b"\1\0"),
        Outputs(0, 0, b"\0\0\0\0", b"\0\0\0\0", b"\0\0", b"", stop_tokens=[(1, 1)]),
        Outputs(0, 0, b"\0" * 8, b"\0" * 8, b"\0" * 4, b""),
    ],
)
def test_columns_that_do_not_fit_are_malformed(broken: Outputs):
    journal = Journal()
    add(journal, 0)
    with pytest.raises(MalformedMessageError):
        journal.apply(broken, 2.0)


def test_applying_costs_no_python_per_row():
    """The Python calls of apply() do not grow with the rows, while no row needs a page."""

    def calls_for(num_rows: int) -> int:
        journal = Journal()
        for number in range(num_rows):
            add(journal, number)
        journal.apply(outputs([(number, 0, [1], 0) for number in range(num_rows)]), 2.0)
        message = outputs([(number, 1, [2, 3], 0) for number in range(num_rows)])
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            journal.apply(message, 3.0)
        finally:
            sys.setprofile(None)
        return calls

    assert calls_for(1000) == calls_for(10)


def test_choices_are_rows_of_their_own():
    journal = Journal()
    add(journal, 0)
    add(journal, 1, n=70)  # more than there are rows
    rows = [(1, 0, [5], 0), (0, 0, [6], 0), (1, 0, [7, 8], FinishReason.STOP)]
    touched = journal.apply(outputs(rows, choices=[0, 0, 69], stop_tokens=[(2, 8)], started=[(1, 2)]), 2.0)
    assert len(touched) == 3
    assert [journal.read(1, 0, choice).token_ids.tolist() for choice in (0, 1, 69)] == [[5], [], [7, 8]]
    assert [journal.read(1, 0, choice).stop_token for choice in (0, 69)] == [None, 8]
    assert [journal.read(1, 0, choice).num_cached_tokens for choice in (0, 69)] == [2, 2]
    assert journal.take_ready().tolist() == [0, 1]
    assert journal.unfinished().tolist() == [0, 1]
    assert (journal.num_live, len(journal._free)) == (2, 128 - 71)
    with pytest.raises(MalformedMessageError, match="has a choice that its request does not have"):
        journal.apply(outputs([(1, 0, [5], 0)], choices=[70]), 3.0)
    with pytest.raises(MalformedMessageError, match="a choice has two rows"):
        journal.apply(outputs([(1, 0, [5], 0), (1, 0, [5], 0)], choices=[3, 3]), 3.0)
    journal.apply(outputs([(1, 0, [7, 8, 9], 0), (1, 0, [5, 6], 0)], choices=[69, 0]), 3.0)
    assert [journal.read(1, 0, choice).token_ids.tolist() for choice in (0, 69)] == [[5, 6], [7, 8]]
    assert journal.remove(1)
    assert (journal.num_live, len(journal._free)) == (1, 127)
    assert journal.apply(outputs([(1, 2, [5], 0)], choices=[1]), 4.0).tolist() == []
    assert journal.read(0).token_ids.tolist() == [6]


def test_failed_choices():
    journal = Journal()
    add(journal, 0, n=2, streaming=False)
    assert not journal.any_ready(journal.apply(outputs([(0, 0, [5], 0)], choices=[1]), 2.0))
    journal.apply(outputs([(0, 1, [], FinishReason.STOP)], choices=[1]), 2.0)
    assert journal.take_ready().tolist() == [0]
    assert journal.fail(0, RequestFailedError("no blocks"), 3.0)
    assert [journal.read(0, 0, choice).error is None for choice in range(2)] == [False, True]
    assert journal.take_ready().tolist() == [0]
    assert not journal.fail(0, RequestFailedError("again"), 4.0)
    assert not journal.remove(0)


def test_a_requests_features_are_sent_again_before_it():
    journal, puts = Journal(), [PutFeature("embeds", [1, 2], bytes(8)), PutFeature("embeds", [1, 2], b"8 bytes!")]
    message = AddRequest(0, b"\0\0\0\0", SamplingParams(), 0, features=[FeatureUse(0, 1, b"digest")])
    num_references = sys.getrefcount(puts)
    journal.add(message, streaming=True, now=1.0, puts=puts)
    add(journal, 1)
    assert journal.resubmission(0, 2.0)[:2] == puts
    assert journal.resubmission(0, 2.0)[2].features == message.features
    assert len(journal.resubmission(1, 2.0)) == 1
    journal.remove(0)
    assert sys.getrefcount(puts) == num_references


def test_a_large_feature_is_sent_again_in_parts():
    journal, data = Journal(), bytes(PART_BYTES) + b"1234"
    message = AddRequest(0, b"\0\0\0\0", SamplingParams(), 0, features=[FeatureUse(0, 1, b"digest")])
    put = PutFeature("embeds", [1, len(data) // 4], data)
    journal.add(message, streaming=True, now=1.0, puts=[put])
    first, second, again = journal.resubmission(0, 2.0)
    assert (len(first.data), first.left, second.data, second.left) == (PART_BYTES, 4, b"1234", 0)
    assert first.shape == second.shape == put.shape
    assert again.features == message.features
