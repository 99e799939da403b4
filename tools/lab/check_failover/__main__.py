"""`engine-core check-failover`: kill a service under its streams, and compare each stream with an undisturbed one.

The service is any that speaks OpenAI's API. The command that kills it is the operator's own line for the shell; nothing
that the service sends becomes a part of it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tools.flags.options import ArgumentParser
from tools.lab.check_failover.calls import Call, Received, Request, Service, ServiceError, wait_until_back
from tools.lab.check_failover.verdict import KINDS, Verdict, judge, longest_pause

EXIT_HELD = 0
EXIT_BROKEN = 3  # a stream was lost, doubled or different, or paused for too long, or the service is not back
EXIT_NOT_JUDGED = 4  # undisturbed runs differ, or nothing was in flight at a kill
#: Moment of the kill -> the share of all pieces of the streams that have come by then. None: before the first.
MOMENTS: dict[str, float | None] = {"prefill": None, "early": 0.05, "mid": 0.5, "late": 0.9}
_KILL_S = 60.0  # longest time for the kill command
_STDERR = 2
_MOST_PATIENCE_S = 86_400.0
_MAX_REQUESTS = 1024
_TEMPERATURE = 0.8
_WORDS = (
    "river stone lantern harbour winter market garden copper bridge window forest letter mountain silver engine paper "
    "island summer candle thunder orchard mirror station blanket"
)


class Stream(msgspec.Struct, frozen=True):
    """What became of one request; an object of --json."""

    request: str
    verdict: str  # one of verdict.KINDS
    at: int  # character
    length: int  # characters
    why: str
    pause_s: float | None


class Cell(msgspec.Struct, frozen=True):
    """What became of all requests at one kill; an object of --json. The undisturbed run is one too."""

    moment: str  # undisturbed, or one of MOMENTS
    num_open: int  # requests without their end when the kill command began
    back_s: float | None  # from the kill to the first answer of a new request; None = there was none
    streams: list[Stream]

    def count(self, kind: str) -> int:
        """Return how many streams have this verdict."""
        return sum(one.verdict == kind for one in self.streams)

    @property
    def pause_s(self) -> float:
        """The longest pause of a stream that ended."""
        return max((one.pause_s for one in self.streams if one.pause_s is not None), default=0.0)


def main(arguments: Sequence[str]) -> int:
    """Kill and compare; return the exit status. Errors: ConfigError, ServiceError."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    for name, most in (
        ("requests", _MAX_REQUESTS),
        ("tokens", 1 << 20),
        ("prompt_words", 1 << 20),
        ("repeats", 1000),
        ("undisturbed", 1000),
    ):
        if not 1 <= getattr(parsed, name) <= most:
            parser.error(f"--{name.replace('_', '-')} must be from 1 to {most}")
    if not 0 < parsed.patience <= _MOST_PATIENCE_S:
        parser.error(f"--patience must be above 0 and at most {_MOST_PATIENCE_S:.0f}")
    if parsed.max_pause is not None and not parsed.max_pause >= 0:
        parser.error("--max-pause must be at least 0")
    service = Service(parsed.url, os.environ.get("OPENAI_API_KEY", ""))
    model = parsed.model or service.first_model(parsed.patience)
    requests = make_requests(model, parsed)
    check = Check(service, requests, parsed.kill, parsed.patience)
    if not parsed.json:
        print(f"{parsed.url}, model {model!r:.200}: {len(requests)} requests at once")
    cells = []
    for cell in check.run([moment for _ in range(parsed.repeats) for moment in parsed.moments], parsed.undisturbed):
        cells.append(cell)
        if not parsed.json:
            _print_cell(cell, with_head=len(cells) == 1)
    status, reasons = conclusion(cells, parsed.max_pause)
    if parsed.json:
        found = {"url": parsed.url, "model": model, "cells": msgspec.to_builtins(cells), "reasons": reasons}
        print(json.dumps({**found, "held": status == EXIT_HELD}))
    else:
        _print_end(cells, status, reasons)
    return status


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core check-failover",
        usage="engine-core check-failover --url URL --kill 'COMMAND' [OPTION ...]",
        description="Kill a service with OpenAI's API while it answers, and compare each answer with that of an "
        "undisturbed run. OPENAI_API_KEY is sent if it is set.",
        epilog="exit status: 0 every stream is exact, 1 the check could not be made, 2 usage, 3 a stream was lost, "
        "doubled or different, or paused for too long, 4 cannot be judged: undisturbed answers differ among "
        "themselves, or nothing was in flight at a kill",
    )
    parser.add_argument("--url", required=True, help="of the service, like http://127.0.0.1:8000")
    parser.add_argument("--kill", required=True, metavar="COMMAND", help="a shell command that kills (a part of) it")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the service lists")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS), help="default: all")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="kills at each moment; default: %(default)s"
    )
    parser.add_argument(
        "--undisturbed", type=int, default=1, metavar="N", help="runs at once without a kill; default: %(default)s"
    )
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="at once; default: %(default)s")
    parser.add_argument("--apis", nargs="+", choices=("chat", "completions"), default=["chat", "completions"])
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="max_tokens; default: %(default)s")
    parser.add_argument("--prompt-words", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--extra",
        type=_fields,
        default={},
        metavar="JSON",
        help="more fields of a request, like '{\"ignore_eos\": true}'",
    )
    parser.add_argument("--max-pause", type=float, metavar="S", help="longest pause of a stream; default: any")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        metavar="S",
        help="longest time for an answer, and for the service to be back; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    return parser


def _fields(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from None


def make_requests(model: str, parsed: Any) -> list[Request]:
    """Return the requests of the check: each API, streamed and whole, greedy and seeded, in turn, each its own text."""
    kinds = [(api, streamed, seeded) for seeded in (False, True) for streamed in (True, False) for api in parsed.apis]
    vocabulary, requests = _WORDS.split(), list[Request]()
    for number in range(parsed.requests):
        api, is_streamed, is_seeded = kinds[number % len(kinds)]
        words = (
            vocabulary[(number * 7 + place * (place + number)) % len(vocabulary)]
            for place in range(parsed.prompt_words)
        )
        text = f"Tell a long story, number {number}, with these words: {' '.join(words)}."
        prompt = {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        drawn = {"temperature": _TEMPERATURE, "seed": number} if is_seeded else {"temperature": 0}
        body = {"model": model, **prompt, "max_tokens": parsed.tokens, "stream": is_streamed, **drawn, **parsed.extra}
        requests.append(Request(api, is_streamed, is_seeded, body))
    return requests


class Check:
    """The same requests again and again: alone, together undisturbed, and together with a kill.

    kill: a line for the shell. patience: seconds for a request, and for the service to be back.
    """

    def __init__(self, service: Service, requests: Sequence[Request], kill: str, patience: float) -> None:
        self._service, self._requests, self._kill, self._patience = service, requests, kill, patience
        self._news = threading.Condition()
        self._whole: list[Received] = []
        self._is_steady: list[bool] = []
        self._usual_s = [0.0] * len(requests)  # how long each takes at most, undisturbed, with all at once
        self._first_s, self._num_pieces = 0.0, 0  # of the undisturbed run with all at once

    def run(self, moments: Sequence[str], num_undisturbed: int = 1) -> Iterator[Cell]:
        """Yield the undisturbed runs as one, and then a cell for each moment, until the service is not back.

        Errors: ServiceError.
        """
        yield self._undisturbed(num_undisturbed)
        for moment in moments:
            cell = self._cell(moment)
            yield cell
            if cell.back_s is None:
                return

    def _undisturbed(self, num_undisturbed: int) -> Cell:
        for index, request in enumerate(self._requests):
            (received,), _ = self._ask([request])
            if received.error or not received.finish:
                why = received.error or "it ended without a finish_reason"
                raise ServiceError(f"request {index} ({request.name}) is not answered undisturbed: {why}")
            self._whole.append(received)
        verdicts = [Verdict("exact")] * len(self._requests)
        for _ in range(num_undisturbed):
            together, begin = self._ask(self._requests)
            self._usual_s = [
                max(before, got.end - got.begin) for before, got in zip(self._usual_s, together, strict=True)
            ]
            found = [judge(got, whole) for got, whole in zip(together, self._whole, strict=True)]
            verdicts = [new if old.kind == "exact" else old for old, new in zip(verdicts, found, strict=True)]
        self._is_steady = [verdict.kind == "exact" for verdict in verdicts]
        streamed = [got for got, one in zip(together, self._requests, strict=True) if one.is_streamed and got.times]
        self._num_pieces = sum(len(got.times) for got in streamed)
        self._first_s = min((got.times[0] for got in streamed), default=begin) - begin
        unsteady = [verdict._replace(kind="unsteady") if verdict.kind != "exact" else verdict for verdict in verdicts]
        streams = zip(self._requests, unsteady, strict=True)
        return Cell("undisturbed", 0, 0.0, [Stream(request.name, *verdict, None) for request, verdict in streams])

    def _cell(self, moment: str) -> Cell:
        struck, num_open, back = 0.0, 0, list[float | None]()
        watch = threading.Thread(target=lambda: back.append(self._wait_until_back()))

        def strike(calls: list[Call]) -> None:
            nonlocal struck, num_open
            self._wait_for(moment, calls)
            num_open = sum(call.is_open for call in calls)
            struck = time.monotonic()
            self._strike()
            watch.start()

        received, _ = self._ask(self._requests, strike)
        watch.join()
        streams = []
        for index, (request, got) in enumerate(zip(self._requests, received, strict=True)):
            verdict = judge(got, self._whole[index], is_steady=self._is_steady[index])
            streams.append(Stream(request.name, *verdict, longest_pause(got, struck, self._usual_s[index])))
        (back_at,) = back
        return Cell(moment, num_open, None if back_at is None else back_at - struck, streams)

    def _ask(
        self, requests: Sequence[Request], strike: Callable[[list[Call]], None] | None = None
    ) -> tuple[list[Received], float]:
        """Send requests at once; return what came of each, and when they were sent. strike: called when all are."""
        begin = time.monotonic()
        calls = [Call(self._service, request, self._patience, self._on_news) for request in requests]
        deadline = begin
        try:
            if strike is not None:
                strike(calls)
            deadline = time.monotonic() + self._patience
        finally:  # after an error they are given up
            received = [call.join(deadline) for call in calls]
        return received, begin

    def _wait_for(self, moment: str, calls: Sequence[Call]) -> None:
        """Wait until so much of the answers has come, or all have ended."""
        share = MOMENTS[moment]
        with self._news:
            if share is None:
                self._news.wait_for(lambda: not any(call.is_open for call in calls), self._first_s / 2)
                return
            streamed = [call for call, one in zip(calls, self._requests, strict=True) if one.is_streamed]
            wanted = max(1, round(share * self._num_pieces))

            def is_reached() -> bool:
                reached = sum(len(call.times) for call in streamed) >= wanted
                return reached or not any(call.is_open for call in streamed or calls)

            self._news.wait_for(is_reached, self._patience)

    def _strike(self) -> None:
        """Run the operator's command. Errors: ServiceError."""
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._kill], stdin=subprocess.DEVNULL, stdout=_STDERR, timeout=_KILL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ServiceError(f"the kill command did not end within {_KILL_S:.0f} s") from None
        if done.returncode:
            raise ServiceError(f"the kill command ended with status {done.returncode}, so it may have killed nothing")

    def _wait_until_back(self) -> float | None:
        return wait_until_back(self._service, self._requests[0], self._patience)

    def _on_news(self) -> None:
        with self._news:
            self._news.notify_all()


def conclusion(cells: Sequence[Cell], max_pause: float | None) -> tuple[int, list[str]]:
    """Return the exit status, and what speaks against it."""
    broken, unjudged = list[str](), list[str]()
    for cell in cells[1:]:
        for kind in ("lost", "doubled", "different"):
            if count := cell.count(kind):
                broken.append(f"{cell.moment}: {count} of {len(cell.streams)} {kind}")
        if cell.back_s is None:
            broken.append(f"{cell.moment}: the service is not back")
        if max_pause is not None and cell.pause_s > max_pause:
            broken.append(f"{cell.moment}: a stream paused for {cell.pause_s:.2f} s")
        if not cell.num_open:
            unjudged.append(f"{cell.moment}: nothing was in flight when it was killed: ask for more --tokens")
    if count := cells[0].count("unsteady"):
        unjudged.append(f"undisturbed: {count} of {len(cells[0].streams)} answers are not those that they are alone")
    status = EXIT_BROKEN if broken else EXIT_NOT_JUDGED if unjudged else EXIT_HELD
    return status, broken + unjudged


def _print_cell(cell: Cell, *, with_head: bool) -> None:
    if with_head:
        print(f"{'killed in':12}{'in flight':>10}{''.join(f'{kind:>11}' for kind in KINDS)}{'pause s':>9}{'back s':>8}")
    counts = "".join(f"{cell.count(kind):11}" for kind in KINDS)
    is_kill = cell.moment != "undisturbed"
    times = f"{cell.pause_s:9.2f}{'never' if cell.back_s is None else f'{cell.back_s:.2f}':>8}" if is_kill else ""
    print(
        f"{cell.moment if is_kill else 'not killed':12}{cell.num_open if is_kill else '':>10}{counts}{times}",
        flush=True,
    )


def _print_end(cells: Sequence[Cell], status: int, reasons: Sequence[str]) -> None:
    found = Counter((one.request, one.verdict) for cell in cells[1:] for one in cell.streams if one.verdict != "exact")
    for (request, verdict), count in sorted(found.items()):
        print(f"  {request}: {count} {verdict}")
    first = next((one for cell in cells[1:] for one in cell.streams if one.verdict not in ("exact", "unsteady")), None)
    if first is not None:
        much = f", {first.length} characters" if first.length else ""
        print(f"  the first: {first.request}, {first.verdict} at character {first.at}{much}: {first.why or 'no error'}")
    words = {EXIT_HELD: "held: every stream is exact", EXIT_BROKEN: "did not hold", EXIT_NOT_JUDGED: "not judged"}
    print(f"{words[status]}{': ' if reasons else ''}{'; '.join(reasons)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
