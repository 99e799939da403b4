"""Public request traces, read from their files: arrival, lengths and shared prompt parts of each request.

A format is recognized by the first line: Mooncake (JSON lines with hash_ids), the Azure LLM inference trace of 2023
(CSV), and runs of vLLM measured by LLMServingSim (JSON lines with queued_ts). ServeGen is refused: its files hold the
parameters of a generator.
"""

import csv
import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ipc.errors import ConfigError
from ipc.rounding import ceil_div

HASH_BLOCK = 512  # prompt tokens that one of Mooncake's hash ids stands for
_MAX_LENGTH = 2**31
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Row(NamedTuple):
    """One request."""

    arrival_s: float  # since any moment before the first request
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] | None = None  # one for HASH_BLOCK tokens of the prompt; the last may be partial
    ttft_s: float | None = None  # as measured when the trace was recorded


class Trace(NamedTuple):
    """A trace: rows in order of arrival, the first at 0 s."""

    name: str
    rows: list[Row]


def read_trace(path: Path, num_rows: int | None = None) -> Trace:
    """Return the first num_rows rows of the file; None = all.

    Errors: ConfigError that names the file and the row, counted from 1.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a trace that can be read: {error}") from error
    parse = _parser_for(path, lines)
    if parse is _azure:
        lines = lines[1:]
    rows: list[Row] = []
    for number, line in enumerate(lines[:num_rows], 1):
        try:
            rows.append(_checked(parse(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, row {number}: {_reason(error)}: {line:.80}") from error
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    rows.sort(key=lambda row: row.arrival_s)  # stable: rows with equal times keep their order
    return Trace(path.name, [row._replace(arrival_s=row.arrival_s - rows[0].arrival_s) for row in rows])


def _parser_for(path: Path, lines: Sequence[str]) -> Callable[[str], Row]:
    first = lines[0] if lines else ""
    if first.startswith(_AZURE_HEADER):
        return _azure
    if '"hash_ids"' in first:
        return _mooncake
    if '"queued_ts"' in first:
        return _vllm_measured
    if path.name.startswith("servegen") or ",Gamma," in first or '"input_tokens"' in "".join(lines[1:3]):
        raise ConfigError(f"{path} holds ServeGen's parameters of a generator, not requests; take a recorded trace")
    raise ConfigError(
        f"{path} is no trace known here; known are Mooncake's JSON lines, the Azure CSV of 2023 (header "
        f"{_AZURE_HEADER}) and LLMServingSim's requests.jsonl; its first line is {first:.80}"
    )


def _mooncake(line: str) -> Row:
    record = json.loads(line)
    num_input, hash_ids = _integer(record["input_length"]), tuple(_integer(one) for one in record["hash_ids"])
    if len(hash_ids) != (expected := ceil_div(num_input, HASH_BLOCK)):
        raise ValueError(f"{len(hash_ids)} hash_ids; {num_input} tokens have {expected} blocks of {HASH_BLOCK}")
    return Row(_number(record["timestamp"]) / 1e3, num_input, _integer(record["output_length"]), hash_ids)


def _azure(line: str) -> Row:
    (values,) = csv.reader([line])
    timestamp, num_input, num_output = values
    moment, _, fraction = timestamp.partition(".")  # with 7 digits of a second
    seconds = datetime.datetime.fromisoformat(moment).replace(tzinfo=datetime.UTC).timestamp()
    return Row(seconds + int(fraction or 0) / 10 ** len(fraction), int(num_input), int(num_output))


def _vllm_measured(line: str) -> Row:
    """Parse a row. arrival_time is on another clock than the other three times."""
    record = json.loads(line)
    ttft_s = _number(record["first_token_ts"]) - _number(record["queued_ts"])
    return Row(
        _number(record["arrival_time"]), _integer(record["input_toks"]), _integer(record["output_toks"]), None, ttft_s
    )


def _checked(row: Row) -> Row:
    if not 1 <= row.num_input < _MAX_LENGTH or not 0 <= row.num_output < _MAX_LENGTH:
        raise ValueError(f"{row.num_input} input and {row.num_output} output tokens; expected at least 1 and 0")
    return row


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"expected a whole number from 0, got {value!r:.40}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r:.40}")
    return float(value)


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
