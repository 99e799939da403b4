"""Traffic: what a recording proxy writes: a JSON line for each exchange with a server, without its content by default.

The first line names the format. Times are milliseconds; arrivals count from the start of the recording. A count of
tokens is what the server said; without one, the bytes of the text and the events of the stream are all that is known.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from ipc.errors import ConfigError

FORMAT = "engine-core traffic"
VERSION = 1
#: Bytes of a prompt that one of an exchange's blocks stands for: about 16 tokens, as in a KV block.
BLOCK_BYTES = 64
_MODE = 0o600


#: The values that a file may have: it may come from a stranger.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Hash: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Head(msgspec.Struct, frozen=True):
    """The first line of a file."""

    format: str
    version: int
    block_bytes: int = BLOCK_BYTES
    has_content: bool = False


class Exchange(msgspec.Struct, omit_defaults=True):
    """One request for tokens and its answer. None: it is not known."""

    arrival_ms: Milliseconds  # when the last byte of the request came
    route: str
    model: str = ""
    is_stream: bool = False
    status: Count = 0  # 0: there was no answer
    end: str = ""  # who ended it early: client, server, or proxy; empty: it is whole
    input_tokens: Count | None = None
    cached_tokens: Count | None = None  # of them, found in the server's cache
    output_tokens: Count | None = None
    input_bytes: Count = 0  # of the prompt's text; four for each token id
    output_bytes: Count = 0  # of the answer's text
    output_events: Count = 0  # of a stream, with a part of the answer
    num_images: Count = 0
    num_choices: Count = 1
    max_tokens: Count | None = None
    ttft_ms: Milliseconds | None = None  # to the first part of the answer; streams only
    last_ms: Milliseconds | None = None  # to the last part
    total_ms: Milliseconds | None = None  # to the last byte
    gaps_ms: tuple[Milliseconds, Milliseconds, Milliseconds, Milliseconds] | None = (
        None  # between parts: p50, p90, p99, largest
    )
    blocks: tuple[Hash, ...] = ()  # salted hashes of the prompt's beginnings, one for each whole block
    request: msgspec.Raw = msgspec.Raw()  # its body, and
    answer: str = ""  # the answer's text, only with --content


class Totals(msgspec.Struct, frozen=True):
    """The last line: what the file does not have an exchange for."""

    num_others: int  # requests for something else than tokens
    num_not_understood: int  # connections whose bytes are not HTTP/1
    num_lost: int  # connections that brought more than the observer could read in time


class TrafficWriter:
    """A new file. Errors: ConfigError if it exists or cannot be made."""

    def __init__(self, path: str, *, has_content: bool) -> None:
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}") from None
        self._write([Head(FORMAT, VERSION, BLOCK_BYTES, has_content)])

    def add(self, exchanges: list[Exchange]) -> None:
        """Append these. Errors: OSError."""
        if exchanges:
            self._write(exchanges)

    def close(self, totals: Totals) -> None:
        """Append the totals and close the file. Errors: OSError."""
        try:
            self._write([totals])
        finally:
            os.close(self._fd)

    def _write(self, lines: list[Any]) -> None:
        data = memoryview(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        while data:
            data = data[os.write(self._fd, data) :]


def is_traffic(beginning: bytes) -> bool:
    """Return whether a file begins like one of these."""
    return f'"{FORMAT}"'.encode() in beginning.partition(b"\n")[0]


def read_traffic(path: Path) -> tuple[Head, Iterator[Exchange]]:
    """Return the head, and the exchanges in the order of their ends. A cut last line is left out.

    Errors: ConfigError that names the line, also from the iterator.
    """
    lines = _lines(path)
    try:
        head = msgspec.json.decode(next(lines), type=Head)
    except (StopIteration, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no recorded traffic: {error}") from None
    if head.format != FORMAT or head.version != VERSION or head.block_bytes < 1:
        raise ConfigError(f"{path} has version {head.version} of {head.format!r:.40}; this one reads {VERSION}")
    return head, _exchanges(path, lines)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _exchanges(path: Path, lines: Iterator[bytes]) -> Iterator[Exchange]:
    decoder = msgspec.json.Decoder(Exchange)
    for number, line in enumerate(lines, 2):
        if not line.endswith(b"\n") or line.startswith(b'{"num_others"'):
            return
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
