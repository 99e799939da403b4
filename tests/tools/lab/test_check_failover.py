"""`engine-core check-failover`: what a service loses, doubles, changes or delays on purpose is found; ours holds."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import serving
from tests.frontend.http.conftest import FAKE
from tests.placed import PREFIX
from tools.cli import main
from tools.lab.check_failover.__main__ import EXIT_BROKEN, EXIT_HELD, EXIT_NOT_JUDGED, Cell, Stream, conclusion
from tools.lab.check_failover.calls import Call, Received, Request, Service, wait_until_back
from tools.lab.check_failover.verdict import Verdict, judge, longest_pause

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "went", "home", "again", "to", "sleep", "now"]
PIECE_S = 0.01
HURT_S = 0.4  # the pause that the fake service makes


class Fake(ThreadingHTTPServer):
    """A service whose answers are WORDS, a piece each. Once the file `killed` is there, it does harm.

    num_undisturbed: answers that are not killed; the others wait in the middle until they are.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, killed: Path, harm: str, num_undisturbed: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.killed, self.harm = killed, harm
        self.numbers, self.num_undisturbed, self.is_over = count(1), num_undisturbed, threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_request(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer_json({"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.number = next(self.server.numbers)
        if self.server.harm == "escapes":
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"\x1b[2J")
            return
        with contextlib.suppress(ConnectionError):
            if body["max_tokens"] == 1:  # the probe
                self.answer_json(self.choice("the", "length"))
            elif body["stream"]:
                self.stream()
            else:
                self.whole()

    def wait_until_killed(self) -> None:
        end = time.monotonic() + 20
        while self.number > self.server.num_undisturbed and not self.server.killed.exists() and time.monotonic() < end:
            threading.Event().wait(PIECE_S)

    def whole(self) -> None:
        for _ in WORDS:
            threading.Event().wait(PIECE_S)
        self.wait_until_killed()
        is_hurt = self.server.killed.exists()
        if is_hurt and self.server.harm in ("lost", "ends early"):
            self.close_connection = True
            return
        words = self.server.harm == "different" and is_hurt
        text = "".join(["other " * len(WORDS)] if words else [f"{word} " for word in WORDS])
        self.answer_json(self.choice(text, "length"))

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        words, harm = list(WORDS), self.server.harm
        if harm == "hangs":
            self.event(self.choice("the ", None))
            self.server.is_over.wait(20)
            return
        while words:
            threading.Event().wait(PIECE_S)
            if len(words) == len(WORDS) // 3:
                self.wait_until_killed()
            if harm and self.server.killed.exists():
                harm = self.hurt(harm, words)
            if words:
                self.event(self.choice(f"{words.pop(0)} ", None))
        if harm != "cut":
            self.event(self.choice("", "length"))
            self.wfile.write(b"data: [DONE]\n\n")

    def hurt(self, harm: str, words: list[str]) -> str:
        if harm == "lost":
            words.clear()
            return "cut"
        if harm == "error":
            self.event({"error": {"message": "the engine died"}})
            words.clear()
            return "cut"
        if harm == "gap":
            del words[:2]
        if harm == "ends early":
            words.clear()
        if harm == "doubled":
            words[:] = WORDS
        if harm == "different":
            words[:] = ["other"] * len(words)
        if harm == "paused":
            threading.Event().wait(HURT_S)
        return ""

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        part = {"text": text} if self.path == "/v1/completions" else {"delta": {"content": text}}
        if self.server.harm == "unsteady" or (self.server.harm == "third" and self.number == 3):
            part = {"text": f"{text}{self.number}"}
        return {"choices": [{**part, "finish_reason": finish}]}

    def event(self, answer: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

    def answer_json(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def faking(killed: Path, harm: str, num_undisturbed: int = 1000) -> Iterator[Fake]:
    with Fake(killed, harm, num_undisturbed) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()


def check(url: str, kill: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    """-> exit status, what --json printed."""
    words = ["check-failover", "--url", url, "--kill", kill, "--patience", "20", "--prompt-words", "3", *options]
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("harm", "verdict"),
    [
        ("lost", "lost"),
        ("error", "lost"),
        ("gap", "lost"),
        ("ends early", "lost"),
        ("doubled", "doubled"),
        ("different", "different"),
    ],
)
def test_harm_is_found(harm: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = tmp_path / "killed"
    with faking(killed, harm, 8) as server:
        options = "--moments", "mid", "--requests", "4"
        status, found = check(server.url, f"touch {shlex.quote(str(killed))}", capsys, *options)
    undisturbed, mid = found["cells"]
    assert {one["verdict"] for one in undisturbed["streams"]} == {"exact"}
    streamed = [one["verdict"] for one in mid["streams"] if " streamed " in one["request"]]
    assert (status, found["held"], streamed) == (EXIT_BROKEN, False, [verdict] * 2), found
    whole = [one["verdict"] for one in mid["streams"] if " whole " in one["request"]]
    assert (
        whole
        == [{"ends early": "lost"}.get(harm, harm) if harm in ("lost", "ends early", "different") else "exact"] * 2
    )
    assert mid["num_open"] == 4
    assert mid["back_s"] < 10


def test_a_pause_is_found_and_may_be_forbidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = tmp_path / "killed"
    kill = f"touch {shlex.quote(str(killed))}"
    with faking(killed, "paused", 4) as server:
        status, found = check(server.url, kill, capsys, "--moments", "early", "--requests", "2", "--apis", "chat")
    assert status == EXIT_HELD, found
    assert found["cells"][1]["streams"][0]["pause_s"] > HURT_S - PIECE_S
    killed.unlink()
    with faking(killed, "paused", 2) as server:
        options = "--moments", "early", "--requests", "1", "--max-pause", str(HURT_S / 2)
        status, found = check(server.url, kill, capsys, *options)
    assert status == EXIT_BROKEN
    assert found["reasons"][0].startswith("early: a stream paused for ")


def test_a_service_of_many_answers_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = tmp_path / "killed"
    with faking(killed, "unsteady", 4) as server:
        options = "--kill", f"touch {shlex.quote(str(killed))}", "--requests", "2", "--apis", "completions"
        assert main(["check-failover", "--url", server.url, "--moments", "mid", *options]) == EXIT_NOT_JUDGED
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{server.url}, model 'fake': 2 requests at once"
    assert printed[2].split()[:7] == ["not", "killed", "0", "0", "0", "0", "2"]
    assert printed[-1] == "not judged: undisturbed: 2 of 2 answers are not those that they are alone"


def test_what_is_seldom_another_answer_takes_more_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its third answer is another one: that to the second run with all at once."""
    options = "--moments", "mid", "--requests", "1", "--apis", "completions"
    with faking(tmp_path / "killed", "third") as server:
        status, found = check(server.url, "true", capsys, *options)
        assert (status, found["cells"][1]["streams"][0]["verdict"]) == (EXIT_BROKEN, "different")
    with faking(tmp_path / "killed", "third") as server:
        status, found = check(server.url, "true", capsys, *options, "--undisturbed", "2")
    assert status == EXIT_NOT_JUDGED
    assert [cell["streams"][0]["verdict"] for cell in found["cells"]] == ["unsteady", "exact"]


def test_what_cannot_be_checked_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faking(tmp_path / "killed", "") as server:
        options = "--moments", "mid", "--requests", "1"
        assert main(["check-failover", "--url", server.url, "--kill", "exit 3", *options]) == 1
        assert "the kill command ended with status 3" in capsys.readouterr().err
    assert main(["check-failover", "--url", server.url, "--kill", "true"]) == 1
    assert "/v1/models lists no model" in capsys.readouterr().err
    assert main(["check-failover", "--url", "ftp://x", "--kill", "true"]) == 1
    assert "--url must be like" in capsys.readouterr().err
    for wrong in (("--extra", "[]"), ("--patience", "nan"), ("--patience", "inf"), ("--max-pause", "nan")):
        with pytest.raises(SystemExit):
            main(["check-failover", "--url", server.url, "--kill", "true", *wrong])
    capsys.readouterr()
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nx: y")
    assert main(["check-failover", "--url", server.url, "--kill", "true"]) == 1
    assert "secret" not in capsys.readouterr().err


def test_what_is_not_back(tmp_path: Path) -> None:
    with faking(tmp_path / "killed", "") as server:
        service = Service(server.url)
    assert wait_until_back(service, Request("chat", False, False, {}), 0.1) is None
    held = Stream("chat", "exact", 0, 0, "", 0.1)
    cells = [Cell("undisturbed", 0, 0.0, [held]), Cell("mid", 0, None, [held])]
    assert conclusion(cells, None) == (
        EXIT_BROKEN,
        ["mid: the service is not back", "mid: nothing was in flight when it was killed: ask for more --tokens"],
    )


def received(text: str, finish: str = "stop", error: str = "") -> Received:
    return Received(text, finish, error, 0.0, [1.0, 2.0, 5.0], 5.5)


@pytest.mark.parametrize(
    ("text", "finish", "verdict"),
    [
        ("abcdefgh", "stop", Verdict("exact")),
        ("abcdefgh", "length", Verdict("different", 8, 0, "it ended by 'length', and undisturbed by 'stop'")),
        ("abc", "", Verdict("lost", 3, 5, "it ended without a finish_reason")),
        ("abX", "", Verdict("different", 2, 0, "and then it ended without a finish_reason")),
        ("abc", "stop", Verdict("lost", 3, 5, "though it ended as if it were whole")),
        ("abcgh", "stop", Verdict("lost", 3, 3, "in the middle")),
        ("gh", "stop", Verdict("lost", 0, 6, "in the middle")),
        ("abcabcdefgh", "stop", Verdict("doubled", 3, 3)),
        ("abcdcdefgh", "stop", Verdict("doubled", 4, 2)),
        ("abcdefghgh", "stop", Verdict("doubled", 8, 2)),
        ("abcXYdefgh", "stop", Verdict("different", 3)),
        ("abcdefghX", "stop", Verdict("different", 8)),
        ("Xbcdefgh", "stop", Verdict("different", 0)),
        ("", "stop", Verdict("lost", 0, 8, "though it ended as if it were whole")),
    ],
)
def test_judge(text: str, finish: str, verdict: Verdict) -> None:
    assert judge(received(text, finish), received("abcdefgh")) == verdict


def test_judge_what_is_unsteady() -> None:
    whole = received("abcdefgh")
    assert judge(received("abX"), whole, is_steady=False) == Verdict("unsteady", 2)
    assert judge(received("abX", "", "cut"), whole, is_steady=False) == Verdict("lost", 3, 5, "cut")


def test_pauses() -> None:
    got = received("abc")
    assert longest_pause(got, 1.5, 5.0) == 3.0
    assert longest_pause(got, 4.0, 5.0) == 1.0
    assert longest_pause(got, 6.0, 5.0) == 0.0
    assert longest_pause(received("abc", ""), 1.5, 5.0) is None
    whole = received("abc")._replace(times=[9.0], end=9.0)
    assert longest_pause(whole, 1.5, 5.5) == 3.5
    assert longest_pause(whole, 9.5, 5.5) == 0.0


def test_what_a_service_says_cannot_control_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with faking(tmp_path / "killed", "escapes") as server:
        assert main(["check-failover", "--url", server.url, "--kill", "true", "--requests", "1"]) == 1
    text = capsys.readouterr().err
    assert "\x1b" not in text
    assert r"status 500: '\x1b[2J" in text


def test_answers_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PREFIX}tools.lab.check_failover.calls._MAX_ANSWER_BYTES", 100)
    with faking(tmp_path / "killed", "") as server:
        assert main(["check-failover", "--url", server.url, "--kill", "true", "--requests", "1"]) == 1
    assert "or the answer is too long" in capsys.readouterr().err


def test_a_stream_that_hangs_is_given_up(tmp_path: Path) -> None:
    with faking(tmp_path / "killed", "hangs") as server:
        request = Request("chat", True, False, {"stream": True, "max_tokens": 9})
        got = Call(Service(server.url), request, 30.0, lambda: None).join(time.monotonic() + 0.2)
    assert (got.text, got.finish, got.error) == ("the ", "", "it did not end in time")
    assert judge(got, received("the end")) == Verdict("lost", 4, 3, "it did not end in time")


def children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in found for child in each]


def test_an_engine_that_is_killed_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(*FAKE, "--executor-option", "step_us=3000", "-m", str(resolve_model(None))) as caller:
        (engine,) = (
            pid
            for pid in children(caller.process.pid)
            if f"-m\0{PREFIX}core".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        kill = f"kill -9 {engine}"
        status, found = check(f"http://127.0.0.1:{caller.port}", kill, capsys, "--moments", "mid", "--tokens", "128")
    assert (status, found["reasons"]) == (EXIT_HELD, []), found
    assert [one["verdict"] for one in found["cells"][1]["streams"]] == ["exact"] * 8
