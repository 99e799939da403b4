"""Signs of life: what counts as hung, from one reading and the clock alone."""

import gc
import os

import pytest

from frontend.engine.signs import limit_s, silence_s, step_age_s, trouble
from ipc.records.black_box import NO_READING, BlackBoxFile, Reading, find_black_box

S = 1_000_000_000
NOBODY = 2**22 + 1  # above the largest process id


def reading(**changes: int) -> Reading:
    """An engine in its fifth step since t = 100 s, whose like has taken 0.1 s."""
    values = {"epoch": 0, "pid": os.getpid(), "num_begun": 5, "num_ended": 4, "begun_ns": 100 * S, "turned_ns": 99 * S}
    return NO_READING._replace(**values | {"expected_ns": S // 10} | changes)


@pytest.mark.parametrize(
    ("one", "limit"),
    [
        (reading(), 5.0),
        (reading(expected_ns=S), 20.0),
        (reading(expected_ns=0), 300.0),
        (reading(num_ended=5), 10.0),
        (NO_READING, 300.0),
    ],
)
def test_trouble_begins_at_the_limit(one: Reading, limit: float) -> None:
    assert limit_s(one) == limit
    last_ns = 100 * S
    assert trouble(one, last_ns + int(limit * S)) == ""
    text = trouble(one, last_ns + int((limit + 0.2) * S))
    assert text.endswith(f"for {limit + 0.2:.1f} s; the limit is {limit:.1f} s") or one is NO_READING


def test_what_does_not_hang() -> None:
    late = 10_000 * S
    assert trouble(reading(), late)
    assert trouble(reading(pid=NOBODY), late) == "", "a dead process is its owner's affair"
    assert trouble(reading(), late, least_s=0) == "", "no engine ever hangs"
    assert silence_s(NO_READING, late) == 0


def test_the_age_of_a_step() -> None:
    assert step_age_s(reading(), 103 * S) == 3.0
    assert step_age_s(reading(num_ended=5), 103 * S) == 0.0


def test_a_black_box_is_found_by_the_process_that_writes_it() -> None:
    gc.collect()  # pages of earlier tests of this process, which are in cycles
    page = BlackBoxFile(4)
    assert find_black_box(os.getpid()) is None, "nobody has written to it"
    assert find_black_box(NOBODY) is None
    assert page.reader.read() == NO_READING
