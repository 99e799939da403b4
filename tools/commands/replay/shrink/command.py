"""`engine-core replay shrink FILE OUT --fails-when EXPR`, and `replay FILE --fails-when EXPR` for git bisect."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.capture.file import CaptureFile
from core.capture.output import check_capture
from core.kv.cache_kinds import room_of
from ipc.errors import CaptureFileError, ConfigError, EngineCoreError
from ipc.log_lines import counted
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from tools.commands.replay.fails_when import NAMES, TIMES, FailsWhen
from tools.commands.replay.shrink.trial import CONSTANT, Trial
from tools.commands.replay.shrink.workload import (
    Workload,
    changed,
    of_fixed_length,
    packed,
    params_of,
    prompt_of,
    read_workload,
)
from tools.commands.replay.shrink.written import describe, pytest_text, write_capture
from tools.commands.replay.what_if.recording import Recorded, read_recording
from tools.commands.replay.what_if.step_time import StepTime, fit
from tools.flags.options import ArgumentParser, print_error

EXIT_GOOD = 0
EXIT_BAD = 1
EXIT_SKIP = 125  # git bisect: this version cannot judge it
EXIT_ABORT = 128  # git bisect: stop


def run_shrink(arguments: Sequence[str]) -> int:
    """Shrink a capture and write the result; return the exit status. Errors: CaptureFileError, ConfigError."""
    parser = ArgumentParser(
        prog="engine-core replay shrink",
        usage="engine-core replay shrink FILE OUT --fails-when EXPR [--seconds S] [--pytest FILE]",
        description="Write the smallest capture that still fails: fewer and shorter requests, a smaller engine.",
        epilog="EXPR compares these values: " + "; ".join(f"{name}: {text}" for name, text in NAMES.items()),
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT", help="the new capture; it contains the remaining requests")
    parser.add_argument(
        "--fails-when", required=True, metavar="EXPR", help="the condition that must stay true, such as 'crashed'"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="longest search; default: %(default)g"
    )
    parser.add_argument("--pytest", metavar="FILE", help="also write a test, which passes once the condition is false")
    parsed = parser.parse_args(arguments)
    condition = FailsWhen(parsed.fails_when)
    check_capture(parsed.out)
    if parsed.pytest is not None and os.path.lexists(parsed.pytest):
        raise ConfigError(f"--pytest {parsed.pytest} exists already and is never overwritten: name another")
    file = CaptureFile(parsed.file)
    workload, trial = read_workload(file), Trial(condition, _time_of(file, condition))
    if not trial.fails(workload):
        raise ConfigError(
            f"{parsed.file}: {parsed.fails_when!r} is not true in a simulation of it: there is nothing to shrink"
        )
    begin = time.monotonic()
    shrinker = Shrinker(workload, trial.fails, parsed.seconds)
    left = shrinker.run()
    write_capture(left, parsed.out)
    if parsed.pytest is not None:
        if condition.names & TIMES:
            sys.stderr.write("engine-core: the test's steps take a millisecond each, not as long as captured\n")
        Path(parsed.pytest).write_text(pytest_text(left, parsed.fails_when, Path(parsed.file).name))
    late = ", out of time" if shrinker.is_out_of_time else ""
    print(f"{parsed.file}: {describe(workload.requests)}")
    seconds = time.monotonic() - begin
    print(f"{parsed.out}: {describe(left.requests)}; {counted(trial.num_runs, 'run')} in {seconds:.1f} s{late}")
    return 0


def judge(path: str, text: str) -> int:
    """Return the exit status for git bisect: whether the condition is true in a simulation of the capture.

    An invalid condition, or a path without a file, ends the bisection, because it would fail for every version.
    """
    try:
        condition = FailsWhen(text)
    except ConfigError as error:
        return _abort(str(error))
    if not os.path.exists(path):
        return _abort(f"there is no file {path}")
    try:
        file = CaptureFile(path)
        trial = Trial(condition, _time_of(file, condition))
        values = trial.values(read_workload(file))
    except EngineCoreError as error:
        print(f"{path}: this version cannot judge it: {error}")
        return EXIT_SKIP
    shown = ", ".join(f"{name} = {values.get(name)!r}" for name in NAMES if name in condition.names)
    is_bad = condition.holds(values)
    print(f"{path}: {'fails' if is_bad else 'does not fail'}: {shown}")
    return EXIT_BAD if is_bad else EXIT_GOOD


def _abort(text: str) -> int:
    print_error(text)
    return EXIT_ABORT


def _time_of(file: CaptureFile, condition: FailsWhen) -> StepTime:
    """Return the fitted time of a step, if the condition needs it. Errors: CaptureFileError."""
    if not condition.names & TIMES:
        return CONSTANT
    try:
        recording = read_recording(file)
    except CaptureFileError as error:
        raise CaptureFileError(
            f"{error}; times are fitted to the steps of the version that wrote the capture, so conditions with "
            f"{', '.join(sorted(condition.names & TIMES))} need a capture that this version decides in the same way"
        ) from None
    return fit(recording.features, recording.durations)


# Shrinker: the smallest workload that still fails: fewer requests, shorter ones, simpler ones, a smaller engine.


_NS_PER_MS = 1_000_000
_MAX_ROUNDS = 4
#: Options that are made as small as possible.
_SIZES = ("max_num_seqs", "max_num_batched_tokens", "num_blocks_override")
#: Fields of a request that are set to their defaults, one after the other.
_USUAL: dict[str, Any] = {"priority": 0, "cache_salt": "", "tenant": "", "deadline_ms": 0, "delivered": []}

Fails = Callable[[Workload], bool]


class OutOfTimeError(Exception):
    """The time for shrinking is used up; the smallest workload so far is kept."""


class Shrinker:
    """One search. workload: one that fails. seconds: time limit. best: the smallest failing workload so far."""

    def __init__(self, workload: Workload, fails: Fails, seconds: float) -> None:
        self.best = workload
        self.is_out_of_time = False
        self._fails = fails
        self._end = time.monotonic() + seconds

    def run(self) -> Workload:
        """Return the smallest workload that was found."""
        try:
            self._shrink()
        except OutOfTimeError:
            self.is_out_of_time = True
        return self.best

    def _shrink(self) -> None:
        self._clients()
        self._requests()
        self._each(of_fixed_length)
        for _ in range(_MAX_ROUNDS):
            before = self.best
            self._arrivals()
            self._simplify()
            self._sizes()
            self._options()
            self._requests()
            if self.best == before:
                return

    def _try(self, workload: Workload) -> bool:
        """Return whether a workload fails; if so, it becomes the best so far."""
        if time.monotonic() > self._end:
            raise OutOfTimeError
        if not self._fails(workload):
            return False
        self.best = workload
        return True

    def _try_requests(self, requests: Sequence[Recorded]) -> bool:
        return self._try(msgspec.structs.replace(self.best, requests=list(requests)))

    def _clients(self) -> None:
        """Leave out whole clients, then late and early requests."""
        requests = self.best.requests
        clients = sorted({one.client for one in requests})
        minimize(clients, lambda some: self._try_requests([one for one in requests if one.client in set(some)]))
        requests = self.best.requests
        smallest(len(requests), 1, lambda count: self._try_requests(requests[:count]))
        requests = self.best.requests
        smallest(len(requests), 1, lambda count: self._try_requests(requests[len(requests) - count :]))

    def _requests(self) -> None:
        minimize(self.best.requests, self._try_requests)

    def _each(self, change: Callable[[Recorded], Recorded]) -> None:
        """Change all requests, otherwise each one that can be changed."""
        requests = self.best.requests
        if [change(one) for one in requests] == requests or self._try_requests([change(one) for one in requests]):
            return
        for index in range(len(requests)):
            self._replace(index, change)

    def _replace(self, index: int, change: Callable[[Recorded], Recorded]) -> bool:
        requests = list(self.best.requests)
        one = change(requests[index])
        if one == requests[index]:
            return True
        requests[index] = one
        return self._try_requests(requests)

    def _arrivals(self) -> None:
        """Let all arrive at the same time, otherwise one millisecond apart."""
        requests = self.best.requests
        for step_ns in (0, _NS_PER_MS):
            if self._try_requests([_moved(one, place * step_ns) for place, one in enumerate(requests)]):
                return

    def _simplify(self) -> None:
        for name, value in _USUAL.items():
            self._each(lambda one, name=name, value=value: changed(one, **{name: value}))  # type: ignore[misc]
        self._each(_plain)

    def _sizes(self) -> None:
        """Shorten the prompts and the answers."""
        for index in range(len(self.best.requests)):
            prompt = prompt_of(self.best.requests[index])
            smallest(len(prompt), 1, lambda n, at=index: self._replace(at, lambda one: _with_prompt(one, n)))  # type: ignore[misc]
            wanted = params_of(self.best.requests[index]).max_tokens
            if wanted is not None:
                smallest(wanted, 1, lambda n, at=index: self._replace(at, lambda one: _with_output(one, n)))  # type: ignore[misc]

    def _options(self) -> None:
        for name in _SIZES:
            smallest(getattr(self.best.config, name), 1, lambda n, name=name: self._try_option(name, n))  # type: ignore[misc]

    def _try_option(self, name: str, value: int) -> bool:
        try:
            config = ResolvedConfig(**{**msgspec.structs.asdict(self.best.config), name: value})
        except ConfigError:
            return False
        fitting = _fitting(config)
        return fitting is not None and self._try(msgspec.structs.replace(self.best, config=fitting))


def _fitting(config: ResolvedConfig) -> ResolvedConfig | None:
    """Return a config under which every request can end; None if none is so small."""
    room = room_of(config).longest(config.num_blocks_override - 1)
    if room < 2:
        return None
    return msgspec.structs.replace(config, max_model_len=min(config.max_model_len, room))


def _moved(one: Recorded, received_ns: int) -> Recorded:
    aborted_ns = received_ns + one.aborted_ns - one.received_ns if one.aborted_ns else 0
    return msgspec.structs.replace(one, received_ns=received_ns, aborted_ns=aborted_ns, ended_ns=0)


def _plain(one: Recorded) -> Recorded:
    """Return the request with one choice and without stop conditions."""
    params = SamplingParams(max_tokens=params_of(one).max_tokens, ignore_eos=True)
    return changed(msgspec.structs.replace(one, tokens=one.tokens[:1], aborted_ns=0), params=params)


def _with_prompt(one: Recorded, count: int) -> Recorded:
    return changed(one, prompt_token_ids=packed(prompt_of(one)[:count]))


def _with_output(one: Recorded, count: int) -> Recorded:
    params = msgspec.structs.replace(params_of(one), max_tokens=count)
    return changed(one, params=params)


# minimize: the smallest part of a list that still fails (Zeller and Hildebrandt, TSE 2002).


_Item = TypeVar("_Item")


def minimize(items: Sequence[_Item], fails: Callable[[list[_Item]], bool]) -> list[_Item]:
    """Return a part of the items, in order, that fails but does not fail without any one of them (ddmin).

    fails: whether a part fails; it is true for all items.
    """
    left, parts = list(items), 2
    while len(left) >= 2:
        size = max(1, len(left) // parts)
        for begin in range(0, len(left), size):
            without = left[:begin] + left[begin + size :]
            if without and fails(without):
                left, parts = without, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return left


def smallest(number: int, least: int, fails: Callable[[int], bool]) -> int:
    """Return a number from `least` to `number` that fails, and most likely not the one below. `number` fails."""
    if number <= least or fails(least):
        return min(number, least)
    low, high = least, number  # low does not fail, high does
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle
    return high
