"""Batch files: the input, which is checked and read, and the output, to which answers are added as they come."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from frontend.http.openai.batch_lines import BatchRequest, answer_line, read_line, response_of
from frontend.http.request import LocalAnswer
from ipc.errors import ConfigError


class _Done(msgspec.Struct):
    """The fields of an output line that matter when a batch continues."""

    custom_id: str
    response: dict[str, Any] | None = None


_done_decoder = msgspec.json.Decoder(_Done)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file; empty lines are skipped. Errors: ConfigError that names the line."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield read_line(line)
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None


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
        request_id = answer.headers.get(b"x-request-id", b"").decode()
        response = response_of(answer.status, request_id, answer.body)
        data = answer_line(f"batch_req_{secrets.token_hex(12)}", custom_id, response)
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
