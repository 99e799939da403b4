"""Batch files: the answers are those of HTTP, an output file that was cut goes on, and wrong lines are named."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.http.openai import batch
from frontend.http.openai.batch_files import BatchOutput, check_requests
from frontend.http.openai.batch_lines import BatchRequest
from frontend.http.request import LocalAnswer
from ipc.errors import ConfigError
from tests.frontend.http.caller import ROOT, Caller, environment

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body or CHAT}
    return json.dumps(fields) + "\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_core", "batch", *arguments]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in lines)
    found = {one["custom_id"]: one["response"] for one in lines}
    assert len(found) == len(lines)
    return found


def test_a_batch_is_answered_as_over_http_and_goes_on_where_it_ended(served: Caller, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl"
    requests = [line(f"chat-{index}", **{**CHAT, "max_tokens": index + 1}) for index in range(20)]
    requests.append(line("text", "/v1/completions", prompt="Once", max_tokens=4, temperature=0))
    requests.append(line("response", "/v1/responses", input="Hi", max_output_tokens=4, temperature=0))
    requests.append(
        line("message", "/v1/messages", model="demo", max_tokens=4, temperature=0, messages=CHAT["messages"])
    )
    pooled = {
        "/v1/embeddings": {"input": ["Why?", "Name three."], "dimensions": 4},
        "/v1/score": {"text_1": "Why?", "text_2": ["Because.", "Never."]},
        "/v1/rerank": {"query": "Why?", "documents": ["Because.", "Never."], "top_n": 1},
    }
    requests += [line(url, url, **body) for url, body in pooled.items()]
    requests.append(line("bad", **{**CHAT, "temperature": -1}))
    source.write_text("\n".join(requests))  # with empty lines
    options = (str(source), "--connect", served.connect, "--served-model-name", "demo")
    first = run(*options, "--max-in-flight", "3")
    assert first.returncode == 1, first.stderr
    assert "27 answered in" in first.stderr
    assert "1 failed" in first.stderr
    answers = read(target)
    assert len(answers) == 27
    assert (answers["bad"]["status_code"], answers["bad"]["body"]["error"]["param"]) == (400, "temperature")
    for custom_id, answer in answers.items():
        assert (answer["status_code"] == 200) is (custom_id != "bad"), answer
        assert answer["request_id"]
    over_http = served.chat(**{name: CHAT[name] for name in ("max_tokens", "temperature")}).json["choices"]
    assert answers["chat-7"]["body"]["choices"] == over_http
    for url, body in pooled.items():
        assert without_ids(answers[url]) == without_ids({"body": served.post(url, body).json})
    # Killed: a cut last line, one answer that another attempt may change, and the rest missing.
    lines = target.read_bytes().splitlines(keepends=True)
    failed = json.loads(lines[3])
    failed["response"]["status_code"] = 503
    target.write_bytes(b"".join([*lines[:3], json.dumps(failed).encode() + b"\n", *lines[4:10], lines[10][:50]]))
    second = run(*options)
    assert "18 answered in" in second.stderr
    assert "9 were already there" in second.stderr
    again = read(target)
    shown = {name: without_ids(answer) for name, answer in answers.items()}
    assert {name: without_ids(answer) for name, answer in again.items()} == shown
    third = run(str(source))
    assert "0 answered in" in third.stderr  # all is there: no engine is started
    assert "1 failed" in third.stderr
    assert third.returncode == 1


def without_ids(answer: Any) -> Any:
    drops = ("id", "created", "created_at", "request_id", "usage", "output")
    return {k: v for k, v in answer["body"].items() if k not in drops}


def test_an_engine_that_refuses_everything_ends_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's: one request is refused for ever, while another is answered after 20 minutes."""
    clock, long_s = [0.0], 1200.0

    class Answers:
        async def post(self, path: str, body: bytes) -> LocalAnswer:
            if body != b"long":
                return LocalAnswer(503, {}, b"full")
            while clock[0] < long_s:
                await asyncio.sleep(0)
            return LocalAnswer(200, {}, b"")

    class Time:
        monotonic = staticmethod(lambda: clock[0])

    async def pause(seconds: float) -> None:
        clock[0] += seconds
        await asyncio.sleep(0)

    class Loop:
        CancelledError, sleep = asyncio.CancelledError, staticmethod(pause)

    monkeypatch.setattr(batch, "time", Time)
    monkeypatch.setattr(batch, "asyncio", Loop)
    engine: Any = SimpleNamespace(client=SimpleNamespace(error=None))
    answers: Any = Answers()

    async def ask_both() -> tuple[LocalAnswer, LocalAnswer, float]:
        asker = batch.Asker(engine, answers)
        long = asyncio.create_task(asker.ask(BatchRequest("a", "/", msgspec.Raw(b"long"))))
        await asyncio.sleep(0)
        refused = await asker.ask(BatchRequest("b", "/", msgspec.Raw(b"{}")))
        ended_at = clock[0]
        return await long, refused, ended_at

    answered, refused, ended_at = asyncio.run(ask_both())
    assert (answered.status, refused.status, refused.body) == (200, 503, b"full")
    assert long_s + 600 < ended_at < long_s + 620, "the engine worked on the long one until then"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{}\n", "line 1: .*custom_id"),
        (line("a") + "\n" + line("a"), "'a' appears twice"),
        (line("a") + line("b", "/v1/models"), "line 2: POST '/v1/models'"),
        (line("a", stream=True), "not streamed"),
        (line("a")[:30], "line 1: "),
        (line(""), "custom_id has 1 to 512 characters"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 5}\n', "line 1: Expected `object`"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_requests(source)


def test_another_file_is_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("my notes\nmore of them\n")
    with pytest.raises(ConfigError, match="line 1: this is not the output of a batch"):
        BatchOutput(target)
    assert target.read_text() == "my notes\nmore of them\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        BatchOutput(tmp_path / "none" / "out.jsonl")


def test_failures_that_are_final_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    for _ in range(2):
        output = BatchOutput(target)
        for custom_id, status in (("a", 200), ("b", 400), ("c", 429), ("d", 500)):
            if custom_id not in output.done:
                output.write(custom_id, LocalAnswer(status, {}, b"{}"))
        output.close()
    assert [json.loads(one)["custom_id"] for one in target.read_text().splitlines()] == ["a", "b", "c", "d"]
    output = BatchOutput(target)
    output.close()
    assert output.done == {"a", "b"}
    assert output.num_failed == 1, "the exit status of another run counts b"
    assert list(tmp_path.iterdir()) == [target]
