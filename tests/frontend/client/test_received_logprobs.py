"""Log probabilities on the client's side: columns that fit, and every position once."""

import numpy as np
import pytest

from frontend.client.received_logprobs import PositionLogprobs, ReceivedLogprobs, logprob_columns_of
from ipc.errors import MalformedMessageError
from ipc.wire.messages import Logprobs

ONE, TWO = np.array([1], "<u4").tobytes(), np.array([2], "<u4").tobytes()
GOOD = Logprobs(ONE, TWO, TWO, ONE, bytes(8), bytes(8))


def at(rank):
    return PositionLogprobs(rank, np.array([rank], np.int32), np.zeros(1, np.float32))


def test_columns():
    ((number, choice, position, one),) = logprob_columns_of(GOOD).split()
    assert (number, choice, position, one.rank, len(one.values)) == (1, 0, 2, 1, 2)


@pytest.mark.parametrize(
    "broken",
    [
        Logprobs(b"123", TWO, TWO, ONE, bytes(8), bytes(8)),
        Logprobs(ONE, b"", TWO, ONE, bytes(8), bytes(8)),
        Logprobs(ONE, TWO, TWO, ONE, bytes(4), bytes(8)),
        Logprobs(ONE, TWO, TWO, ONE, bytes(8), bytes(12)),
        Logprobs(ONE, TWO, bytes(4), ONE, b"", b""),
        Logprobs(ONE, TWO, b"\xff\xff\xff\xff", ONE, bytes(8), bytes(8)),
        Logprobs(ONE, TWO, TWO, ONE, bytes(8), bytes(8), b"\1\0\1\0"),
    ],
)
def test_columns_that_do_not_fit_are_malformed(broken):
    with pytest.raises(MalformedMessageError, match="logprobs"):
        logprob_columns_of(broken)


def test_every_position_once():
    received = ReceivedLogprobs(3)
    for position in (1, 2, 1, 2, 3, 4, 3):
        received.add(position, at(position))
    assert [one.rank for one in received.prompt] == [1, 2]
    assert [one.rank for one in received.output] == [3, 4]
    with pytest.raises(AssertionError, match="of 6 follow, but 5 is expected"):
        received.add(6, at(6))
