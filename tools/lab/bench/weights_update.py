"""New weights under running streams: how long an update takes, and the longest gap of the streams.

The weights are read from the model's own files, so each stream must have the tokens of a run without updates: they are
compared. `path` is update_weights() of the engine's owner, in this process; `control` is the same by another process,
`engine-core control weights`, whose start of Python is in its time. `none` is the run without updates.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import CallFailedError
from ipc.files.model_files import resolve_model
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from ipc.wire.messages import FinishReason
from ipc.wire.weights_messages import UpdateMode
from tools.commands.control import write_owner_file
from tools.lab.bench.quiet import cpu_use, foreign_cpu
from tools.lab.bench.workloads import HOST_ID_SPAN, ID_LOW

STREAMS = 4
UPDATES = 3
LENGTH = 500
_PROMPT = 32
_LIMIT_S = 600.0

_Update = Callable[[], object]


class _Changes:
    """Updates while streams run, one after the other, each by a thread of its own."""

    def __init__(self, update: _Update | None) -> None:
        self._update, self._num_begun = update, 0
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []
        self.times: list[tuple[float, float]] = []  # when each began and ended

    @property
    def are_over(self) -> bool:
        """Return whether all updates have ended, or there are none."""
        return self._update is None or len(self.times) == UPDATES

    def on_tokens(self, num_tokens: int) -> None:
        """Begin the next update if the streams have enough tokens, and the last update has ended.

        Errors: those of the last update.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._failures:
                raise self._failures[0]
        due = STREAMS * LENGTH * (self._num_begun + 1) // (UPDATES + 1)
        if self._update is not None and self._thread is None and self._num_begun < UPDATES and num_tokens >= due:
            self._num_begun += 1
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def _run(self) -> None:
        assert self._update is not None
        begin = time.monotonic()
        try:
            self._update()
        except Exception as error:  # on_tokens() raises it
            self._failures.append(error)
        self.times.append((begin, time.monotonic()))


class _Caller:
    """Asks one prompt again and again, until a whole answer began after all updates."""

    def __init__(self, client: EngineClient, which: int) -> None:
        self._client = client
        self._prompt = [ID_LOW + (which * 37 + place * 7) % HOST_ID_SPAN for place in range(_PROMPT)]
        self.answers: list[list[int]] = []
        self.versions: set[int] = set()
        self.gaps: list[tuple[float, float]] = []
        self.gaps_at_marks: list[float] = []
        self.is_last = False
        self.ask()

    def ask(self) -> None:
        """Begin an answer."""
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0)
        self.number = self._client.submit(self._prompt, params, seed=0, streaming=True)
        self._count, self._last = 0, 0.0
        self._gap_before: dict[int, tuple[float, float]] = {}

    def read(self, now: float) -> tuple[int, bool]:
        """Read what is new; return the number of new tokens, and whether the answer has ended."""
        progress = self._client.read(self.number, self._count)
        count = len(progress.token_ids)
        if count:
            if self._count:
                self._gap_before[self._count] = now, now - self._last
            self._count, self._last = self._count + count, now
        if progress.finish is FinishReason.NONE:
            return count, False
        whole = self._client.read(self.number)
        self._client.discard([self.number])
        self.answers.append(whole.token_ids.tolist())
        self.versions |= {version for _, version in whole.weights_versions}
        marks = [place for place, _ in whole.weights_versions if place in self._gap_before]
        self.gaps_at_marks += [self._gap_before.pop(place)[1] for place in marks]
        self.gaps += self._gap_before.values()
        return count, True


def measure_weights_update(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case and round. options: of the engine. Errors: those of a start or of an update."""
    config = config_from_options(**{"max_model_len": _PROMPT + LENGTH, **options})
    path = str(resolve_model(config.model).resolve())
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder, EngineProcess(config) as process:
        owner_file = str(Path(folder, "owner"))
        write_owner_file(owner_file, process.owner_token)
        given = ["--connect", process.address, "--owner-file", owner_file, "--in-flight", "keep"]
        command = [sys.executable, "-m", "engine_core", "control", "weights", path, *given]
        client = EngineClient(ZmqTransport(process.address))
        owner = EngineClient(ZmqTransport(process.address), owner_token=process.owner_token)
        cases: dict[str, _Update | None] = {
            "none": None,
            "path": lambda: owner.update_weights(path, UpdateMode.KEEP, _LIMIT_S),
            "control": lambda: _control(command),
        }
        try:
            usual = _run(client, _Changes(None))
            for round_, (case, update) in itertools.product(range(rounds), cases.items()):
                names = {"engine": NAME, "version": VERSION, "workload": "weights-update", "case": case}
                yield {**names, "round": round_, "dtype": config.dtype, **_measure(client, owner, update, usual)}
        finally:
            owner.close()
            client.close()


def _control(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CallFailedError(done.stderr.strip())


def _measure(client: EngineClient, owner: EngineClient, update: _Update | None, usual: list[_Caller]) -> dict[str, Any]:
    before, changes, first = cpu_use(), _Changes(update), owner.weights().mark.version
    callers = _run(client, changes)
    foreign_s = foreign_cpu(before, cpu_use())
    versions = set(range(first + 1, owner.weights().mark.version + 1))
    all_gaps = [gap for caller in callers for gap in caller.gaps]
    gaps = {
        "usual": [gap for end, gap in all_gaps if not _is_within(end, changes.times)],
        "reading": [gap for end, gap in all_gaps if _is_within(end, changes.times)],
        "change": [gap for caller in callers for gap in caller.gaps_at_marks],  # K and V are computed again in it
    }
    pairs = [(seen, one.answers[0]) for caller, one in zip(callers, usual, strict=True) for seen in caller.answers]
    figures: dict[str, Any] = {
        "streams": STREAMS,
        "answers": len(pairs),
        "tokens_lost": sum(LENGTH - len(seen) for seen, _ in pairs),
        "tokens_different": sum(a != b for seen, expected in pairs for a, b in zip(seen, expected, strict=False)),
        "updates": len(versions),
        "marks_lost": sum(len(versions - caller.versions) for caller in callers),
        "update_s": [round(end - begin, 3) for begin, end in changes.times],
        "foreign_cpu_s": round(foreign_s, 2),
    }
    for name, values in gaps.items():
        if values:
            figures[f"gap_p50_ms_{name}"] = round(statistics.median(values) * 1000, 1)
            figures[f"gap_max_ms_{name}"] = round(max(values) * 1000, 1)
    return figures


def _is_within(moment: float, times: list[tuple[float, float]]) -> bool:
    return any(begin <= moment <= end for begin, end in times)


def _run(client: EngineClient, changes: _Changes) -> list[_Caller]:
    """Return the callers at their ends. Errors: those of an update."""
    callers = [_Caller(client, which) for which in range(STREAMS)]
    live, num_tokens = {caller.number: caller for caller in callers}, 0
    while live:
        ready, now = client.wait(np.array(list(live), np.int64), _LIMIT_S), time.monotonic()
        for number in ready.tolist():
            caller = live[number]
            count, is_ended = caller.read(now)
            num_tokens += count
            if is_ended:
                del live[number]
                if not caller.is_last:
                    caller.is_last = changes.are_over
                    caller.ask()
                    live[caller.number] = caller
        changes.on_tokens(num_tokens)
    return callers
