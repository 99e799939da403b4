"""A caller over HTTP: the standard library's client for whole answers, a socket for what is not proper HTTP."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from frontend.llm import LLM
from ipc.wire.sockets import PRIVATE_PREFIX

ROOT = Path(__file__).resolve().parents[3]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without [DONE], which must be the last."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]", lines[-1:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Caller:
    """Calls one server. `connect`: the address of its engine."""

    def __init__(self, port: int, connect: str, process: "subprocess.Popen[str]") -> None:
        self.port, self.connect, self.process = port, connect, process

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            fields = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**fields, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.call("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.call("POST", path, body, headers)

    def chat(self, text: str = "Hello", **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def raw(self, data: bytes) -> bytes:
        """What the server answers to these bytes, until it closes or is silent for a second."""
        with self.socket() as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(data)
            peer.settimeout(1.0)
            parts = []
            with contextlib.suppress(TimeoutError, ConnectionError):
                while part := peer.recv(65_536):
                    parts.append(part)
            return b"".join(parts)


def post_bytes(path: str, body: bytes, *fields: bytes) -> bytes:
    lines = (b"content-type: application/json", b"content-length: %d" % len(body), *fields)
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\n%b" % (path.encode(), b"\r\n".join(lines), body)


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def serving(*options: str, http: str | None = "127.0.0.1:0", scheme: str = "http") -> Iterator[Caller]:
    """A server in real processes: `engine-core serve --http`. It is drained at the end. http: None = options say it."""
    address = () if http is None else ("--http", http)
    process = subprocess.Popen(
        [sys.executable, "-m", "engine_core", "serve", *address, *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    ready = ""
    try:
        ready = process.stdout.readline()
        line = process.stdout.readline()
        where = "unix:" if http is None else f"{scheme}://127.0.0.1:"
        assert line.startswith(f"engine-core: HTTP at {where}"), ready + line + process.stderr.read()
        port = line.rsplit(":", 1)[1].strip()
        yield Caller(int(port) if port.isdigit() else 0, ready.split()[3], process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        if process.returncode < 0:
            _remove_left(ready)


def _remove_left(ready: str) -> None:
    """Remove the folder that a killed server leaves. Its engine, which ends too, removes files there at the same time.

    Otherwise a server that was not done in time would fail its test, and then all of the process by what it left.
    """
    if (found := re.search(rf"ipc://(\S+/{PRIVATE_PREFIX}\w+)/", ready)) is not None:
        while os.path.exists(found[1]):
            shutil.rmtree(found[1], ignore_errors=True)


def free_blocks(llm: LLM) -> int:
    """Blocks that are free or only cached."""
    return llm.statistics().num_free_blocks
