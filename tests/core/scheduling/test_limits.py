"""A limit more than the engine has: it holds, it is explained, and what it counts comes back however a request ends."""

import random
from typing import Any

import pytest

from core.batch.request import Request
from core.batch.table import RequestStart
from core.inputs import HoldClient, ReleaseClient
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft
from ipc.wire.messages import Abort, AddRequest, FinishReason
from ipc.wire.scheduling_messages import Explain, Explanation, Reason
from tests.columns import pack_numbers
from tests.core.driving import Driver, add_message, expected_tokens, small_config
from tests.in_turn import in_turn


class OddNumbers:
    """At most `most` requests with odd numbers run."""

    def __init__(self, most: int, verdict: Verdict = Verdict.PARTIAL_PREFILLS) -> None:
        self.most = most
        self.verdict = verdict  # borrowed: a limit of the engine's has one of its own
        self.held: list[int] = []  # serials

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        if start.request.number % 2 == 0 or len(self.held) < self.most:
            return None
        return Examined(start.request, self.verdict, len(self.held) + 1, self.most)

    def take(self, start: RequestStart, draft: Draft) -> None:
        if start.request.number % 2:
            self.held.append(start.request.serial)

    def give_back(self, request: Request) -> None:
        if request.number % 2:
            self.held.remove(request.serial)


def limited(most: int, driver: Driver, **options: Verdict) -> OddNumbers:
    limit = OddNumbers(most, **options)
    driver.scheduler.admission.add_limit(limit)
    return limit


def running_odd(driver: Driver) -> list[int]:
    requests = [driver.scheduler.table.request[row] for row in driver.scheduler.running.tolist()]
    return sorted(request.serial for request in requests if request is not None and request.number % 2)


def running_numbers(driver: Driver) -> list[int]:
    return sorted(driver.scheduler.table.number[driver.scheduler.running].tolist())


@pytest.mark.parametrize(("policy", "depth"), in_turn(["fcfs", "priority"], [1, 2]))
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_it_holds_and_gives_back_through_aborts_holds_and_preemptions(seed: int, policy: str, depth: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"watermark": 0.0, "scheduling_policy": policy}
    driver = Driver(small_config(13, max_num_seqs=5, budget=16, depth=depth, max_model_len=40, **options))
    limit = limited(2, driver)
    held: set[int] = set()
    requests: dict[tuple[int, int], AddRequest] = {}
    for step in range(150):
        messages: list[tuple[int, object]] = []
        client = rng.randrange(3)
        if rng.random() < 0.6 and step < 100:
            message = add_message(step, [rng.randrange(9) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 20))
            requests[client, step] = message
            messages.append((client, message))
        if rng.random() < 0.1:
            messages.append((client, ReleaseClient() if client in held else HoldClient()))
            held ^= {client}
        if rng.random() < 0.05 and requests:
            who, number = rng.choice(list(requests))
            messages.append((who, Abort(pack_numbers([number]))))
        driver.step(messages)  # type: ignore[arg-type]
        assert sorted(limit.held) == running_odd(driver)
        assert len(limit.held) <= 2
    driver.step([(client, ReleaseClient()) for client in sorted(held)])
    driver.drain()
    assert limit.held == []
    assert driver.scheduler.stats.num_preemptions > 0
    for (client, number), message in requests.items():
        entry = driver.inbox.received[client, number]
        expected = expected_tokens(message, 40)
        assert entry.tokens == (expected[: len(entry.tokens)] if entry.finish is FinishReason.ABORT else expected)


def test_those_behind_pass_or_wait_as_the_verdict_says() -> None:
    for verdict, running in ((Verdict.PARTIAL_PREFILLS, [1, 4]), (Verdict.NO_ROW, [1])):
        driver = Driver(small_config(60))
        limited(1, driver, verdict=verdict)
        driver.step([(1, add_message(number, [number] * 5, 30)) for number in (1, 3, 4)])
        assert running_numbers(driver) == running
        driver.step([(1, Abort(pack_numbers([1])))])
        assert running_numbers(driver) == [3, 4]


def test_it_is_explained_with_its_numbers() -> None:
    driver = Driver(small_config(60))
    limited(1, driver)
    driver.step([(1, add_message(number, [number] * 5, 30)) for number in (1, 3)])
    replies = driver.step([(1, Explain(3, 3, 0, 100))])
    (answer,) = [reply for _, reply in replies if isinstance(reply, Explanation)]
    (one,) = answer.requests
    assert (one.reason, one.needed, one.available) == (Reason.PARTIAL_PREFILLS, 2, 1)


def test_nobody_is_preempted_for_a_request_that_lacks_it() -> None:
    driver = Driver(small_config(60, max_num_seqs=2, scheduling_policy="priority"))
    limited(1, driver)
    driver.step([(1, add_message(number, [number] * 5, 30)) for number in (1, 2)])
    urgent = add_message(3, [3] * 5, 30)
    urgent = AddRequest(3, urgent.prompt_token_ids, urgent.params, 0, -5)
    driver.step([(1, urgent)])
    assert running_numbers(driver) == [1, 2]
    assert driver.scheduler.stats.num_preemptions == 0
