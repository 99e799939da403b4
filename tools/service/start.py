"""Start an engine process from a program, and show its phases on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from frontend.engine.process import EngineProcess, OnPhase
from frontend.engine.start_display import StartDisplay
from ipc.errors import ConfigError
from ipc.log_lines import LogFormat, log_line
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options


def check_connect(connect: str | None, options: Mapping[str, Any]) -> None:
    """Check that no engine options were given with --connect, except those that clients also have.

    Errors: ConfigError that names them.
    """
    others = [name for name in options if name != "chat_template"]
    if connect is not None and others:
        given = ", ".join("--" + name.replace("_", "-") for name in others)
        raise ConfigError(f"--connect uses a running engine, whose options are fixed; leave out {given}")


@contextlib.contextmanager
def engine_at(
    connect: str | None,
    options: Mapping[str, Any],
    *,
    is_quiet: bool = False,
    meanwhile: Callable[[EngineConfig], object] = lambda config: None,
) -> Iterator[tuple[str, EngineProcess | None, float | None]]:
    """Yield (address, process, seconds of its start) of an engine with these options, or of the one at `connect`.

    The last two are None for an engine that was already running. meanwhile: as in started_engine(). Errors: its.
    """
    if connect is not None:
        yield connect, None, None
        return
    started = started_engine(config_from_options(**options), is_quiet=is_quiet, meanwhile=meanwhile)
    with started as (process, start_s):
        yield process.address, process, start_s


@contextlib.contextmanager
def started_engine(
    config: EngineConfig,
    *,
    on_phase: OnPhase | None = None,
    is_quiet: bool = False,
    meanwhile: Callable[[EngineConfig], object] = lambda config: None,
) -> Iterator[tuple[EngineProcess, float]]:
    """Yield (a ready engine, seconds that its start took); stop the engine at the end.

    on_phase: None = show the phases if standard error is a terminal, unless is_quiet. meanwhile: called once the
    engine's process runs, with its config, before waiting for its start.
    Errors: ConfigError, ModelFileError, OutOfMemoryError, EngineStartError.
    """
    begin = time.monotonic()
    with StartDisplay(is_quiet=is_quiet) as display:
        process = EngineProcess(config, on_phase=on_phase or display)
        process.start()
        try:
            meanwhile(process.config)
            process.wait_ready()
        except BaseException:
            process.close()
            raise
    try:
        yield process, time.monotonic() - begin
    finally:
        process.close()


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
