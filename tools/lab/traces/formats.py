"""Public request traces, read from their files: arrival, lengths and shared prompt parts of each request.

A format is detected from the file's first line, never from its name. Each has its own file or function; files that are
known not to be request traces are refused with the reason.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from core.capture.file import CaptureFile
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.files.model_files import read_tokenizer_files
from ipc.wire.messages import AddRequest
from tools.commands.replay.what_if.foreign import read_requests
from tools.commands.replay.what_if.recording import Recorded
from tools.lab.traces import lines, servegen
from tools.lab.traces.row import HASH_BLOCK, Making, Parse, Row, Trace

_MAX_LENGTH = 2**31
_FIRST_BYTES = 4096


def read_trace(path: Path, num_rows: int | None = None, making: Making | None = None) -> Trace:
    """Return the first num_rows rows of the file; None = all. No more than that is read from a long file.

    Errors: ConfigError that names the file and the row, counted from 1.
    """
    making = making or Making()
    try:
        with path.open("rb") as file:
            beginning = file.read(_FIRST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from error
    if is_capture(beginning):
        return _sorted(path, read_capture(path, num_rows), BLOCK)
    if is_sharegpt(beginning):
        return _sorted(path, read_conversations(path, num_rows, making), HASH_BLOCK)
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
    """Return whether a file begins like a capture of this engine."""
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


# A capture of this engine as a trace: arrivals, lengths, and which prompts share a prefix.


BLOCK = 16  # prompt tokens that one id stands for


def read_capture(path: Path, num_rows: int | None) -> list[Row]:
    """Return the capture's requests; for one with several choices, the first. Errors: CaptureFileError."""
    ids: dict[tuple[int, bytes], int] = {}  # by the block before and the block's tokens

    def hash_ids(prompt: bytes) -> tuple[int, ...]:
        found, before = [], -1
        for at in range(0, len(prompt), 4 * BLOCK):
            before = ids.setdefault((before, prompt[at : at + 4 * BLOCK]), len(ids))
            found.append(before)
        return tuple(found)

    return [
        Row(
            one.received_ns / 1e9,
            len(one.message.prompt_token_ids) // 4,
            len(one.tokens[0]) or _wanted(one),
            hash_ids(one.message.prompt_token_ids),
        )
        for one in read_requests(CaptureFile(path))[:num_rows]
    ]


def _wanted(one: Recorded) -> int:
    """Return the tokens that a request asked for if it has none yet; a pooling request has none."""
    return (one.message.params.max_tokens or 1) if isinstance(one.message, AddRequest) else 1


# ShareGPT's conversations: texts without times, measured with a tokenizer and sent at a rate.


def is_sharegpt(beginning: bytes) -> bool:
    """Return whether a file is one JSON array of conversations."""
    return beginning.lstrip().startswith(b"[") and b'"conversations"' in beginning


def read_conversations(path: Path, num_rows: int | None, making: Making) -> list[Row]:
    """Return a request for the first question and its answer of each conversation that has both.

    Errors: ConfigError, also without a tokenizer or a rate.
    """
    if making.tokenizer is None or making.rate is None:
        raise ConfigError(f"{path} has texts without times: give --tokenizer FOLDER and --rate X (requests a second)")
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from None
    pairs = [pair for one in conversations if (pair := _first_pair(one)) is not None][:num_rows]
    tokenizer = Tokenizer.from_files(read_tokenizer_files(Path(making.tokenizer)))
    questions, answers = (tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1))
    draw = np.random.default_rng(making.seed)
    gaps = draw.gamma(making.burstiness, 1 / (making.rate * making.burstiness), len(pairs))
    return [
        Row(arrival, max(1, len(question)), max(1, len(answer)))
        for arrival, question, answer in zip(np.cumsum(gaps).tolist(), questions, answers, strict=True)
    ]


def _first_pair(conversation: Any) -> tuple[str, str] | None:
    """Return the first question and the answer to it; None: the conversation has none."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    texts = [turn.get("value") for turn in turns or () if isinstance(turn, dict)][:2]
    match texts:
        case [str(question), str(answer)] if question and answer:
            return question, answer
        case _:
            return None
