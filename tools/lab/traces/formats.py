"""Public request traces, read from their files: arrival, lengths and shared prompt parts of each request.

A format is known by the file's first line, never by its name. Each has a file or a function of its own; what is known
to be no trace of requests is refused with the reason.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from ipc.errors import ConfigError
from tools.lab.traces import captured, lines, servegen, sharegpt
from tools.lab.traces.row import HASH_BLOCK, Making, Parse, Row, Trace

_MAX_LENGTH = 2**31
_FIRST_BYTES = 4096


def read_trace(path: Path, num_rows: int | None = None, making: Making | None = None) -> Trace:
    """Return the first num_rows rows of the file; None = all. Of a long file no more than that is read.

    Errors: ConfigError that names the file and the row, counted from 1.
    """
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
