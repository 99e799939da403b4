"""Public request traces, read from their files: arrival, lengths and shared prompt parts of each request.

A format is known by the file's first line, never by its name. Each has a file or a function of its own; what is known
to be no trace of requests is refused with the reason.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ipc.errors import ConfigError

HASH_BLOCK = 512  # prompt tokens that one of Mooncake's hash ids stands for
_MAX_LENGTH = 2**31
_FIRST_BYTES = 4096


class Row(NamedTuple):
    """One request."""

    arrival_s: float  # since any moment before the first request
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] | None = None  # one for hash_block tokens of the prompt; the last may be partial
    ttft_s: float | None = None  # as measured when the trace was recorded


class Trace(NamedTuple):
    """A trace: rows in order of arrival, the first at 0 s. num_skipped: requests that failed when it was recorded."""

    name: str
    rows: list[Row]
    hash_block: int = HASH_BLOCK
    num_skipped: int = 0


#: Parses a line; None: a request that failed when the trace was recorded.
Parse: TypeAlias = Callable[[str], Row | None]


class Format(NamedTuple):
    """How lines become rows. header: how many lines come before the first row."""

    parse: Parse
    header: int = 0
    hash_block: int = HASH_BLOCK


class Making(NamedTuple):
    """How requests are made where a file has no times of its own: at a rate [1/s], with gamma-distributed gaps."""

    rate: float | None = None
    burstiness: float = 1.0  # 1 = Poisson; smaller = in bursts
    seed: int = 0
    tokenizer: str | None = None  # folder of the tokenizer that measures texts


def read_trace(path: Path, num_rows: int | None = None, making: Making | None = None) -> Trace:
    """Return the first num_rows rows of the file; None = all. Of a long file no more than that is read.

    Errors: ConfigError that names the file and the row, counted from 1.
    """
    from tools.lab.traces import (
        captured,  # which import this file's Row
        lines,  # which import this file's Row
        servegen,  # which import this file's Row
        sharegpt,  # which import this file's Row
    )

    making = making or Making()
    try:
        with path.open("rb") as file:
            beginning = file.read(_FIRST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from error
    if is_capture(beginning):
        return _sorted(path, captured.read_capture(path, num_rows), captured.BLOCK)
    if sharegpt.is_sharegpt(beginning):
        return _sorted(path, sharegpt.read_conversations(path, num_rows, making), HASH_BLOCK)
    if servegen.is_windows(beginning):
        return _sorted(path, servegen.generate(path, num_rows, making), HASH_BLOCK)
    try:
        with path.open(encoding="utf-8") as text:
            first = text.readline()
            known = lines.format_of(path, first.rstrip("\r\n"), text.readline())
            text.seek(0)
            found = list(islice(_rows(path, islice(text, known.header, None), known.parse), num_rows))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from error
    rows = [row for row in found if row is not None]
    return _sorted(path, rows, known.hash_block, len(found) - len(rows))


def is_capture(beginning: bytes) -> bool:
    """Return whether a file begins as a capture of this engine does."""
    return b"engine-core capture" in beginning[:64]


def _rows(path: Path, texts: Iterable[str], parse: Parse) -> Iterator[Row | None]:
    for number, line in enumerate(texts, 1):
        try:
            row = parse(line.rstrip("\r\n"))
            yield None if row is None else _checked(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, row {number}: {_reason(error)}: {line.strip():.80}") from error


def _sorted(path: Path, rows: list[Row], hash_block: int, num_skipped: int = 0) -> Trace:
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    rows = sorted(rows, key=lambda row: row.arrival_s)  # stable: rows with equal times keep their order
    first = rows[0].arrival_s
    return Trace(path.name, [row._replace(arrival_s=row.arrival_s - first) for row in rows], hash_block, num_skipped)


def _checked(row: Row) -> Row:
    if not 1 <= row.num_input < _MAX_LENGTH or not 0 <= row.num_output < _MAX_LENGTH:
        raise ValueError(f"{row.num_input} input and {row.num_output} output tokens; expected at least 1 and 0")
    return row


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
