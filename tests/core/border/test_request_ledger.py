"""The ledger of request numbers, and the clock of leases."""

import numpy as np
import pytest

from core.border import ledger as request_ledger
from core.border.accounts import Load
from core.border.backlog import Backlog
from core.border.lease_clock import LeaseClock
from core.border.ledger import NumberStatus, RequestLedger
from ipc.wire.messages import Abort, ErrorCode, Outputs, RequestFailed
from tests.columns import pack_numbers


def load(num_choices: int, num_bytes: int) -> Load:
    return Load(num_choices, 10 * num_choices, num_bytes)


def finish(*numbers: int, running: tuple[int, ...] = ()) -> Outputs:
    rows = [*running, *numbers]
    column = np.array(rows, "<u4").tobytes()
    codes = bytes([0] * len(running) + [1] * len(numbers))
    return Outputs(0, 0, column, bytes(4 * len(rows)), bytes(2 * len(rows)), b"", finish=codes)


def test_number_status() -> None:
    ledger = RequestLedger()
    assert ledger.status(5, b"a") is NumberStatus.NEW
    ledger.add(5, b"a", load(1, 1))
    ledger.add(6, b"bcd", load(1, 3))
    assert ledger.account.num_bytes == 4
    assert ledger.status(5, memoryview(b"a")) is NumberStatus.SAME
    assert ledger.status(5, b"other") is NumberStatus.IN_USE
    ledger.note(finish(5, running=(6,)))
    assert (ledger.status(5, b"a"), ledger.status(6, b"bcd")) == (NumberStatus.FINISHED, NumberStatus.SAME)
    ledger.note(RequestFailed(6, ErrorCode.INTERNAL, ""))
    ledger.note(finish(7))  # was never here
    assert (ledger.status(6, b"x"), ledger.status(7, b"x")) == (NumberStatus.FINISHED, NumberStatus.NEW)
    assert ledger.account.num_bytes == 0


def test_finished_numbers_are_forgotten_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ledger, "MAX_FINISHED", 3)
    ledger = RequestLedger()
    for number in range(5):
        ledger.add(number, b"x", load(1, 1))
    ledger.note(finish(4, 3, 2, 1))
    statuses = [ledger.status(number, b"") for number in range(5)]
    assert statuses == [
        NumberStatus.IN_USE,
        NumberStatus.FINISHED,
        NumberStatus.FINISHED,
        NumberStatus.FINISHED,
        NumberStatus.NEW,
    ]


def test_the_lease_clock_stands_still_while_nobody_listens() -> None:
    clock = LeaseClock(tick=1.0, now=100.0)
    clock.advance(100.5, has_read=True)
    assert clock.time == 0.5
    clock.advance(3700.0, has_read=True)  # the process was stopped for an hour
    assert clock.time == 1.5
    clock.advance(3700.8, has_read=False)  # more may have come than was read
    clock.advance(3700.9, has_read=True)
    assert abs(clock.time - 1.6) < 1e-6


def test_a_number_that_is_free_again_never_meets_its_first_use_in_one_message() -> None:
    """Found by a client that did not read and used a number again: the merging of its outputs ended the engine."""
    ledger, backlog = RequestLedger(), Backlog()
    one_token = {"positions": bytes(4), "counts": b"\1\0", "tokens": bytes(4)}
    first = Outputs(0, 0, numbers=pack_numbers([1]), finish=b"\2", **one_token)
    number = 1
    ledger.add(number, b"x", load(1, 1))
    message = first
    while True:
        ledger.note(message)
        backlog.append(message)
        if ledger.status(1, b"x") is NumberStatus.NEW:
            break
        number += 1
        ledger.add(number, b"x", load(1, 1))
        message = finish(number)
    backlog.append(first)
    assert backlog.head() is not None


def test_what_an_abort_costs_the_engine() -> None:
    ledger = RequestLedger()
    for number in (5, 6):
        ledger.add(number, b"x", load(3, 1))
    assert ledger.live_among(Abort(pack_numbers([9, 6, 6, 7, 5, 6]))) == Abort(pack_numbers([6, 5]))
    choices = np.array([1, 0, 1, 2, 0], "<u2").tobytes()
    wanted = Abort(pack_numbers([6, 6]), np.array([1, 2], "<u2").tobytes())
    assert ledger.live_among(Abort(pack_numbers([6, 7, 6, 6, 9, 5]), choices)) == wanted
    assert ledger.live_among(Abort(pack_numbers([1, 2]))) is None
    assert ledger.live_among(Abort(b"")) is None
