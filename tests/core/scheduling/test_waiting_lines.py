"""The parts of a line that are looked at without being taken: its first, and a request's place."""

import random

import pytest

from core.batch.request import Request, request_from_message
from core.scheduling.virtual_time import VirtualTime
from core.scheduling.waiting_lines import FairLine, Line
from tests.core.driving import add_message


def make(client: int, serial: int, rank: int) -> Request:
    request = request_from_message(add_message(serial, [1]), client, serial, 100)
    request.rank = rank
    return request


@pytest.mark.parametrize("kind", ["one line", "a line per client"])
def test_first_and_position_agree_with_the_order(kind: str) -> None:
    rng, times = random.Random(3), VirtualTime()
    line: Line | FairLine = Line() if kind == "one line" else FairLine(times)
    waiting = []
    for serial in range(120):
        request = make(rng.randrange(4), serial, rng.randrange(3))
        times.enter(request.client)
        line.push(request)
        waiting.append(request)
        if rng.random() < 0.3:
            times.charge_one(request.client, rng.randrange(9))
        if rng.random() < 0.3:
            line.discard(waiting.pop(rng.randrange(len(waiting))))
        if rng.random() < 0.1 and (first := line.pop()) is not None:
            waiting.remove(first)
        order = line.in_order()
        assert len(order) == len(waiting) == len(line)
        for count in (0, 1, 7, 500):
            assert line.first(count) == order[:count]
        if order:
            at = rng.randrange(len(order))
            assert line.position(order[at]) == at
