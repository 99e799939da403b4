"""From the start of a process to its first token: a fresh Python process for each measurement, with phases.

`python -m tools.lab.bench.startup` is that process: it reads an EngineConfig as JSON from standard input and prints a
Startup as JSON.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from frontend.llm import LLM
from frontend.text.known_tokenizers import make_ahead
from ipc.errors import EngineCoreError, EngineStartError
from ipc.options.config import EngineConfig
from tools.lab.bench.quiet import cpu_use, foreign_cpu, memory_mb, seconds_since_process_start, wait_until_quiet
from tools.lab.bench.runs import is_clean, request_params
from tools.lab.bench.workloads import HOST_ID_SPAN, warm_up_workload
from tools.service.start import started_engine


class Startup(msgspec.Struct, frozen=True):
    """The moments of a start, in seconds since the kernel started the process."""

    import_s: float  # Python and the frontend have been loaded
    ready_s: float  # the engine answers
    start_to_first_token_s: float
    phases: dict[str, float]  # phase -> when it began, seconds since the engine process began
    peak_rss_mb: int
    pss_mb: int


class MeasuredStartup(NamedTuple):
    """A start, its wall time, and the CPU seconds that other processes took in that time."""

    startup: Startup
    wall_s: float
    foreign_cpu_s: float
    steal_s: float


def measure_cleanly(
    config: EngineConfig, *, tries: int, quiet_seconds: float, has_kernels: bool = True
) -> MeasuredStartup:
    """Return the cleanest of at most `tries` starts.

    has_kernels: False = no built C kernels are found, as in the first start on a machine.
    Errors: EngineStartError with the output of the process.
    """
    measured: list[MeasuredStartup] = []
    for _ in range(tries):
        wait_until_quiet(quiet_seconds)
        with kernel_cache(has_kernels) as environment:
            measured.append(_measure(config, environment))
        if is_clean(measured[-1].foreign_cpu_s, measured[-1].wall_s):
            break
    return min(measured, key=lambda one: one.foreign_cpu_s / one.wall_s)


@contextlib.contextmanager
def kernel_cache(is_filled: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of a process to measure: with this user's cache, or with an empty one.

    Models are found in both.
    """
    if is_filled:
        yield dict(os.environ)
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        yield {"HF_HOME": os.path.join(cache, "huggingface"), **os.environ, "XDG_CACHE_HOME": folder}


def _measure(config: EngineConfig, environment: dict[str, str]) -> MeasuredStartup:
    command = [sys.executable, "-m", __name__]
    before, begin = cpu_use(), time.monotonic()
    done = subprocess.run(command, input=msgspec.json.encode(config), capture_output=True, check=False, env=environment)
    wall_s, after = time.monotonic() - begin, cpu_use()
    if done.returncode:
        raise EngineStartError(done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}")
    startup = msgspec.json.decode(done.stdout, type=Startup)
    return MeasuredStartup(startup, wall_s, foreign_cpu(before, after), after.steal - before.steal)


def start_to_first_token(config: EngineConfig) -> Startup:
    """Start an engine in this process, which does nothing else, and return the times."""
    import_s = seconds_since_process_start()
    phases: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        phases[name] = round(seconds, 3)

    started = started_engine(config, on_phase=note, meanwhile=make_ahead)
    with started as (process, _), LLM(connect=process.address) as llm:
        ready_s = seconds_since_process_start()
        prompt: Any = {"prompt_token_ids": warm_up_workload(HOST_ID_SPAN).requests[0].prompt}
        llm.generate(prompt, request_params(1), use_tqdm=False)
        first_token_s = seconds_since_process_start()
        memory = memory_mb()
    return Startup(round(import_s, 2), round(ready_s, 2), round(first_token_s, 2), phases, **memory)


if __name__ == "__main__":
    try:
        startup = start_to_first_token(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except EngineCoreError as error:
        sys.exit(str(error))
    print(msgspec.json.encode(startup).decode())
