"""Streams of the fault matrix over HTTP: a connection each, read by one thread, and what each must be."""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.frontend.engine.fault_service import (
    LONGER,
    NUM_STREAMS,
    PATIENCE_S,
    POISON_TOKEN,
    PROMPT,
    SHORTEST,
    Streams,
)
from tests.frontend.engine.supervised import undisturbed

_WHOLE = 8  # every eighth answer is not streamed


class HttpStreams(Streams):
    """The streams of callers of one server; `client` is for looking at the engine alone."""

    def __init__(self, address: str, port: int, count: int = NUM_STREAMS) -> None:
        super().__init__(address)
        self._port, self._count = port, count
        self._received = [bytearray() for _ in range(count)]
        self._open = set(range(count))
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    def submit(self) -> None:
        """Send all requests."""
        selector = selectors.DefaultSelector()
        for index in range(self._count):
            peer = self._send(self.prompts[index].tolist(), SHORTEST + LONGER * index, is_streamed=_is_streamed(index))
            selector.register(peer, selectors.EVENT_READ, index)
        self._threads.append(threading.Thread(target=self._read, args=(selector,)))
        self._threads[-1].start()

    def submit_poison(self) -> None:
        """Send the request that does harm; nobody reads its answer."""
        peer = self._send([POISON_TOKEN] + [7] * (PROMPT - 1), 200, is_streamed=False)
        self._threads.append(threading.Thread(target=_drain, args=(peer,)))
        self._threads[-1].start()

    def _send(self, prompt: list[int], length: int, *, is_streamed: bool) -> socket.socket:
        """Send a request on a connection of its own, as soon as somebody listens."""
        fields = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "seed": 0}
        body = json.dumps({"prompt": prompt, "stream": is_streamed, **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json"
        peer = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S)
        peer.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        return peer

    def _read(self, selector: selectors.BaseSelector) -> None:
        while self._open and not self._is_closing:
            for key, _ in selector.select(0.1):
                peer, index = key.fileobj, key.data
                assert isinstance(peer, socket.socket)
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = peer.recv(65_536)
                self._received[index] += data
                if not data:
                    selector.unregister(peer)
                    peer.close()
                    self._open.discard(index)
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        selector.close()

    def wait_for(self, is_reached: Callable[[list[int], int], bool]) -> None:
        """As of Streams: by the tokens of what is streamed, and of the rest only the ends."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._open:
            lengths = [self._received[index].count(b"data: ") for index in range(self._count) if _is_streamed(index)]
            if is_reached(lengths, self._count - len(self._open)):
                return
            time.sleep(0.002)

    def wait_until_read(self) -> None:
        """Wait until the engine has all requests, which takes the server a while."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            now = self.client.statistics()
            if now.num_running + now.num_waiting + now.num_finished >= self._count:
                return

    def finish(self) -> None:
        """Wait for all ends."""
        end = time.monotonic() + PATIENCE_S
        while self._open:
            assert time.monotonic() < end, f"{len(self._open)} streams hang"
            time.sleep(0.01)

    def check(self, kind: str) -> None:
        """Compare each with its golden one; "told": as far as it came, also if it was cut."""
        golden = undisturbed(self.prompts, SHORTEST + LONGER * NUM_STREAMS)
        for index, received in enumerate(self._received):
            tokens, end = _tokens(bytes(received), is_streamed=_is_streamed(index))
            assert tokens == golden[index, : len(tokens)].tolist(), f"stream {index} has other tokens"
            if kind == "exact":
                assert end == "length", f"stream {index} ended by {end}"
                assert len(tokens) == SHORTEST + LONGER * index, f"stream {index}: {len(tokens)} tokens"

    def ask_again(self) -> None:
        """Ask for one answer more, which must be right, though a server that starts again may cut it before."""
        end, golden = time.monotonic() + PATIENCE_S, undisturbed(self.prompts[:1], 8)[0].tolist()
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                data = _drain(self._send(self.prompts[0].tolist(), 8, is_streamed=False))
                if data:
                    assert _tokens(data, is_streamed=False) == (golden, "length"), data
                    return
            time.sleep(0.05)
        raise AssertionError("the server does not answer again")

    def close(self) -> None:
        """Leave."""
        self._is_closing = True
        for thread in self._threads:
            thread.join()
        self.client.close()


def _is_streamed(index: int) -> bool:
    return index % _WHOLE != _WHOLE - 1


def _drain(peer: socket.socket) -> bytes:
    """Return all that comes until the end."""
    parts = []
    with peer, contextlib.suppress(OSError):
        while part := peer.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def _tokens(received: bytes, *, is_streamed: bool) -> tuple[list[int], str]:
    """Return the tokens of an answer, as far as it came, and why it ended."""
    _, _, body = received.partition(b"\r\n\r\n")
    if not is_streamed:
        answers = [json.loads(body)] if body else []
    else:
        answers = [json.loads(line[6:]) for line in _events(body)]
    tokens: list[int] = []
    reason = "cut"
    for answer in answers:
        if "error" in answer:
            return tokens, answer["error"]["message"]
        choice: dict[str, Any] = answer["choices"][0]
        tokens += choice["token_ids"] or []
        reason = choice["finish_reason"] or reason
    return tokens, reason


def _events(body: bytes) -> list[bytes]:
    """Return the lines of events of a chunked body; an incomplete last one is left out."""
    text = bytearray()
    while b"\r\n" in body:
        size, _, rest = body.partition(b"\r\n")
        if len(rest) < int(size, 16):
            break
        text += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    lines = bytes(text).split(b"\n\n")[:-1]
    return [line for line in lines if line.startswith(b"data: {")]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
