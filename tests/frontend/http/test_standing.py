"""What probes say and requests get, on new and kept connections: at the end, in a drain or pause, without an engine."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.http.caller import Caller, environment, serving, wait_for
from tools.cli import main

FAKE = (
    "--executor",
    "fake",
    "--executor-option",
    "vocab_size=1000",
    "--executor-option",
    "step_us=2000",
    "--executor-option",
    "max_model_len=100000",
)
STREAM = {"prompt": [1, 2], "stream": True, "ignore_eos": True, "return_token_ids": True}
PROBES = ("/health", "/ready", "/ping", "/live")


class Kept:
    """A connection that takes one request after the other."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ask(self, method: str, path: str, body: dict[str, object] | None = None) -> int:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        response = self._connection.getresponse()
        response.read()
        return response.status

    def close(self) -> None:
        self._connection.close()


def standing(port: int, kept: Kept) -> list[list[int]]:
    """The statuses of a request and of PROBES, on a new connection and on a kept one."""
    body = {"prompt": [1], "max_tokens": 1}
    found = []
    for one in (Kept(port), kept):
        found.append([one.ask("POST", "/v1/completions", body), *(one.ask("GET", path) for path in PROBES)])
        if one is not kept:
            one.close()
    return found


SERVES, REFUSES = [[200] * 5] * 2, [[503, 503, 503, 503, 200]] * 2


@contextlib.contextmanager
def streaming(caller: Caller, num_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", caller.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps({**STREAM, "max_tokens": num_tokens}))
        response = connection.getresponse()
        response.readline()
        yield response


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """An `engine-core` command, killed at the end."""
    arguments = [sys.executable, "-m", "engine_core", *command]
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        process.wait()


def line_of(process: "subprocess.Popen[str]", begin: str) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    while not (line := process.stdout.readline()).startswith(begin):
        assert line, process.stderr.read()
    return line.strip()


@pytest.mark.parametrize(("drain_s", "status"), [("60", 0), ("0.5", 143)])
def test_a_signal(drain_s: str, status: int) -> None:
    """Refused at once on all connections; the stream is whole, or its end and the status say that it was cut."""
    with running("serve", "--http", "127.0.0.1:0", *FAKE, "--drain-timeout", drain_s) as process:
        port = int(line_of(process, "engine-core: HTTP at").rpartition(":")[2])
        kept, caller = Kept(port), Caller(port, "", process)
        assert standing(port, kept) == SERVES
        with streaming(caller, 600 if status == 0 else 50_000) as response:
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: kept.ask("GET", "/ready") == 503)
            assert standing(port, kept) == REFUSES
            events = response.read().split(b"\n\n")
            assert events[-2] == b"data: [DONE]"
            assert (b'"error"' in events[-3]) is (status != 0)
        kept.close()
        assert process.wait(20) == status
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_worker_that_is_killed_in_a_drain_leaves_no_backlog() -> None:
    """The supervisor has the listening socket too, and the kernel would take connections that nobody accepts."""
    with running("serve", "--http", "127.0.0.1:0", *FAKE) as process:
        port = int(line_of(process, "engine-core: HTTP at").rpartition(":")[2])
        caller = Caller(port, "", process)
        with streaming(caller, 50_000):
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: caller.get("/ready").status == 503)
            os.kill(http_pid(process.pid), signal.SIGKILL)

            def is_refused() -> bool:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                except ConnectionError:
                    return True
                return False

            wait_for(is_refused, 5)
        assert process.wait(20) == 143


def http_pid(owner: int) -> int:
    """The process id of the HTTP process of `engine-core serve`."""
    children = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    return next(int(one) for one in children if "frontend.http" in Path(f"/proc/{one}/cmdline").read_text())


def control(word: str, caller: Caller, owner: Path, *options: str) -> None:
    assert main(["control", word, "--connect", caller.connect, "--owner-file", str(owner), *options]) == 0


def test_a_pause_and_a_drain(tmp_path: Path) -> None:
    """An engine that refuses everything, or begins nothing, is one that a proxy must not be led to."""
    owner = tmp_path / "owner"
    with running("serve", "--http", "127.0.0.1:0", *FAKE, "--owner-file", str(owner)) as process:
        ready = line_of(process, "engine-core: ready at")
        port = int(line_of(process, "engine-core: HTTP at").rpartition(":")[2])
        kept, caller = Kept(port), Caller(port, ready.split()[3], process)
        for mode in ("new", "all"):
            control("pause", caller, owner, "--mode", mode)
            wait_for(lambda: kept.ask("GET", "/ready") == 503)
            assert standing(port, kept) == REFUSES
            assert "paused" in caller.get("/health").json["error"]["message"]
            control("resume", caller, owner)
            wait_for(lambda: kept.ask("GET", "/ready") == 200)
            assert standing(port, kept) == SERVES
        with streaming(caller, 2000) as response:
            control("drain", caller, owner)
            wait_for(lambda: kept.ask("GET", "/ready") == 503)
            assert standing(port, kept) == REFUSES
            assert response.read().split(b"\n\n")[-2] == b"data: [DONE]"
        kept.close()
        assert process.wait(20) == 0


def test_a_server_comes_back_with_the_next_engine(tmp_path: Path) -> None:
    """After an orderly stop too: new and kept connections are served again, and nobody has to start it anew."""
    address = f"ipc://{tmp_path}/s"
    engine = ("serve", "--listen", address, *FAKE)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(*engine))
        line_of(first, "engine-core: ready at")
        server = stack.enter_context(running("http", "--connect", address, "--http", "127.0.0.1:0"))
        port = int(line_of(server, "engine-core: HTTP at").rpartition(":")[2])
        kept = Kept(port)
        assert standing(port, kept) == SERVES
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        wait_for(lambda: kept.ask("GET", "/ready") == 503)
        assert standing(port, kept) == REFUSES
        second = stack.enter_context(running(*engine))
        wait_for(lambda: kept.ask("GET", "/ready") == 200)
        assert standing(port, kept) == SERVES
        kept.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None
        news = server.stderr.read()
        assert (news.count("is gone"), news.count("served again")) == (1, 1)
        second.send_signal(signal.SIGTERM)
        second.wait(20)


@pytest.mark.soak
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_server_comes_back_with_its_router(end: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/r"
    router = ("route", "--listen", address, "--replica", f"ipc://{tmp_path}/s")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running("serve", "--listen", f"ipc://{tmp_path}/s", *FAKE))
        line_of(engine, "engine-core: ready at")
        first = stack.enter_context(running(*router))
        server = stack.enter_context(running("http", "--connect", address, "--http", "127.0.0.1:0"))
        port = int(line_of(server, "engine-core: HTTP at").rpartition(":")[2])
        kept = Kept(port)
        assert standing(port, kept) == SERVES
        first.send_signal(signal.Signals[end])
        first.wait(20)
        wait_for(lambda: kept.ask("GET", "/ready") == 503)
        assert standing(port, kept) == REFUSES
        stack.enter_context(running(*router))
        wait_for(lambda: kept.ask("GET", "/ready") == 200)
        assert standing(port, kept) == SERVES
        kept.close()


@pytest.mark.soak
def test_a_server_comes_back_after_control_shutdown(tmp_path: Path) -> None:
    address, owner = f"ipc://{tmp_path}/s", f"{tmp_path}/owner"
    engine = ("serve", "--listen", address, "--owner-file", owner, *FAKE)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(*engine))
        line_of(first, "engine-core: ready at")
        server = stack.enter_context(running("http", "--connect", address, "--http", "127.0.0.1:0"))
        port = int(line_of(server, "engine-core: HTTP at").rpartition(":")[2])
        kept = Kept(port)
        assert main(["control", "shutdown", "--connect", address, "--owner-file", owner]) == 0
        first.wait(20)
        wait_for(lambda: kept.ask("GET", "/ready") == 503)
        assert standing(port, kept) == REFUSES
        stack.enter_context(running(*engine))
        wait_for(lambda: kept.ask("GET", "/ready") == 200)
        assert standing(port, kept) == SERVES
        kept.close()


def test_a_server_of_its_own_says_that_it_cut_answers() -> None:
    with serving(*FAKE) as caller:
        command = ("http", "--connect", caller.connect, "--http", "127.0.0.1:0", "--drain-timeout", "0.3")
        with running(*command) as server:
            port = int(line_of(server, "engine-core: HTTP at").rpartition(":")[2])
            with streaming(Caller(port, "", server), 50_000) as response:
                server.send_signal(signal.SIGTERM)
                assert b'"error"' in response.read()
            assert server.wait(20) == 143
