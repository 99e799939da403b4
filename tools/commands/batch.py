"""`engine-core batch`: answer the requests of a file in OpenAI's batch format, with an engine of its own or a running
one.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from frontend.http.openai.batch import run_batch
from frontend.http.openai.batch_files import BatchOutput, check_requests
from frontend.http.process.options import HttpOptions
from frontend.http.wire.server import open_engine
from frontend.text.known_tokenizers import make_ahead
from ipc.errors import ConfigError
from tools.commands.http import add_receipt_key, read_receipt_key
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.service.remote_batch import run_remote
from tools.service.start import check_connect, engine_at

_MAX_IN_FLIGHT = 256
_SHOW_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Answer the requests; return the exit status, 1 if one failed. Errors: ConfigError; those of the engine."""
    parsed = _parser().parse_args(arguments)
    source, target = Path(parsed.file), Path(parsed.output or _output_name(parsed.file))
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"the output would be the input, {source}")
    if not 1 <= parsed.max_in_flight <= 65_536:
        raise ConfigError(f"--max-in-flight must be from 1 to 65536; got {parsed.max_in_flight}")
    if parsed.url is not None:
        return _answer_remotely(parsed, source, target)
    options = engine_options(parsed)
    if parsed.model_name is not None:
        options["model"] = parsed.model_name
    check_connect(parsed.connect, options)
    total = check_requests(source)
    output = BatchOutput(target)
    progress = _Progress(total, len(output.done))
    try:
        if len(output.done) < total:
            with engine_at(parsed.connect, options, meanwhile=make_ahead) as (address, _, _):
                _answer(address, parsed, source, output, progress)
    finally:
        output.close()
    progress.end(output.num_failed, target)
    return 1 if output.num_failed else 0


def _answer_remotely(parsed: argparse.Namespace, source: Path, target: Path) -> int:
    """Answer the requests by a batch of a running server; return the exit status."""
    given = {"MODEL": parsed.model_name, "--connect": parsed.connect, **engine_options(parsed)}
    if names := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"--url is a server that runs already: leave out {', '.join(names)}")
    progress = _Progress(check_requests(source), 0)
    num_failed = run_remote(parsed.url, source, target, progress.reach)
    progress.reach(progress.total)
    progress.end(num_failed, target)
    return 1 if num_failed else 0


def _answer(address: str, parsed: argparse.Namespace, source: Path, output: BatchOutput, progress: "_Progress") -> None:
    names = tuple(parsed.served_model_name)
    http = HttpOptions(
        served_model_names=names,
        checks_host=False,
        tool_call_parser=parsed.tool_call_parser,
        reasoning_parser=parsed.reasoning_parser,
        receipt_key=read_receipt_key(parsed.receipt_key),
    )
    engine = open_engine(address, client_name="batch")
    try:
        uvloop.run(run_batch(engine, http, source, output, max_in_flight=parsed.max_in_flight, on_answer=progress.add))
    finally:
        engine.close()


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core batch",
        usage="engine-core batch FILE.jsonl [MODEL | --connect ADDR | --url URL] [-o OUTPUT.jsonl] [OPTION ...]",
        description="Answer a file of requests in OpenAI's batch format. If it is run again, it continues where it "
        "stopped.",
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="one request a line: custom_id, method, url, body")
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model; default: the demo model")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: FILE.out.jsonl")
    parser.add_argument("--connect", metavar="ADDR", help="use the engine at this address (of `engine-core serve`)")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="use this HTTP server's batches (serve --store); ENGINE_CORE_API_KEY is its key",
    )
    add_receipt_key(parser)
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=_MAX_IN_FLIGHT,
        metavar="N",
        help="requests in flight; default: %(default)s",
    )
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="the model's names")
    parser.add_argument("--tool-call-parser", metavar="NAME", help="see docs/http.md")
    parser.add_argument("--reasoning-parser", metavar="NAME", help="see docs/http.md")
    add_engine_options(parser)
    return parser


def _output_name(source: str) -> str:
    return source.removesuffix(".jsonl") + ".out.jsonl"


class _Progress:
    """Progress on standard error: a line a second on a terminal, and a last line."""

    def __init__(self, total: int, num_done: int) -> None:
        self.total, self._num_before, self._num_done = total, num_done, num_done
        self._is_shown = sys.stderr.isatty()
        self._begin = self._shown_at = time.monotonic()

    def add(self) -> None:
        """Count an answer."""
        self.reach(self._num_done + 1)

    def reach(self, num_done: int) -> None:
        """Show how many answers there are."""
        self._num_done = num_done
        now = time.monotonic()
        if self._is_shown and now - self._shown_at > _SHOW_S:
            self._shown_at = now
            print(f"\rengine-core: {self._num_done} of {self.total} answered", end="", file=sys.stderr, flush=True)

    def end(self, num_failed: int, target: Path) -> None:
        """Print what was done."""
        new, before = self._num_done - self._num_before, self._num_before
        there = f", {before} were already there" if before else ""
        seconds = time.monotonic() - self._begin
        begin = "\r" if self._is_shown else ""
        print(
            f"{begin}engine-core: {new} answered in {seconds:.1f} s{there}, {num_failed} failed: {target}",
            file=sys.stderr,
            flush=True,
        )
