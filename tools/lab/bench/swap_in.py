"""A large model that is swapped in: `serve --models` with the demo model and a made-up 4B model in 4 bits.

The large model answers a conversation, leaves the memory, and is asked to continue: its packed weights are in the page
cache, and the conversation's KV blocks in its folder. In case `alone` nothing else runs; in case `streams` the demo
model answers all the time, and the longest gap of its streams is measured while the other one loads. `start` is the
same without HTTP: an engine process from its beginning to the first token, by phases.

Everything that is written (4.6 GB for the 4B model) is in a temporary folder, the cache of packed weights too.
"""

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.errors import EngineStartError
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from kernels.cpu.library_file import private_folder
from tools.commands.replay.latency import percentile
from tools.lab.bench.large_model import FOUR_B, Shape, write_large_model
from tools.lab.bench.quiet import cpu_use, foreign_cpu
from tools.lab.bench.workloads import HOST_ID_SPAN, ID_LOW

SHAPE: Shape = FOUR_B
_SESSION, _TURN = 1024, 32  # tokens of the conversation, and of its next turn
_STREAMS = 2
_ALONE_S, _AFTER_S = 3.0, 1.0  # how long streams are watched before and after a load
_LIMIT_S = 900.0
_LEAST_PACKED = 256 << 20  # bytes of a model whose packed weights are kept in any case
_TABLE = """
[models.large]
model = {model}
kv_cache_memory_bytes = "1G"
kv_host_bytes = "1G"
kv_dir = {folder}
max_model_len = 4096
keep_alive = -1

[models.other]
model = {other}
kv_cache_memory_bytes = "256M"
keep_alive = -1
"""


def measure_swap_in(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case and round. options: of all engines. Errors: those of a start."""
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as name:
        folder = Path(name)
        write_large_model(folder / "large.gguf", SHAPE)
        with _own_cache(folder):
            yield from _serve_rounds(folder, options, rounds)
            config = config_from_options(**{**_options(folder), **options})
            for round_ in range(rounds):
                yield _record("start", round_, _measure_start(config))


@contextlib.contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Let child processes keep packed weights and Python's bytecode below this folder, and find the built kernels.

    An installation has its bytecode. In a checkout whose environment forbids to write it (PYTHONDONTWRITEBYTECODE),
    each start would compile all modules, which takes longer than the rest of it.
    """
    built, before = private_folder("kernels"), dict(os.environ)
    own = folder / "cache"
    shutil.copytree(built, own / "engine-core" / "kernels")
    os.environ.setdefault("HF_HOME", str(built.parent.parent / "huggingface"))
    os.environ |= {"XDG_CACHE_HOME": str(own), "PYTHONPYCACHEPREFIX": str(own / "python")}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _options(folder: Path) -> dict[str, Any]:
    """Return the large model's options, which are those of its table."""
    gib = 1 << 30
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": gib, "kv_host_bytes": gib, "max_model_len": 4096}
    return {"model": str(folder / "large.gguf"), "kv_dir": str(folder / "kv"), **sizes}


def _record(case: str, round_: int, figures: dict[str, Any]) -> dict[str, Any]:
    names = {"engine": NAME, "version": VERSION, "workload": "swap-in", "case": case, "round": round_}
    return {**names, "session_tokens": _SESSION, **figures}


# Over HTTP


class _Server:
    """`engine-core serve --models`. loaded: when each model was loaded last, by the server's lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process, self.loaded = process, dict[str, float]()
        assert process.stdout is not None
        self.port, said = 0, ""
        for line in process.stdout:
            said += line
            if "HTTP at " in line:
                self.port = int(line.rsplit(":", 1)[1])
                break
        if not self.port:
            raise EngineStartError(said + "\n".join(process.stderr or ()))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            if line.rstrip().endswith(" is loaded"):
                self.loaded[line.split()[-3]] = time.monotonic()

    def ask(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps({**fixed, **body}), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise EngineStartError(answer.read().decode(errors="replace"))
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def unload(self, model: str) -> None:
        """Let a model leave the memory, and wait until it has."""
        self._call("POST", "/api/generate", {"model": model, "keep_alive": 0})
        end = time.monotonic() + _LIMIT_S
        while any(one["name"].split(":")[0] == model for one in self._call("GET", "/api/ps", None)["models"]):
            if time.monotonic() > end:
                raise TimeoutError(f"the model {model!r} did not leave the memory within {_LIMIT_S:g} s")
            time.sleep(0.05)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def _serving(*options: str) -> Iterator[_Server]:
    command = [sys.executable, "-m", "engine_core", "serve", "--http", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield _Server(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


class _Watch:
    """Streams of the other model, one after the other for each of _STREAMS callers; the times of their events."""

    def __init__(self, server: _Server) -> None:
        self._server, self._is_over = server, threading.Event()
        self.times: list[list[float]] = [[] for _ in range(_STREAMS)]
        self._threads = [threading.Thread(target=self._run, args=(times,)) for times in self.times]
        for thread in self._threads:
            thread.start()

    def _run(self, times: list[float]) -> None:
        while not self._is_over.is_set():
            for event in self._server.ask({"model": "other", "prompt": "Once upon a time", "max_tokens": 4000}):
                times.append(time.monotonic())
                if self._is_over.is_set() or not event["choices"]:
                    break

    def close(self) -> None:
        """End the streams."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps between events, of all streams, that end within this time."""
        return [
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times)
            if begin <= after <= end
        ]


def _serve_rounds(folder: Path, options: dict[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    table, given = folder / "models.toml", list[str]()
    paths = {"model": folder / "large.gguf", "folder": folder / "kv", "other": resolve_model(None)}
    table.write_text(_TABLE.format(**{name: json.dumps(str(path)) for name, path in paths.items()}))
    for name, value in options.items():
        given += ["--" + name.replace("_", "-"), str(value)]
    with _serving("--models", str(table), "--memory", "16G", *given) as server:
        session = [ID_LOW + (number * 7) % HOST_ID_SPAN for number in range(_SESSION)]
        _first_token(server, session)  # its weights are packed, and its KV blocks are stored when it leaves
        _wait_for_packed(folder / "large.gguf")
        server.unload("large")
        for round_ in range(rounds):
            yield _record("alone", round_, _swap_in(server, session, round_))
        for round_ in range(rounds):
            yield _record("streams", round_, _swap_in_under_streams(server, session, rounds + round_))


def _wait_for_packed(path: Path) -> None:
    """Wait until the engine has written the file of packed weights, which it does in the background for large ones."""
    num_bytes, end = path.stat().st_size, time.monotonic() + _LIMIT_S
    weights = private_folder("weights")
    while num_bytes > _LEAST_PACKED and not any(
        one.stat().st_size > num_bytes // 2 for one in weights.glob("*.weights")
    ):
        if time.monotonic() > end:
            raise TimeoutError(f"the engine did not write its packed weights within {_LIMIT_S:g} s")
        time.sleep(0.1)


def _swap_in(server: _Server, session: list[int], number: int) -> dict[str, Any]:
    before, begin = cpu_use(), time.monotonic()
    first, cached = _first_token(server, [*session, *_turn(number)])
    foreign_s = foreign_cpu(before, cpu_use())
    loaded, asked = server.loaded["large"] - begin, time.monotonic()
    usual, _ = _first_token(server, [*session, *_turn(-1 - number)])
    server.unload("large")
    return {
        "first_token_ms": round((first - begin) * 1000, 1),
        "loaded_ms": round(loaded * 1000, 1),
        "first_token_after_loaded_ms": round((first - begin - loaded) * 1000, 1),
        "first_token_ms_in_memory": round((usual - asked) * 1000, 1),
        "cached_tokens": cached,
        "foreign_cpu_s": round(foreign_s, 2),
    }


def _swap_in_under_streams(server: _Server, session: list[int], number: int) -> dict[str, Any]:
    watch = _Watch(server)
    try:
        while not all(len(times) > 20 for times in watch.times):
            time.sleep(0.05)
        begin = time.monotonic()
        time.sleep(_ALONE_S)
        load = time.monotonic()
        figures = _swap_in(server, session, number)
        time.sleep(_AFTER_S)
        end = time.monotonic()
    finally:
        watch.close()
    for name, gaps in (("before", watch.gaps(begin, load)), ("during", watch.gaps(load, end))):
        figures[f"gap_p50_ms_{name}"] = round(statistics.median(gaps) * 1000, 1)
        figures[f"gap_p99_ms_{name}"] = round(percentile(gaps, 0.99) * 1000, 1)
        figures[f"gap_max_ms_{name}"] = round(max(gaps) * 1000, 1)
    return {**figures, "streams": _STREAMS}


def _turn(number: int) -> list[int]:
    return [ID_LOW + (number * 131 + place * 17) % HOST_ID_SPAN for place in range(_TURN)]


def _first_token(server: _Server, prompt: list[int]) -> tuple[float, int]:
    """Ask the large model for one token; return (when it came, cached tokens)."""
    first, cached = 0.0, 0
    for event in server.ask({"model": "large", "prompt": prompt, "max_tokens": 1}):
        if event["choices"] and not first:
            first = time.monotonic()
        if event.get("usage"):
            cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first, cached


# Without HTTP


def _measure_start(config: EngineConfig) -> dict[str, Any]:
    """Start an engine and ask it for one token of the conversation; return the phases' beginnings."""
    phases: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        phases[name.split(",")[0]] = round(seconds * 1000, 1)

    session = [ID_LOW + (number * 7) % HOST_ID_SPAN for number in range(_SESSION)]
    prompt: Any = {"prompt_token_ids": [*session, *_turn(999)]}
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    before, begin = cpu_use(), time.monotonic()
    with EngineProcess(config, on_phase=note) as process:
        process.wait_ready()
        ready = time.monotonic()
        with LLM(connect=process.address, skip_tokenizer_init=True) as llm:
            connected = time.monotonic()
            (output,) = llm.generate(prompt, one, use_tqdm=False)
            first = time.monotonic()
            llm.generate({"prompt_token_ids": [*session, *_turn(-1)]}, one, use_tqdm=False)
            second = time.monotonic()
    after = cpu_use()
    return {
        "first_token_ms": round((first - begin) * 1000, 1),
        "ready_ms": round((ready - begin) * 1000, 1),
        "first_token_after_mapped_ms": round(
            (first - begin) * 1000 - phases["kv cache"] - (connected - ready) * 1000, 1
        ),
        "first_token_ms_in_memory": round((second - first) * 1000, 1),
        "cached_tokens": output.num_cached_tokens,
        "phases_ms": phases,
        "cpu_s": round(after.ours - before.ours, 2),
        "foreign_cpu_s": round(foreign_cpu(before, after), 2),
    }
