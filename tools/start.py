"""Start an engine process from a program, and show its phases on standard error."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from frontend.engine.process import EngineProcess, OnPhase
from ipc.config import EngineConfig, config_from_options
from ipc.errors import ConfigError
from ipc.log_lines import LogFormat, log_line


def check_connect(connect: str | None, options: Mapping[str, Any]) -> None:
    """Check that no engine options were given beside --connect. Errors: ConfigError that names them."""
    if connect is not None and options:
        given = ", ".join("--" + name.replace("_", "-") for name in options)
        raise ConfigError(f"--connect uses an engine as it runs; leave out {given}")


@contextlib.contextmanager
def engine_at(
    connect: str | None, options: Mapping[str, Any]
) -> Iterator[tuple[str, EngineProcess | None, float | None]]:
    """Yield (address, process, seconds of its start) of an engine with these options, or of that at `connect`.

    The last two are None for an engine that was already running. Errors: those of started_engine().
    """
    if connect is not None:
        yield connect, None, None
        return
    with started_engine(config_from_options(**options)) as (process, start_s):
        yield process.address, process, start_s


@contextlib.contextmanager
def started_engine(config: EngineConfig, *, on_phase: OnPhase | None = None) -> Iterator[tuple[EngineProcess, float]]:
    """Yield (a ready engine, seconds its start took); the engine is stopped at the end.

    on_phase: None = show the phases.
    Errors: ConfigError, ModelFileError, OutOfMemoryError, EngineStartError.
    """
    begin = time.monotonic()
    with contextlib.nullcontext(on_phase) if on_phase is not None else shown_phases() as show:
        process = EngineProcess(config, on_phase=show)
        process.start()
        process.wait_ready()
    try:
        yield process, time.monotonic() - begin
    finally:
        process.close()


@contextlib.contextmanager
def shown_phases() -> Iterator[OnPhase]:
    """Yield a function that shows a phase: in one line that is redrawn on a terminal, in a line each elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield print_phase
        return
    with console.status("starting the engine") as status:
        yield lambda name, seconds: status.update(f"starting the engine: {name} ({seconds:.1f} s)")


def print_phase(name: str, seconds: float) -> None:
    """Print one phase on standard error. seconds: since the engine process began."""
    print(f"engine-core: {seconds:6.2f} s  {name}", file=sys.stderr, flush=True)


def phase_printer(form: LogFormat) -> OnPhase:
    """Return a function that prints a phase on standard error in this format."""
    if form == "text":
        return print_phase
    return lambda name, seconds: print(
        log_line(form, "starting", {"phase": name, "seconds": round(seconds, 3)}), file=sys.stderr, flush=True
    )
