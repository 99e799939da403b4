"""Batch files in OpenAI's format: the input with one request a line, and the output with one answer a line.

An input line: `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. An output line:
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`, in the order of completion.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from frontend.http.wire.local_caller import LocalAnswer
from ipc.errors import ConfigError

#: Of requests for tokens, then of requests for vectors and scores.
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
)
MAX_LINE_BYTES = 8 << 20
_MAX_ID_CHARS = 512


class BatchRequest(msgspec.Struct):
    """One line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _BodyHead(msgspec.Struct):
    stream: bool | None = None


class _Done(msgspec.Struct):
    """The fields of an output line that matter when a batch continues."""

    custom_id: str
    response: dict[str, Any] | None = None


_request_decoder = msgspec.json.Decoder(BatchRequest)
_head_decoder = msgspec.json.Decoder(_BodyHead)
_done_decoder = msgspec.json.Decoder(_Done)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file; empty lines are skipped. Errors: ConfigError that names the line."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _read_line(line, f"{path}, line {number}")


def check_requests(path: Path) -> int:
    """Check a whole file, before anything runs; return the number of its requests. Errors: ConfigError."""
    seen: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in seen:
            raise ConfigError(f"{path}: the custom_id {request.custom_id!r:.80} appears twice")
        seen.add(request.custom_id)
    if not seen:
        raise ConfigError(f"{path} has no requests")
    return len(seen)


class BatchOutput:
    """An output file. When it is opened again, final answers are kept, and their requests are not sent again.

    final: any status except 408, 429 and 5xx, which another attempt may change. An incomplete line is dropped.
    num_failed: answers of 400 and above, including kept ones. Errors: ConfigError for a file that cannot be written, or
    is not the output of a batch.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        self.num_failed = 0
        try:
            self._keep_final(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, custom_id: str, answer: LocalAnswer) -> None:
        """Add an answer, as one write."""
        is_failed = answer.status >= 400
        self.num_failed += is_failed
        line = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": {
                "status_code": answer.status,
                "request_id": answer.headers.get(b"x-request-id", b"").decode(),
                "body": msgspec.Raw(answer.body),
            },
            "error": None,
        }
        data = msgspec.json.encode(line) + b"\n"
        num_written = self._file.write(data)
        if num_written != len(data):
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Close the file after everything is on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _keep_final(self, path: Path) -> None:
        """Read the existing answers, and rewrite the file if some of them are not final."""
        if not path.exists() or path.stat().st_size == 0:
            return
        kept_path = path.with_name(path.name + ".new")
        is_changed = False
        with open(path, "rb") as file, open(kept_path, "wb") as kept:
            for number, line in enumerate(file, 1):
                found = _final_answer(line, f"{path}, line {number}")
                if found is None or found[0] in self.done:
                    is_changed = True
                    continue
                self.done.add(found[0])
                self.num_failed += found[1] >= 400
                kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        if is_changed:
            os.replace(kept_path, path)
        else:
            kept_path.unlink()


def _final_answer(line: bytes, where: str) -> tuple[str, int] | None:
    """Return custom_id and status of a final answer; None for a request to send again."""
    try:
        done = _done_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if not line.endswith(b"\n"):
            return None  # the last line is incomplete
        raise ConfigError(f"{where}: this is not the output of a batch; name another file") from None
    status = (done.response or {}).get("status_code")
    if not isinstance(status, int) or status >= 500 or status in (408, 429) or not line.endswith(b"\n"):
        return None
    return done.custom_id, status


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _read_line(line: bytes, where: str) -> BatchRequest:
    try:
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{where}: {len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
        request = _request_decoder.decode(line)
        head = _head_decoder.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if not 0 < len(request.custom_id) <= _MAX_ID_CHARS:
        raise ConfigError(f"{where}: a custom_id has 1 to {_MAX_ID_CHARS} characters")
    if request.method != "POST" or request.url not in URLS:
        raise ConfigError(f"{where}: {request.method} {request.url!r:.80}; known: POST {', '.join(URLS)}")
    if head.stream:
        raise ConfigError(f"{where}: an answer in a file is not streamed; leave out stream")
    return request
