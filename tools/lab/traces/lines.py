"""Traces with a request on each line: JSON lines and CSV, distinguished by the first line."""

import csv
import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError
from ipc.tables.rounding import ceil_div
from tools.lab.traces.row import HASH_BLOCK, Format, Row

BAILIAN_BLOCK = 16  # prompt tokens that one of Qwen-Bailian's hash ids stands for
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
_KNOWN = (
    "Mooncake's and Qwen-Bailian's JSON lines, the Azure CSVs of 2023 and 2024 (header TIMESTAMP,ContextTokens,"
    "GeneratedTokens), BurstGPT's CSV, ShareGPT's JSON, ServeGen's windows, LLMServingSim's requests.jsonl and "
    "captures of this engine"
)


def format_of(path: Path, first: str, second: str) -> Format:
    """Return the format of a file with these first lines. Errors: ConfigError that says why there is none."""
    columns = next(csv.reader([first]), []) if not first.startswith("{") else []
    if any("image" in column.lower() for column in columns):
        raise ConfigError(f"{path} has requests with images, which traces do not support: {first:.80}")
    if set(_AZURE) <= set(columns):
        return Format(_azure(*map(columns.index, _AZURE)), header=1)
    if set(_BURST_GPT) <= set(columns):
        return Format(_burst_gpt(*map(columns.index, _BURST_GPT)), header=1)
    if '"hash_ids"' in first and '"chat_id"' in first:
        return Format(_bailian, hash_block=BAILIAN_BLOCK)
    if '"hash_ids"' in first:
        return Format(_mooncake)
    if '"queued_ts"' in first:
        return Format(_vllm_measured)
    if '"input_tokens"' in first + second:
        raise ConfigError(f"{path} holds ServeGen's lengths; give its windows, the -trace.csv file next to it")
    raise ConfigError(f"{path} is not a known trace; known are {_KNOWN}; its first line is {first:.80}")


def _mooncake(line: str) -> Row:
    record = json.loads(line)
    num_input, hash_ids = _hashed(record)
    if len(hash_ids) != (expected := ceil_div(num_input, HASH_BLOCK)):
        raise ValueError(f"{len(hash_ids)} hash_ids; {num_input} tokens have {expected} blocks of {HASH_BLOCK}")
    return Row(_number(record["timestamp"]) / 1e3, num_input, _integer(record["output_length"]), hash_ids)


def _bailian(line: str) -> Row:
    """Parse a row: seconds, and blocks of 16 tokens, of which the last may be missing if it is incomplete."""
    record = json.loads(line)
    num_input, hash_ids = _hashed(record)
    whole, expected = num_input // BAILIAN_BLOCK, ceil_div(num_input, BAILIAN_BLOCK)
    if len(hash_ids) not in (whole, expected):
        raise ValueError(f"{len(hash_ids)} hash_ids; {num_input} tokens have {expected} blocks of {BAILIAN_BLOCK}")
    return Row(_number(record["timestamp"]), num_input, _integer(record["output_length"]), hash_ids)


def _hashed(record: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    return _integer(record["input_length"]), tuple(_integer(one) for one in record["hash_ids"])


def _azure(time: int, num_input: int, num_output: int) -> Callable[[str], Row]:
    """Return the parser of a CSV with these columns: the times of 2023 have no zone, those of 2024 have one."""

    def parse(line: str) -> Row:
        values = _values(line, max(time, num_input, num_output))
        return Row(_seconds(values[time]), int(values[num_input]), int(values[num_output]))

    return parse


def _burst_gpt(time: int, num_input: int, num_output: int) -> Callable[[str], Row | None]:
    """Return the parser of a CSV with these columns. A row without response tokens is a request that failed."""

    def parse(line: str) -> Row | None:
        values = _values(line, max(time, num_input, num_output))
        row = Row(float(values[time]), int(values[num_input]), int(values[num_output]))
        return row if row.num_output else None

    return parse


def _values(line: str, last: int) -> list[str]:
    values = next(csv.reader([line]), [])
    if len(values) <= last:
        raise ValueError(f"{len(values)} columns; expected at least {last + 1}")
    return values


def _seconds(text: str) -> float:
    """Return a time such as 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00.009930+00:00 in seconds."""
    moment, _, rest = text.partition(".")  # with up to 7 digits of a second
    fraction = rest.partition("+")[0].partition("-")[0].removesuffix("Z")
    zone = rest[len(fraction) :]
    parsed = datetime.datetime.fromisoformat(moment + zone.replace("Z", "+00:00"))
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)
    return parsed.timestamp() + int(fraction or 0) / float(10 ** len(fraction))


def _vllm_measured(line: str) -> Row:
    """Parse a row. arrival_time is on another clock than the other three times."""
    record = json.loads(line)
    ttft_s = _number(record["first_token_ts"]) - _number(record["queued_ts"])
    return Row(
        _number(record["arrival_time"]), _integer(record["input_toks"]), _integer(record["output_toks"]), None, ttft_s
    )


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"expected a whole number from 0, got {value!r:.40}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r:.40}")
    return float(value)
