"""All campaigns at once, beside honest callers whose greedy answers are compared with those of a quiet server.

`make soak` runs it for 20 s; HOSTILE_SOAK_S=1800 makes it half an hour. `pytest -s` shows its table.
"""

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import ROOT, Caller, environment, serving
from tests.frontend.http.callers.test_access import bearer, line
from tests.hostile.campaign import HOSTILE_KEYS, SPENT_KEY
from tests.hostile.work.test_witness import MAX_MEMORY_MIB, http_pid, memory_mib, peak_mib

SECONDS = float(os.environ.get("HOSTILE_SOAK_S", "20"))
#: Seconds in which the memory goes back, and how much may stay.
BACK_S, MAX_LEFT_MIB = 30.0, 64
NUM_HONEST, MAX_TOKENS = 12, 24
WORDS = ("sky", "sea", "moon", "bread", "train", "clock", "tree", "river", "stone", "music", "winter", "letter")
#: As the docs advise where one caller may flood others: with a policy that is fair to tenants.
MODEL = (
    *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--scheduling-policy", "fair"),
    *("--served-model-name", "demo"),
)


class Question(NamedTuple):
    """A request of an honest caller."""

    path: str
    body: dict[str, Any]


def questions() -> list[Question]:
    """Chats and completions, half of them streamed; the answers are greedy, so they are always the same."""
    found = []
    for index, word in enumerate(WORDS):
        same = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": index % 2 == 0}
        chat = {"messages": [{"role": "user", "content": f"Say two things about the {word}."}]}
        found.append(Question("/v1/chat/completions", chat | same))
        found.append(Question("/v1/completions", {"prompt": f"The {word} is a thing that"} | same))
    return found


class Honest:
    """An honest caller: it asks one question after another, again after a 503, and compares the answers.

    gaps, firsts: seconds between two events with text of its streams, and until the first.
    """

    def __init__(self, port: int, key: str, golden: list[str]) -> None:
        self.counts = Counter[str]()
        self.gaps, self.firsts = list[float](), list[float]()
        self.wrong = list[tuple[Question, str, str]]()
        self._port, self._key, self._golden = port, key, golden

    def run(self, first: int, stop: threading.Event) -> None:
        """Ask until `stop`, which lets the last answer be complete."""
        asked = questions()
        for index in itertools.count(first):
            question, golden = asked[index % len(asked)], self._golden[index % len(asked)]
            if stop.is_set():
                return
            try:
                status, text = self.ask(question)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts["cut"] += 1
                self.wrong.append((question, golden, repr(error)))
                continue
            if status == 503:
                self.counts["asked to wait"] += 1
                stop.wait(1)
            elif status == 200:
                self.counts["compared"] += 1
                if text != golden:
                    self.counts["wrong"] += 1
                    self.wrong.append((question, golden, text))
            else:
                self.counts[f"status {status}"] += 1
                self.wrong.append((question, golden, text))

    def ask(self, question: Question) -> tuple[int, str]:
        """Return the status and the text of an answer. Errors: ValueError for a stream without its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            data = json.dumps(question.body).encode()
            begin = time.monotonic()
            connection.request("POST", question.path, data, {"content-type": "application/json", **bearer(self._key)})
            answer = connection.getresponse()
            if answer.status != 200 or not question.body["stream"]:
                body = json.loads(answer.read())
                return answer.status, _text(body) if answer.status == 200 else str(body)
            return 200, self._read_stream(answer, begin)
        finally:
            connection.close()

    def _read_stream(self, answer: http.client.HTTPResponse, begin: float) -> str:
        last, parts = begin, list[str]()
        while event := answer.readline():
            if not event.startswith(b"data: "):
                continue
            if event == b"data: [DONE]\n":
                return "".join(parts)
            if text := _text(json.loads(event.removeprefix(b"data: "))):
                now = time.monotonic()
                (self.gaps if parts else self.firsts).append(now - last)
                last = now
                parts.append(text)
        raise ValueError(f"a stream ended after {len(parts)} events")


def _text(body: dict[str, Any]) -> str:
    """The text of an answer, or of an event. Errors: ValueError for an error in the middle of a stream."""
    if "choices" not in body:
        raise ValueError(f"no answer: {body}")
    choice = body["choices"][0]
    found: str = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content") or ""
    return found


class Health:
    """/health every 20 ms; times: seconds."""

    def __init__(self, port: int) -> None:
        self.times = list[float]()
        self._port = port

    def run(self, stop: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not stop.wait(0.02):
            begin = time.monotonic()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            self.times.append(time.monotonic() - begin)
        connection.close()


def harm(port: int, seconds: float) -> dict[str, dict[str, int]]:
    """Let the hostile callers do all they can for a while; return the outcomes by kind."""
    program = [sys.executable, "-m", "tests.hostile.campaign", str(port), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, cwd=ROOT, env=environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.wait(seconds + 60)
            found: dict[str, dict[str, int]] = json.loads(process.stdout.read())
            return found
        finally:
            process.kill()


def table(outcomes: dict[str, dict[str, int]], callers: list[Honest], health: Health, memory: list[int]) -> str:
    """What happened, as text."""
    counts = sum((one.counts for one in callers), Counter[str]())
    lines = [f"{sum(sum(one.values()) for one in outcomes.values())} harms in {SECONDS:g} s"]
    for kind, outcome in sorted(outcomes.items()):
        lines.append(f"  {kind:32}" + ", ".join(f"{what}: {count}" for what, count in sorted(outcome.items())))
    lines.append("honest answers: " + ", ".join(f"{what}: {counts[what]}" for what in ("compared", "wrong", "cut")))
    lines += [f"  {what}: {count}" for what, count in counts.items() if what not in ("compared", "wrong", "cut")]
    for name, times in (
        ("between two events", [each for one in callers for each in one.gaps]),
        ("to the first event", [each for one in callers for each in one.firsts]),
        ("/health", health.times),
    ):
        ordered = sorted(times) or [0.0]
        at = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1)]
        lines.append(f"  {name:32}p50 {at[0] * 1e3:.0f}, p99 {at[1] * 1e3:.0f}, longest {at[2] * 1e3:.0f} ms")
    lines.append("memory of the HTTP process: {} MiB at the start, {} at most, {} after {:g} s".format(*memory, BACK_S))
    return "\n".join(lines)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_all_at_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    honest = [f"honest{index}" for index in range(NUM_HONEST)]
    keys.write_text(
        "".join(line(name, name) for name in (*honest, *HOSTILE_KEYS)) + line(SPENT_KEY, SPENT_KEY, "rpm=1")
    )
    with serving("-m", str(resolve_model(None)), *MODEL, "--api-key-file", str(keys)) as caller:
        golden = [Honest(caller.port, honest[0], []).ask(one)[1] for one in questions()]
        assert all(golden)
        outcomes, callers, health, memory = run_all(caller, honest, golden)
    print(f"\n{table(outcomes, callers, health, memory)}")
    counts = sum((one.counts for one in callers), Counter[str]())
    assert [each for one in callers for each in one.wrong] == []
    assert counts["compared"] >= NUM_HONEST
    assert [
        kind for kind in ("slow head", "slow body", "hoard", "flood", "deaf", "leave") if kind not in outcomes
    ] == []
    statuses = {what for outcome in outcomes.values() for what in outcome}
    assert [what for what in statuses if what[0] == "5" and what not in ("501", "503")] == []
    assert memory[1] < MAX_MEMORY_MIB
    assert memory[2] < memory[0] + MAX_LEFT_MIB


def run_all(
    caller: Caller, keys: list[str], golden: list[str]
) -> tuple[dict[str, dict[str, int]], list[Honest], Health, list[int]]:
    """Run hostile and honest callers at once; return the outcomes, and the memory before, at most and at the end."""
    pid, stop = http_pid(caller), threading.Event()
    memory = [memory_mib(pid)]
    callers = [Honest(caller.port, key, golden) for key in keys]
    health = Health(caller.port)
    threads = [threading.Thread(target=one.run, args=(2 * index, stop)) for index, one in enumerate(callers)]
    threads.append(threading.Thread(target=health.run, args=(stop,)))
    for thread in threads:
        thread.start()
    try:
        outcomes = harm(caller.port, SECONDS)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    memory.append(peak_mib(pid))
    time.sleep(BACK_S)
    assert http_pid(caller) == pid  # it was not started again
    return outcomes, callers, health, [*memory, memory_mib(pid)]
