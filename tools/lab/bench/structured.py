"""The cost and the gain of structured outputs: the first grammar and later ones, a step of 32 constrained rows compared
with one without constraints, and compact JSON with and without forced tokens.

The engine runs in this process. Compared cases take turns; times are medians.
"""

import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.grammars.grammars import Grammars, model_grammars
from core.process.resolve import resolve
from ipc.machine.memory import usable_memory_bytes
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.tokenizer_files import tokenizer_files_of
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.tables.rounding import ceil_div
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest
from tools.lab.bench.workloads import ID_LOW, ID_SPAN

_ROWS = 32
_PROMPT = 64  # tokens
_STEPS = 12  # timed, of each turn
_TURNS = 3
_STEP_TURNS = 9
_MAX_TOKENS = 200
_NAMES = ("first_name", "last_name", "occupation", "is_employed", "nationality")


def measure_structured(config: EngineConfig, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each measurement. Errors: the executor's; UnsupportedParameterError without llguidance."""
    length = _PROMPT + _MAX_TOKENS
    sized = msgspec.structs.replace(
        config,
        num_blocks_override=_ROWS * ceil_div(length, config.block_size) + 1,
        max_model_len=length,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    executor = LocalExecutor(sized)
    blocks_in = executor.determine_num_available_blocks
    resolved = resolve(sized, executor.info, blocks_in, total_memory_bytes=usable_memory_bytes(), num_cpus=1)
    executor.initialize_cache(resolved)
    matchers = executor.runner.matchers
    assert matchers is not None, "the executor has grammars"
    common = {"engine": NAME, "version": VERSION, "model": executor.info.name, "dtype": executor.info.dtype, "rep": rep}
    grammars = model_grammars(config, executor.info.vocab_size, executor.info.eos_token_ids)
    grammars.use_files(tokenizer_files_of(config))  # in an engine they exist from its start
    yield common | {"workload": "structured-compile", **_compile(grammars)}
    runs: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    for turn in range(_TURNS):
        for matchers.offers_drafts in (False, True):
            runs[matchers.offers_drafts].append(_json_run(EngineCore(resolved, executor), turn))
    with_s, without_s = (statistics.median(one[0] for one in runs[key]) for key in (True, False))
    yield common | {
        "workload": "structured-json",
        "tokens": sum(one[2] for one in runs[True]),
        "tokens_without": sum(one[2] for one in runs[False]),
        "steps": sum(one[1] for one in runs[True]),
        "steps_without": sum(one[1] for one in runs[False]),
        "ms": round(with_s * 1e3, 1),
        "ms_without": round(without_s * 1e3, 1),
        "speedup": round(without_s / with_s, 2),
    }
    for temperature in (0.0, 1.0):
        yield common | {"workload": "structured-step", "batch": _ROWS} | _compare_steps(resolved, executor, temperature)


def _compare_steps(config: ResolvedConfig, executor: LocalExecutor, temperature: float) -> dict[str, Any]:
    """Return the time, and the CPU time of all threads, of a step with and without constraints, in microseconds."""
    turns: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for turn in range(_STEP_TURNS):
        for is_plain in (True, False) if turn % 2 else (False, True):
            turns[is_plain].append(_step_us(EngineCore(config, executor), temperature, turn, is_plain=is_plain))
    record: dict[str, Any] = {"temperature": temperature}
    for name, index in (("", 0), ("cpu_", 1)):
        plain, constrained = (statistics.median(each[index] for each in turns[key]) for key in (True, False))
        record[f"{name}plain_us"], record[f"{name}constrained_us"] = round(plain), round(constrained)
        record[f"{name}ratio"] = round(constrained / plain, 3)
    return record


def _compile(grammars: Grammars) -> dict[str, Any]:
    """Return the time of the first grammar, of later ones, and of an already compiled one, in milliseconds."""
    times = []
    for number in range(21):
        message = _message(0, _schema(f"field_{number}"), 0.0)
        begin = time.perf_counter()
        if grammars.needs(message):
            grammars.prepare(message)
        times.append((time.perf_counter() - begin) * 1e3)
    begin = time.perf_counter()
    grammars.needs(_message(0, _schema("field_0"), 0.0))
    known = (time.perf_counter() - begin) * 1e3
    first, *later = times
    return {"first_ms": round(first), "later_ms": round(statistics.median(later), 2), "known_ms": round(known, 3)}


def _schema(*names: str) -> StructuredOutputsParams:
    properties = {name: {"type": "string", "maxLength": 12} for name in names}
    schema = {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
    return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)


def _message(
    number: int, constraint: StructuredOutputsParams | None, temperature: float, prompt: bytes = b"\1\0\0\0"
) -> AddRequest:
    params = SamplingParams(
        temperature=temperature,
        max_tokens=_MAX_TOKENS - 1,
        ignore_eos=constraint is None,
        structured_outputs=constraint,
        detokenize=False,
    )
    return AddRequest(number, prompt, params, seed=number)


def _prompts(turn: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(turn)
    return [ids.tobytes() for ids in rng.integers(ID_LOW, ID_LOW + ID_SPAN, (count, _PROMPT), np.int32)]


def _step_us(engine: EngineCore, temperature: float, turn: int, *, is_plain: bool) -> tuple[float, float]:
    """Return the medians of the time and the CPU time of a step in which each row decodes one token, in microseconds.

    CPU time is that of all threads of this process.
    """
    text = {"type": "string", "minLength": 2000}  # it forces no tokens, so each step gives a row one token
    closed = {"type": "object", "properties": {"text": text}, "required": ["text"], "additionalProperties": False}
    constraint = None if is_plain else StructuredOutputsParams(json=json.dumps(closed), disable_any_whitespace=True)
    prompts = _prompts(turn, _ROWS)
    engine.step([(0, _message(n, constraint, temperature, ids)) for n, ids in enumerate(prompts)], 0)
    while engine.scheduler.stats.num_generation_tokens < 5 * _ROWS:  # after the beginning, which is forced
        engine.step([], 0)
    times, cpu_times = [], []
    for _ in range(_STEPS):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        engine.step([], 0)
        times.append(time.perf_counter() - begin)
        cpu_times.append(time.process_time() - cpu_begin)
    _forget_rows(engine)
    return statistics.median(times) * 1e6, statistics.median(cpu_times) * 1e6


def _forget_rows(engine: EngineCore) -> None:
    """End all requests, also in the runner, which learns it from the next plan; otherwise it would continue to mask the
    rows.
    """
    engine.scheduler.finish_client(0)
    engine.step([(0, _message(_ROWS, None, 0.0))], 0)
    engine.scheduler.finish_client(0)


def _json_run(engine: EngineCore, turn: int) -> tuple[float, int, int]:
    """Return (seconds, steps, tokens) of one request for compact JSON with several fields."""
    prompt = _prompts(turn, 1)[0]
    begin = time.perf_counter()
    engine.step([(0, _message(0, _schema(*_NAMES), 0.0, prompt))], 0)
    while engine.has_work:
        engine.step([], 0)
    seconds, stats = time.perf_counter() - begin, engine.scheduler.stats
    result = seconds, stats.num_steps, stats.num_generation_tokens
    _forget_rows(engine)
    return result
