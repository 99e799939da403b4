"""`engine-core replay FILE --what-if NAME=VALUE ...`: other options for a captured workload, simulated."""

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from core.capture.file import CaptureFile
from ipc.log_lines import counted
from ipc.options.block_stores import NO_STORE
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.options import parse_changes
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.report import TIMES, Changed, Figures, Simulator, WhatIf, what_if
from tools.commands.replay.what_if.step_time import fit

_UNCOVERED_PERCENT = 5.0  # share of steps above which a line says that their times are extrapolated
_WIDTH = 110  # columns of text: of the table
_NAMES = {
    "tokens_per_s": "tokens/s",
    "ttft_mean_ms": "TTFT mean",
    "ttft_p99_ms": "TTFT p99",
    "tpot_mean_ms": "TPOT mean",
    "e2e_mean_ms": "E2E mean",
    "e2e_p99_ms": "E2E p99",
}


def run_what_if(file: CaptureFile, texts: Sequence[str], *, is_open: bool, as_json: bool) -> None:
    """Simulate and print. texts: NAME=VALUE[,VALUE...]. Errors: ConfigError, CaptureFileError, OtherModelError."""
    changes = parse_changes(texts)
    config = msgspec.structs.replace(replay_config(file.header), **NO_STORE)  # the blocks would not be read
    recording = read_recording(file)
    time = fit(recording.features, recording.durations)
    report = what_if(str(file.path), Simulator(config, file.header.model, recording, time, is_open), changes)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_what_if(report)


def print_what_if(report: WhatIf) -> None:
    """Print the report as a table: a column for each figure, a row for each run."""
    print(
        f"{report.capture}: {counted(report.num_requests, 'request')}, {counted(report.recorded.num_steps, 'step')} of "
        f"{report.model}; "
        f"step times fitted within {report.step_error_median_percent:g} % (median), "
        f"{report.step_error_mean_percent:g} % (mean), {report.slow_steps_percent:g} % of the steps disturbed"
    )
    table = Table(title="times in milliseconds", title_justify="left")
    table.add_column("")
    for name in TIMES:
        table.add_column(_NAMES[name], justify="right")
    table.add_column("cached", justify="right")
    table.add_column("preempted", justify="right")
    table.add_row("recorded", *_cells(report.recorded))
    table.add_row("simulated", *_cells(report.simulated))
    table.add_row("  error", *(f"{report.simulated_error[name]:+.1f} %" for name in TIMES), "", "")
    table.add_row("  spread", *(f"{report.spread[name]:.1f} %" for name in TIMES), "", "")
    for number, change in enumerate(report.changes, 1):
        table.add_section()
        table.add_row(f"what if {number}", *_cells(change.figures))
        table.add_row("  difference", *(_difference(change, name) for name in TIMES), "", "")
    for number, change in enumerate(report.changes, 1):
        print(f"what if {number}: {_name(change)}")
    Console(file=sys.stdout, highlight=False, width=_WIDTH).print(table)
    print("in brackets: smaller than the simulation's error or than the spread of its runs, so it may be none")
    for change in report.changes:
        _print_doubts(change, report.numerics)


def _print_doubts(change: Changed, numerics: str) -> None:
    name = _name(change)
    if change.uncovered_percent > _UNCOVERED_PERCENT:
        print(f"{name}: {change.uncovered_percent:g} % of the steps are larger than any measured one: extrapolated")
    if change.num_made_up_tokens:
        made_up = counted(change.num_made_up_tokens, "token is", "tokens are")
        print(f"{name}: {made_up} made up: requests get further than in the capture")
    if numerics != "L2":
        print(f"{name}: tokens as recorded; at numerics level {numerics} another schedule may give others")


def _name(change: Changed) -> str:
    return " ".join(f"{name}={value}" for name, value in change.options.items())


def _cells(figures: Figures) -> list[str]:
    times = [getattr(figures, name) for name in TIMES]
    shown = ["-" if value is None else f"{value:,.1f}" for value in times]
    return [*shown, str(figures.num_cached_tokens), str(figures.num_preemptions)]


def _difference(change: Changed, name: str) -> str:
    text = f"{change.difference[name]:+.1f} %"
    return text if abs(change.difference[name]) > change.error[name] else f"({text})"
