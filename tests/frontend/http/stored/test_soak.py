"""Conversations, background responses and batches in one store, while processes of the service are killed at random.

A kill hits the HTTP process, the engine, or the supervisor with all of them; then the service starts again with the
same store. STORED_SOAK=1 runs 1,000 conversations, 500 responses and 20 batches, and another number as large a part of
these. STORED_SOAK_SEED begins the draws.
"""

import contextlib
import http.client
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.conftest import FAKE
from tests.frontend.http.stored import test_batches as batches
from tests.frontend.http.stored.test_conversations import begun, items_in
from tests.frontend.http.stored.test_responses import BEGUN, DEMO, PATIENCE_S, child_of, create, same, texts

SHARE = float(os.environ.get("STORED_SOAK", "0.1"))
SEED = int(os.environ.get("STORED_SOAK_SEED", "3"))
ROUNDS = max(4, round(40 * SHARE))
TURN: dict[str, Any] = {"input": "Hi", "max_output_tokens": 30, "ignore_eos": True, "seed": 5}
NUM_LINES = 40
MOST_TURNS = 4


class Service:
    """A server whose processes are killed, and which is started again."""

    def __init__(self, *options: str) -> None:
        self._options, self._stack = options, contextlib.ExitStack()
        self.kills = Counter[str]()
        self.start()

    def start(self) -> None:
        self.caller = self._stack.enter_context(serving(*self._options))

    def kill(self, what: str) -> None:
        self.kills[what] += 1
        if what == "all":
            batches.end_all(self.caller)
            with contextlib.suppress(AssertionError):  # of its exit status
                self._stack.close()
            self._stack = contextlib.ExitStack()
            self.start()
            return
        with contextlib.suppress(ProcessLookupError, StopIteration):
            os.kill(child_of(self.caller, what.encode()), signal.SIGKILL)

    def close(self) -> None:
        self._stack.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the body of an answer; None if the connection was cut or the server says that it is not ready."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = self.caller.call(method, path, body)
            assert answer.status in (200, 503), answer.body
            return answer.json if answer.status == 200 else None
        return None


class Work:
    """What clients of a service have begun, and what they know of it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.responses: list[str] = []
        self.turns: dict[str, list[str]] = {}  # by conversation: the responses that were made in it
        self.unsure: set[str] = set()  # conversations with a turn whose answer was cut off: it may be there or not
        self.batches: list[str] = []
        self.file = ""

    def retried(self, path: str, body: Any, conversation: str = "") -> str:
        """Return the id of what a request has made, asked for until a server that lives answers."""
        end = time.monotonic() + PATIENCE_S
        while (answer := self.service.ask("POST", path, body)) is None:
            self.unsure |= {conversation}
            assert time.monotonic() < end, path
            time.sleep(0.05)
        return str(answer["id"])

    def begin_round(self, draw: random.Random) -> None:
        """Begin a round's part of everything."""
        background = TURN | {"background": True}
        for _ in range(math.ceil(500 * SHARE / ROUNDS)):
            self.responses.append(self.retried("/v1/responses", {"input": "Hi", **BEGUN}))
        new = [self.retried("/v1/conversations", {}) for _ in range(math.ceil(1000 * SHARE / ROUNDS))]
        old = draw.sample(list(self.turns), min(len(self.turns), len(new) // 2))
        self.turns |= {one: [] for one in new}
        for one in [*new, *(one for one in old if len(self.turns[one]) < MOST_TURNS)]:
            self.turns[one].append(self.retried("/v1/responses", {**background, "conversation": one}, one))
        for _ in range(draw.choice([0, 1]) if len(self.batches) < 20 * SHARE else 0):
            fields = {"input_file_id": self.file, "endpoint": "/v1/completions", "completion_window": "24h"}
            self.batches.append(self.retried("/v1/batches", fields))

    def end_round(self) -> None:
        """Wait for the responses of the last turns, so that the next ones continue them."""
        for made in self.turns.values():
            for response_id in made[-1:]:
                self.ended(f"/v1/responses/{response_id}", ("queued", "in_progress"))

    def ended(self, path: str, unfinished: tuple[str, ...]) -> Any:
        """Return what has ended, asked for until a server that lives answers."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = self.service.ask("GET", path)
            if found is not None and found["status"] not in unfinished:
                return found
            assert time.monotonic() < end, (path, found)
            time.sleep(0.02)


def check(work: Work, wanted: Any, lines: Any, turns: list[str]) -> None:
    """Nothing is lost, doubled or different. turns: the answers of a conversation that was left alone."""
    caller = work.service.caller
    assert len(set(work.responses)) == len(work.responses)
    for one in work.responses:
        assert same(work.ended(f"/v1/responses/{one}", ("queued", "in_progress"))) == same(wanted), one
    for conversation, made in work.turns.items():
        items = items_in(caller, {"id": conversation}, {})
        ids = Counter(item["id"] for item in items)
        assert set(ids.values()) == {1}, conversation
        for response_id in made:
            (answer,) = work.ended(f"/v1/responses/{response_id}", ("queued", "in_progress"))["output"]
            assert ids[answer["id"]] == 1, (conversation, response_id)
        assert [item["role"] for item in items] == ["user", "assistant"] * (len(items) // 2), conversation
        if conversation in work.unsure:
            assert all(continues(caller, items[: at + 1]) for at in range(1, len(items), 2)), conversation
        else:
            assert len(items) == 2 * len(made), conversation
            assert texts(items)[1::2] == turns[: len(made)], conversation
    for batch_id in work.batches:
        batch = work.ended(f"/v1/batches/{batch_id}", ("validating", "in_progress", "finalizing"))
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert batches.texts(caller, batch) == lines, batch_id


def continues(caller: Caller, items: list[Any]) -> bool:
    """Say whether the last answer is the one to its question behind the turns before it, or behind the first of them.

    A turn that was cut off and its repetition continue the same history, so the second does not see the first.
    """
    *earlier, question, answer = items
    histories = (earlier[:count] for count in range(len(earlier), -1, -2))
    fields = TURN | {"store": False}
    return any(
        texts(create(caller, {}, **fields | {"input": [*one, question]})["output"]) == texts([answer])
        for one in histories
    )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nothing_is_lost_doubled_or_different_while_all_are_killed(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    options = (*FAKE, "--executor-option", "step_us=1000", *DEMO, "--store", str(tmp_path / "store.db"))
    with contextlib.closing(Service(*options)) as service:
        soak(service, draw)


def soak(service: Service, draw: random.Random) -> None:
    work, caller = Work(service), service.caller
    wanted = create(caller, {}, **BEGUN | {"background": False})
    alone = begun(caller, {})
    for _ in range(MOST_TURNS):
        create(caller, {}, conversation=alone["id"], **TURN)
    turns = texts(items_in(caller, alone, {}))[1::2]
    data = batches.long_lines(NUM_LINES)
    first = batches.begin(caller, data, "/v1/completions", {})
    lines = batches.texts(caller, batches.ended(caller, first["id"], {}))
    work.file = first["input_file_id"]
    for _ in range(ROUNDS):
        what, after = draw.choice(["frontend.http", "core", "all"]), draw.uniform(0, 0.6)
        killer = threading.Timer(after, service.kill, [what])
        killer.start()
        work.begin_round(draw)
        killer.join()
        work.end_round()
    check(work, wanted, lines, turns)
    print(
        f"{len(work.turns)} conversations with {sum(map(len, work.turns.values()))} turns ({len(work.unsure - {''})} "
        f"with one that was cut off), {len(work.responses)} responses, {len(work.batches)} batches, {service.kills}"
    )
