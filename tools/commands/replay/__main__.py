"""`engine-core replay FILE`: run a capture again and report the first difference."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence

import msgspec

from core.capture.bounds import bounded_memory
from core.capture.file import CaptureFile
from core.capture.records import OtherModelError
from core.capture.redaction import redact
from ipc.errors import CaptureFileError, ConfigError, ModelFileError
from ipc.log_lines import counted
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.wire.messages import Submission
from tools.commands.replay.compare import run_compare
from tools.commands.replay.differences import Difference, name_request
from tools.commands.replay.html.page import write_html
from tools.commands.replay.live import LiveReport, print_live, run_live
from tools.commands.replay.perfetto import MAX_EVENTS, write_perfetto
from tools.commands.replay.rerun import Rerun, real_executor, recorded_executor, replay_config, rerun
from tools.commands.replay.shrink.command import judge, run_shrink
from tools.commands.replay.what_if.command import run_what_if
from tools.commands.replay.what_if.options import parse_changes
from tools.flags.options import ArgumentParser, Modules, print_error

# `engine-core replay redact FILE OUT`: a capture without its content, which decides as the original does.


def run_redact(arguments: Sequence[str]) -> int:
    """Write the file and return the exit status. Errors: CaptureFileError, ConfigError, OSError."""
    parser = ArgumentParser(
        prog="engine-core replay redact",
        usage="engine-core replay redact FILE OUT",
        description="Write a capture without its content: tokens, salts and tenants are renamed under a key that is "
        "thrown away. Every decision is kept, and the new file replays. Times, lengths, and how many "
        "tokens requests share are kept too, because the decisions depend on them.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT", help="a new file")
    _add_scheduler(parser)
    parsed = parser.parse_args(arguments)
    done = redact(CaptureFile(parsed.file, parsed.scheduler_cls), parsed.out)
    print(
        f"{parsed.out}: {counted(done.num_steps, 'step')}, {counted(done.num_requests, 'request')}, every decision as "
        f"in {parsed.file}"
    )
    return 0


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduler-cls",
        default=BUILT_IN_SCHEDULER,
        metavar="NAME",
        help="the scheduler that the capture was made with; a file never chooses it",
    )


EXIT_SAME = 0
EXIT_DIFFERS = 3
EXIT_DAMAGED = 4  # damaged or incomplete
EXIT_OTHER_MODEL = 5  # another model, or other options


_COMMANDS = {"redact": run_redact, "shrink": run_shrink}


class Report(msgspec.Struct, frozen=True):
    """The object that --json prints for the modes resched and full."""

    capture: str
    mode: str
    engine_version: str  # of the engine that wrote it
    model: str
    fingerprint: str
    numerics: str
    num_steps: int  # complete steps in the file
    num_dropped_bytes: int  # of an incomplete last record
    has_close: bool  # the captured engine ended orderly
    num_last_inputs: int  # messages after the last step, for a step that did not end
    last_requests: str  # the requests in them
    run: Rerun
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Replay the capture and return the exit status, one of EXIT_... or of argparse."""
    try:
        if arguments and arguments[0] in _COMMANDS:
            with bounded_memory("the capture"):
                return _COMMANDS[arguments[0]](arguments[1:])
        return _replay(arguments)
    except CaptureFileError as error:
        print_error(str(error))
        return EXIT_DAMAGED
    except (OtherModelError, ModelFileError) as error:
        print_error(str(error))
        return EXIT_OTHER_MODEL


def _replay(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    _check_options(parsed)
    has_model = parsed.mode != "resched"
    with contextlib.nullcontext() if has_model else bounded_memory(parsed.file):
        return _run_mode(parsed)


def _run_mode(parsed: argparse.Namespace) -> int:
    if parsed.fails_when is not None:
        return judge(parsed.file, parsed.fails_when)
    file = CaptureFile(parsed.file, parsed.scheduler_cls)
    _check_complete(file)
    if parsed.what_if or parsed.perfetto or parsed.html or parsed.mode != "resched":
        _check_whole(file, parsed.mode)
    if parsed.compare is not None:
        return run_compare(file, parsed.compare, as_json=parsed.json)
    if parsed.what_if:
        run_what_if(file, parsed.what_if, is_open=parsed.arrivals == "recorded", as_json=parsed.json)
        return EXIT_SAME
    if parsed.html:
        print(f"{parsed.html}: {write_html(file, parsed.html):,} bytes; open it in a browser")
        return EXIT_SAME
    if parsed.perfetto:
        count = write_perfetto(file, parsed.perfetto)
        cut = f", of which the file has the first {MAX_EVENTS}" if count > MAX_EVENTS else ""
        print(f"{parsed.perfetto}: {counted(count, 'event')}{cut}; open it at ui.perfetto.dev or chrome://tracing")
        return EXIT_SAME
    return _play(file, parsed) if parsed.mode == "live" else _run(file, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core replay",
        usage="engine-core replay FILE [--mode resched|full|live] [--what-if NAME=VALUE ...] [OPTION ...]\n"
        "       engine-core replay FILE --fails-when EXPR | --compare OTHER\n"
        "       engine-core replay redact FILE OUT\n"
        "       engine-core replay shrink FILE OUT --fails-when EXPR",
        description="Run a capture (of an engine started with --capture) again and report the first difference.",
        epilog="exit status: 0 same, 1 internal error, 2 usage, 3 differs, 4 damaged or incomplete, 5 other model",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--mode",
        choices=("resched", "full", "live"),
        default="resched",
        help="resched: the scheduler with the recorded tokens, no model (the default); full: with the model, every "
        "token compared; live: as a client of a running engine",
    )
    parser.add_argument("--model", metavar="PATH", help="full: path of the capture's model on this machine")
    parser.add_argument("--mmproj", metavar="PATH", help="full: path of the capture's --mmproj file on this machine")
    parser.add_argument(
        "--lora-modules",
        action=Modules,
        default={},
        nargs="+",
        metavar="NAME=PATH",
        help="full: adapters that the engine loaded while it ran, or the paths of its initial adapters on this machine",
    )
    parser.add_argument(
        "--weights",
        default=[],
        nargs="+",
        metavar="PATH",
        help="full: files of the weights that the engine got while it ran",
    )
    parser.add_argument("--connect", metavar="ADDR", help="live: address of the engine")
    timing = parser.add_mutually_exclusive_group()
    timing.add_argument(
        "--asap", action="store_true", help="live: send all requests at once instead of at their recorded times"
    )
    timing.add_argument("--speed", type=float, metavar="X", help="live: X times as fast as recorded")
    parser.add_argument(
        "--what-if",
        action="append",
        metavar="NAME=VALUE",
        help="simulate the capture's requests with another scheduler option, the recorded tokens and a step time "
        "fitted to its steps; several values with commas; may be repeated",
    )
    _add_scheduler(parser)
    _add_views(parser)
    parser.add_argument(
        "--arrivals",
        choices=("waiting", "recorded"),
        default="waiting",
        help="what-if: clients that had one request at a time wait for its answer, or all clients keep their recorded "
        "times",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    return parser


def _add_views(parser: argparse.ArgumentParser) -> None:
    """Add the options that write or judge something instead of comparing."""
    parser.add_argument(
        "--perfetto",
        metavar="OUT",
        help="write the capture as a trace for Perfetto or Chrome: steps, requests, counters (OUT.json or OUT.json.gz)",
    )
    parser.add_argument(
        "--html",
        metavar="OUT",
        help="write the capture as one HTML page: timelines, latencies, and why the slowest requests waited",
    )
    parser.add_argument(
        "--fails-when",
        metavar="EXPR",
        help="simulate the capture with this version and exit for git bisect: 1 if EXPR holds, 0 if not, 125 if it "
        "cannot be judged; see `replay shrink --help`",
    )
    parser.add_argument(
        "--compare",
        metavar="OTHER",
        help="another version of engine-core, as a checkout or as the path of its command: report the first decision "
        "that differs from this version's",
    )


def _check_options(parsed: argparse.Namespace) -> None:
    """Check that the options fit the mode. Errors: exit status 2."""
    is_live = parsed.mode == "live"
    parser = _parser()
    if is_live and parsed.connect is None:
        parser.error("--mode live needs --connect ADDR")
    if not is_live and (parsed.connect is not None or parsed.asap or parsed.speed is not None):
        parser.error("--connect, --asap and --speed are for --mode live only")
    try:
        parse_changes(parsed.what_if or [])
    except ConfigError as error:
        parser.error(str(error))
    if parsed.what_if and (parsed.mode != "resched" or parsed.model is not None):
        parser.error("--what-if simulates without a model: leave out --mode and --model")
    if parsed.perfetto and (parsed.mode != "resched" or parsed.model is not None or parsed.what_if):
        parser.error("--perfetto writes what was recorded: leave out --mode, --model and --what-if")
    alone = [flag for flag in ("what_if", "perfetto", "html", "fails_when", "compare") if getattr(parsed, flag)]
    if len(alone) > 1 or (alone and parsed.mode != "resched"):
        parser.error(f"--{alone[0].replace('_', '-')} cannot be combined with another mode")
    if parsed.arrivals != "waiting" and not parsed.what_if:
        parser.error("--arrivals is for --what-if only")
    if parsed.model is not None and parsed.mode != "full":
        parser.error("--model is for --mode full only")
    if parsed.mmproj is not None and parsed.mode != "full":
        parser.error("--mmproj is for --mode full only")
    if parsed.lora_modules and parsed.mode != "full":
        parser.error("--lora-modules is for --mode full only")
    if parsed.weights and parsed.mode != "full":
        parser.error("--weights is for --mode full only")
    if parsed.speed is not None and not 0 < parsed.speed < float("inf"):
        parser.error(f"--speed must be a number above 0, got {parsed.speed:g}")


def _check_complete(file: CaptureFile) -> None:
    """Check that the capture can be replayed exactly. Errors: CaptureFileError if records are missing."""
    if file.num_lost:
        lost = counted(file.num_lost, "record is", "records are")
        raise CaptureFileError(f"{file.path}: {lost} missing (the disk was too slow for them)")
    if not file.num_steps and file.close is None:
        raise CaptureFileError(f"{file.path}: it has no complete step ({file.num_dropped_bytes} bytes dropped)")


def _check_whole(file: CaptureFile, mode: str) -> None:
    """Check that the file has all of its requests. Errors: CaptureFileError if it begins with a checkpoint."""
    if file.begins_inside:
        raise CaptureFileError(
            f"{file.path}: it begins with a checkpoint at step {file.first_step}, so some of its requests arrived "
            "earlier: only --mode resched can run it"
        )
    if file.header.is_redacted and mode == "full":
        raise CaptureFileError(
            f"{file.path}: it is redacted, so its tokens are not those of a model: --mode full cannot run it"
        )


def _run(file: CaptureFile, parsed: argparse.Namespace) -> int:
    begin = time.monotonic()
    if parsed.mode == "full":
        config, executor = real_executor(file, parsed.model, parsed.lora_modules, parsed.mmproj)
    else:
        config, executor = replay_config(file.header), recorded_executor(file)
    try:
        run = rerun(file, config, executor, weights=parsed.weights)
    finally:
        executor.close()
    report = make_report(file, parsed.mode, run, time.monotonic() - begin)
    if parsed.json:
        _print_json(report)
    else:
        print_report(report)
    return EXIT_SAME if run.difference is None else EXIT_DIFFERS


def _play(file: CaptureFile, parsed: argparse.Namespace) -> int:
    report = run_live(file, parsed.connect, None if parsed.asap else parsed.speed or 1.0)
    if parsed.json:
        _print_json(report)
    else:
        print_live(report)
    return EXIT_DIFFERS if report.differences or report.failures else EXIT_SAME


def make_report(file: CaptureFile, mode: str, run: Rerun, seconds: float) -> Report:
    """Return the report of a run that took `seconds`."""
    header = file.header
    return Report(
        capture=str(file.path),
        mode=mode,
        engine_version=header.engine_version,
        model=header.model.name,
        fingerprint=header.model.fingerprint,
        numerics=header.model.numerics,
        num_steps=file.num_steps,
        num_dropped_bytes=file.num_dropped_bytes,
        has_close=file.close is not None,
        num_last_inputs=len(last := file.last_inputs()),
        last_requests=", ".join(
            name_request((one.client, one.message.number), 0) for one in last if isinstance(one.message, Submission)
        ),
        run=run,
        seconds=round(seconds, 3),
    )


def _print_json(report: Report | LiveReport) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def print_report(report: Report) -> None:
    """Print the report as text."""
    run = report.run
    print(
        f"{report.capture}: {counted(report.num_steps, 'step')} of {report.model} "
        f"({report.fingerprint:.16}, {report.numerics}), written by engine-core {report.engine_version}"
    )
    if not report.has_close:
        print(
            f"  the capture has no end: the engine was killed or is still running; {report.num_dropped_bytes} bytes "
            "dropped"
        )
    if report.num_last_inputs:
        what = f"{counted(report.num_last_inputs, 'message')} arrived for a step that it did not finish"
        print(f"  {what}: {report.last_requests}")
    if run.engine_error:
        print(f"  the captured engine failed in step {run.num_steps - 1}: {run.engine_error}")
    print(
        f"  {report.mode}: {counted(run.num_steps, 'step')}, {counted(run.num_requests, 'request')}, "
        f"{counted(run.num_aborted, 'abort')}, {counted(run.num_preemptions, 'preemption')}, "
        f"{counted(run.num_cached_tokens, 'prefix-cache token')}, {counted(run.num_tokens, 'token')} "
        f"in {report.seconds:.2f} s"
    )
    print("  0 differences" if run.difference is None else _describe(run.difference))


def _describe(difference: Difference) -> str:
    where = f"  first difference: {difference.kind}, step {difference.step} (byte {difference.offset})"
    if difference.client is not None:
        where += f", client {difference.client} request {difference.request}"
    if difference.position is not None:
        where += f", position {difference.position}"
    if difference.expected is not None:
        where += f": expected token {difference.expected}, got {difference.got}"
    return "\n    ".join([where, *difference.details])
