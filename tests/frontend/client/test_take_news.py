"""take_news(): every token and every end once, of all requests with news at the same time."""

import numpy as np

from frontend.client.journal import Journal
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, FinishReason, Outputs


def add(journal: Journal, number: int, n: int = 1, *, streaming: bool = True) -> None:
    params = SamplingParams(n=n, temperature=1.0)
    journal.add(AddRequest(number, b"\0" * 4, params, 0), streaming=streaming, now=1.0)


def feed(journal: Journal, *rows: tuple[int, int, int, list[int], int]) -> None:
    """rows: number, choice, position, tokens, finish."""
    columns = list(zip(*rows, strict=True))
    journal.apply(
        Outputs(
            0,
            0,
            np.array(columns[0], "<u4").tobytes(),
            np.array(columns[2], "<u4").tobytes(),
            np.array([len(tokens) for tokens in columns[3]], "<u2").tobytes(),
            np.array([token for tokens in columns[3] for token in tokens], "<i4").tobytes(),
            np.array(columns[1], "<u2").tobytes(),
            bytes(columns[4]),
        ),
        2.0,
    )


def take(journal: Journal) -> list[tuple[int, int, list[int], int]]:
    news, found, at = journal.take_news(), [], 0
    columns = (news.numbers, news.choices, news.counts, news.finish)
    for number, choice, count, finish in zip(*(column.tolist() for column in columns), strict=True):
        found.append((number, choice, news.tokens[at : at + count].tolist(), finish))
        at += count
    assert at == len(news.tokens)
    return sorted(found)


def test_tokens_and_ends_come_once() -> None:
    journal = Journal()
    assert take(journal) == []
    for number in range(3):
        add(journal, number, streaming=number < 2)
    feed(journal, (0, 0, 0, [5, 6], 0), (1, 0, 0, [7], FinishReason.STOP), (2, 0, 0, [8], 0))
    assert take(journal) == [(0, 0, [5, 6], 0), (1, 0, [7], FinishReason.STOP)]
    assert take(journal) == []
    feed(journal, (0, 0, 2, [9], 0), (2, 0, 1, [3], FinishReason.LENGTH))
    assert take(journal) == [(0, 0, [9], 0), (2, 0, [8, 3], FinishReason.LENGTH)]
    feed(journal, (0, 0, 3, [], FinishReason.LENGTH))
    assert take(journal) == [(0, 0, [], FinishReason.LENGTH)]
    assert take(journal) == []


def test_choices_have_their_own_news() -> None:
    journal = Journal()
    add(journal, 0, n=3)
    feed(journal, (0, 2, 0, [1], 0), (0, 0, 0, [2], FinishReason.STOP))
    assert take(journal) == [(0, 0, [2], FinishReason.STOP), (0, 2, [1], 0)]
    feed(journal, (0, 1, 0, [4], 0), (0, 2, 1, [5], 0))
    assert take(journal) == [(0, 1, [4], 0), (0, 2, [5], 0)]


def test_a_held_request_keeps_its_news() -> None:
    journal = Journal()
    add(journal, 0)
    add(journal, 1)
    journal.hold(0, True)
    feed(journal, (0, 0, 0, [1, 2], 0), (1, 0, 0, [3], 0))
    assert take(journal) == [(1, 0, [3], 0)]
    assert journal.hold(0, True) == 2
    feed(journal, (0, 0, 2, [4], FinishReason.STOP))
    assert take(journal) == []
    journal.hold(0, False)
    assert take(journal) == [(0, 0, [1, 2, 4], FinishReason.STOP)]


def test_a_row_that_is_used_again_begins_anew() -> None:
    journal = Journal()
    add(journal, 0)
    journal.hold(0, True)
    feed(journal, (0, 0, 0, [1, 2], FinishReason.STOP))
    journal.remove(0)
    add(journal, 1)
    feed(journal, (1, 0, 0, [3], 0))
    assert take(journal) == [(1, 0, [3], 0)]
