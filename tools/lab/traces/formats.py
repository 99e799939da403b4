"""Public request traces, read from their files: arrival, lengths and shared prompt parts of each request.

A format is detected from the file's first line, never from its name. Each has its own file or function; files that are
known not to be request traces are refused with the reason.
"""

import ast
import csv
import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.capture.file import CaptureFile
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.files.model_files import read_tokenizer_files
from ipc.tables.arrays import Doubles, Ints
from ipc.tables.rounding import ceil_div
from ipc.wire.messages import AddRequest
from tools.commands.record.traffic import BLOCK_BYTES, Exchange, is_traffic, read_traffic
from tools.commands.replay.what_if.foreign import read_requests
from tools.commands.replay.what_if.recording import Recorded
from tools.lab.traces.row import HASH_BLOCK, Format, Making, Parse, Row, Trace

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
    if is_traffic(beginning):
        return read_recorded(path, num_rows)
    if is_sharegpt(beginning):
        return _sorted(path, read_conversations(path, num_rows, making), HASH_BLOCK)
    if is_windows(beginning):
        return _sorted(path, generate(path, num_rows, making), HASH_BLOCK)
    try:
        with path.open(encoding="utf-8") as text:
            first = text.readline()
            known = format_of(path, first.rstrip("\r\n"), text.readline())
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
            len(one.tokens[0]) or (0 if one.aborted_ns else _wanted(one)),
            hash_ids(one.message.prompt_token_ids),
            _since(one, one.token_times[:1]),
            None if one.aborted_ns else _since(one, one.token_times[-1:]),
            bool(one.aborted_ns),
        )
        for one in read_requests(CaptureFile(path, None))[:num_rows]
    ]


def _since(one: Recorded, times: list[int]) -> float | None:
    """Return the seconds from a request's arrival to this time; None: it is empty."""
    return (times[0] - one.received_ns) / 1e9 if times else None


def _wanted(one: Recorded) -> int:
    """Return the tokens that a request asked for if it has none yet; a pooling request has none."""
    return (one.message.params.max_tokens or 1) if isinstance(one.message, AddRequest) else 1


# Traffic of another server, as `engine-core record` writes it.


_BYTES_PER_TOKEN = 4.0  # if the file has no exchange with both


def read_recorded(path: Path, num_rows: int | None) -> Trace:
    """Return the exchanges that were answered, or cancelled. Errors: ConfigError.

    A length that the server did not say is estimated by the file's other exchanges: tokens by bytes of the prompt's
    text, and by events of the answer's stream, or else by bytes of its text.
    """
    found = list(read_traffic(path)[1])
    kept = [one for one in found if 200 <= one.status < 300 or (one.end == "client" and not one.status)]
    num_skipped = len(found) - len(kept)
    kept = sorted(kept, key=lambda one: one.arrival_ms)[:num_rows]
    per_byte = _ratio([(one.input_tokens, one.input_bytes) for one in kept if not one.num_images])
    per_byte = per_byte or 1 / _BYTES_PER_TOKEN
    per_event = _ratio([(one.output_tokens, one.output_events) for one in kept if one.is_stream and not one.end]) or 1.0
    of_answers = _ratio([(one.output_tokens, one.output_bytes) for one in kept]) or 1 / _BYTES_PER_TOKEN
    rows = [_exchanged(one, per_byte, per_event if one.is_stream else of_answers) for one in kept]
    if not rows:
        raise ConfigError(f"{path} holds no requests that were answered")
    trace = _sorted(path, rows, max(1, round(BLOCK_BYTES * per_byte)), num_skipped)
    return trace._replace(num_estimated=sum(None in (one.input_tokens, one.output_tokens) for one in kept))


def _ratio(pairs: list[tuple[int | None, int]]) -> float:
    """Return tokens for each unit, over those that have both; 0: none has."""
    known = [(tokens, units) for tokens, units in pairs if tokens and units]
    return sum(tokens for tokens, _ in known) / sum(units for _, units in known) if known else 0.0


def _exchanged(one: Exchange, per_byte: float, per_unit: float) -> Row:
    num_input, num_output = one.input_tokens, one.output_tokens
    if num_input is None:
        num_input = round(one.input_bytes * per_byte)
    if num_output is None:
        num_output = round((one.output_events if one.is_stream else one.output_bytes) * per_unit)
    last = one.last_ms if one.is_stream else one.total_ms
    return Row(
        one.arrival_ms / 1e3,
        max(1, num_input),
        num_output,
        one.blocks,
        None if one.ttft_ms is None else one.ttft_ms / 1e3,
        None if last is None or one.end else last / 1e3,
        one.end == "client",
    )


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


# ServeGen's windows (Xiang et al., arXiv:2505.09999): requests generated, with a seed, from a client's parameters.
#
# A file NAME-trace.csv has a line for each window: its start in seconds, requests a second, their coefficient of
# variation, the distribution of their gaps (Gamma or Weibull) and its shape and scale. NAME-dataset.json next to it has
# the lengths of longer windows: Python dicts as text, length: probability, which are read as literals.


_SUFFIX = "-trace.csv"
_KINDS = ("Gamma", "Weibull")
_COLUMNS = 6


class _Lengths(NamedTuple):
    """Lengths and their probabilities."""

    values: Ints
    shares: Doubles


def is_windows(beginning: bytes) -> bool:
    """Return whether a file's first line is one of ServeGen's windows."""
    columns = beginning.partition(b"\n")[0].split(b",")
    return len(columns) == _COLUMNS and columns[3].strip().decode(errors="replace") in _KINDS


def generate(path: Path, num_rows: int | None, making: Making) -> list[Row]:
    """Return the requests that the windows describe; making.seed decides which. Errors: ConfigError."""
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(
            f"{path} has ServeGen's windows; their lengths are found by the file's name, which must end in {_SUFFIX}"
        )
    windows = _windows(path)
    lengths = _read_lengths(path.with_name(path.name.removesuffix(_SUFFIX) + "-dataset.json"))
    draw = np.random.default_rng(making.seed)
    rows: list[Row] = []
    for begin, end, kind, shape, scale in windows:
        at = max(key for key in lengths if key <= max(begin, min(lengths)))
        inputs, outputs = lengths[at]
        now = begin
        while True:
            gap = draw.gamma(shape, scale) if kind == "Gamma" else scale * draw.weibull(shape)
            now += max(gap, 1e-9)
            if now >= end:
                break
            sizes = [int(draw.choice(one.values, p=one.shares)) for one in (inputs, outputs)]
            rows.append(Row(now, max(1, sizes[0]), max(1, sizes[1])))
            if len(rows) == num_rows:
                return rows
    return rows


def _windows(path: Path) -> list[tuple[float, float, str, float, float]]:
    """Return (begin, end, distribution, shape, scale) of each window with requests."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    found = []
    for number, line in enumerate(lines, 1):
        try:
            begin, rate, _, kind, shape, scale = line
            numbers = float(begin), float(rate), float(shape or 0), float(scale or 0)
        except ValueError as error:
            raise ConfigError(f"{path}, row {number}: {error}: {','.join(line):.80}") from None
        if numbers[1] > 0 and (kind not in _KINDS or min(numbers[2:]) <= 0):
            raise ConfigError(f"{path}, row {number}: expected Gamma or Weibull with a shape and a scale above 0")
        found.append((*numbers, kind))
    steps = np.diff([one[0] for one in found])
    width = float(steps[0]) if len(steps) else 600.0
    return [(begin, begin + width, kind, shape, scale) for begin, rate, shape, scale, kind in found if rate > 0]


def _read_lengths(path: Path) -> dict[float, tuple[_Lengths, _Lengths]]:
    """Return (input, output) lengths by the second from which they apply. Errors: ConfigError."""
    try:
        windows: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        found = {
            float(begin): (_lengths(one["input_tokens"]), _lengths(one["output_tokens"]))
            for begin, one in windows.items()
            if one.get("input_tokens") and one.get("output_tokens")
        }
    except (OSError, ValueError, KeyError, SyntaxError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no readable lengths ({error}); it belongs to the windows next to it") from None
    if not found:
        raise ConfigError(f"{path} has no lengths")
    return found


def _lengths(text: str) -> _Lengths:
    shares = ast.literal_eval(text)
    values = np.array(list(shares), np.int64)
    weights = np.array(list(shares.values()), np.float64)
    if not len(values) or not weights.sum() > 0 or weights.min() < 0:
        raise ValueError("expected lengths with probabilities")
    return _Lengths(values, weights / weights.sum())


# Traces with a request on each line: JSON lines and CSV, distinguished by the first line.


BAILIAN_BLOCK = 16  # prompt tokens that one of Qwen-Bailian's hash ids stands for
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
_KNOWN = (
    "Mooncake's and Qwen-Bailian's JSON lines, the Azure CSVs of 2023 and 2024 (header TIMESTAMP,ContextTokens,"
    "GeneratedTokens), BurstGPT's CSV, ShareGPT's JSON, ServeGen's windows, LLMServingSim's requests.jsonl, AIPerf's "
    "profile_export.jsonl, vllm-vcr's traces, recordings of `engine-core record` and captures of this engine"
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
    if '"request_start_ns"' in first:
        return Format(_aiperf)
    if '"ttft_ms"' in first and '"prompt_tokens"' in first:
        return Format(_vllm_vcr)
    if first.startswith('{"meta"') and '"ttft_ms"' in second:
        return Format(_vllm_vcr, header=1, hash_block=_vcr_block(path, first))
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
    queued = _number(record["queued_ts"])
    return Row(
        _number(record["arrival_time"]),
        _integer(record["input_toks"]),
        _integer(record["output_toks"]),
        None,
        _number(record["first_token_ts"]) - queued,
        _number(record["last_token_ts"]) - queued,
    )


_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _aiperf(line: str) -> Row | None:
    """Parse a line of AIPerf's profile_export.jsonl. A request that failed, or of the warm-up, is none."""
    record = json.loads(line)
    about, metrics = record["metadata"], record.get("metrics") or {}
    is_cancelled = bool(about.get("was_cancelled"))
    if about.get("benchmark_phase") == "warmup" or (record.get("error") and not is_cancelled):
        return None
    num_input = metrics.get("input_sequence_length") or metrics["error_isl"]
    num_output = metrics.get("output_sequence_length") or metrics.get("output_token_count") or {"value": 0}
    return Row(
        _number(about["request_start_ns"]) / 1e9,
        round(_number(num_input["value"])),
        round(_number(num_output["value"])),
        None,
        _measured(metrics.get("time_to_first_token")),
        None if is_cancelled else _measured(metrics.get("request_latency")),
        is_cancelled,
    )


def _measured(metric: Any) -> float | None:
    """Return a metric of AIPerf in seconds; None: there is none."""
    return None if metric is None else _number(metric["value"]) * _SECONDS[metric["unit"]]


_DIGITS = 2**53  # ids up to here are whole numbers in every reader


def _vllm_vcr(line: str) -> Row | None:
    """Parse a line of vllm-vcr's trace. Its hashes have 64 bits and stand for whole blocks."""
    record = json.loads(line)
    reason, hashes = record.get("finish_reason"), record.get("block_hashes") or ()
    if reason == "error":
        return None
    if "arrival_ms" not in record:
        raise ValueError("no arrival_ms; traces made from benchmark reports have none")
    ttft_s, gaps = _number(record["ttft_ms"]) / 1e3, record.get("itl_summary") or {"mean_ms": 0, "count": 0}
    told = record.get("itl_ms")
    decode_ms = _number(gaps["mean_ms"]) * gaps["count"] if told is None else sum(map(_number, told))
    is_cancelled = reason == "abort"
    return Row(
        _number(record["arrival_ms"]) / 1e3,
        _integer(record["prompt_tokens"]),
        _integer(record["output_tokens"]),
        tuple(one % _DIGITS for one in hashes),
        ttft_s,
        None if is_cancelled else ttft_s + decode_ms / 1e3,
        is_cancelled,
    )


def _vcr_block(path: Path, first: str) -> int:
    """Return the tokens of a block of a vllm-vcr trace, from its first line."""
    try:
        size = json.loads(first)["meta"].get("block_size") or 1
        return max(1, _integer(size))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}, row 1: {error}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"expected a whole number from 0, got {value!r:.40}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r:.40}")
    return float(value)
