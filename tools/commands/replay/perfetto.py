"""A capture as a Chrome trace for Perfetto (ui.perfetto.dev) and chrome://tracing: steps, requests, counters.

Format: "Trace Event Format" (Chromium). Times in microseconds since the capture's first event.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from core.batch.table import BatchTable
from core.capture.file import CaptureFile, Turn
from core.capture.records import Step
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.errors import CaptureFileError, ConfigError
from ipc.wire.messages import AddRequest, Goodbye, Outputs, RequestFailed
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun

#: Events of one file; browsers become slow beyond it. Later ones are left out.
MAX_EVENTS = 200_000

Event: TypeAlias = dict[str, Any]
_ChoiceKey: TypeAlias = tuple[int, int, int]  # client, number, choice
_ENGINE, _REQUESTS = 1, 2  # process ids in the trace
_PARTS = ("schedule", "model", "update")


class _Life(msgspec.Struct):
    """The consecutive spans of one choice: queued, prompt, decode, preempted."""

    key: _ChoiceKey
    name: str
    since_ns: int
    has_token: bool = False


class _Watcher:
    """Notes which rows a plan starts and preempts."""

    table: BatchTable

    def __init__(self) -> None:
        self.started: list[_ChoiceKey] = []
        self.removed: list[_ChoiceKey] = []
        self.num_rows = self.num_tokens = 0
        self._of_row: dict[int, _ChoiceKey] = {}

    def begin(self, plan: SchedulerOutput) -> None:
        """Note a plan, before its step may end requests."""
        self.num_rows, self.num_tokens = len(plan.rows), plan.num_tokens
        self.removed = [self._of_row.pop(row) for row in plan.removed_rows.tolist() if row in self._of_row]
        for new in plan.added:
            key = (int(self.table.client[new.row]), int(self.table.number[new.row]), new.choice)
            self._of_row[new.row] = key
            self.started.append(key)
        told_anew = set(self.removed) & set(self.started)  # beams whose tokens their search has chosen: they continued
        self.removed = [key for key in self.removed if key not in told_anew]
        self.started = [key for key in self.started if key not in told_anew]

    def end(self, output: ModelRunnerOutput) -> None:
        """Do nothing: tokens are in the replies."""

    def clear(self) -> None:
        """Drop the last plan."""
        self.started, self.removed, self.num_rows, self.num_tokens = [], [], 0, 0


class TraceMaker:
    """Makes the events of a capture's turns, in order."""

    def __init__(self, begin_ns: int) -> None:
        self.watcher = _Watcher()
        self._begin_ns = begin_ns
        self._lives: dict[_ChoiceKey, _Life] = {}
        self._now_ns = begin_ns

    def add(self, turn: Turn, replies: Any) -> Iterator[Event]:
        """Yield the events of a turn and of the requests that it starts, changes and ends."""
        step, watcher = turn.step, self.watcher
        self._now_ns = end_ns = step.now_ns + step.elapsed_ns
        for (client, message), received_ns in zip(turn.inbox, turn.received_ns, strict=True):
            if isinstance(message, AddRequest):
                for choice in range(message.params.n):
                    key = (client, message.number, choice)
                    self._lives.setdefault(key, _Life(key, "queued", received_ns or step.now_ns))
            elif isinstance(message, Goodbye):
                for key in [key for key in self._lives if key[0] == client]:
                    yield from self._end(key, step.now_ns, "left")
        for key in watcher.removed:
            yield from self._enter(key, "preempted", step.now_ns)
        for key in watcher.started:
            if (life := self._lives.get(key)) is not None:
                yield from self._enter(key, "decode" if life.has_token else "prompt", step.now_ns)
        if watcher.num_rows:
            yield from self._step_events(turn.step_index, step)
        watcher.clear()
        for client, reply in replies:
            if isinstance(reply, RequestFailed):
                for key in [key for key in self._lives if key[:2] == (client, reply.number)]:
                    yield from self._end(key, end_ns, "failed")
            elif isinstance(reply, Outputs):
                yield from self._rows(client, reply, end_ns)

    def finish(self) -> Iterator[Event]:
        """Yield the events of requests that are unfinished at the end of the capture."""
        for key in list(self._lives):
            yield from self._end(key, self._now_ns, "open")

    def _rows(self, client: int, outputs: Outputs, end_ns: int) -> Iterator[Event]:
        for row in output_rows(outputs):
            life = self._lives.get((client, row.number, row.choice))
            if life is None:
                continue
            if row.tokens and not life.has_token:
                life.has_token = True
                yield from self._enter(life.key, "decode", end_ns)
            if row.finish:
                yield from self._end(life.key, end_ns, row.finish.name.lower())

    def _step_events(self, index: int, step: Step) -> Iterator[Event]:
        begin = self._us(step.now_ns)
        arguments = {
            "step": index,
            "rows": self.watcher.num_rows,
            "tokens": self.watcher.num_tokens,
            "free blocks": step.num_free_blocks,
            "waiting": step.num_waiting,
        }
        common = {"ph": "X", "pid": _ENGINE, "tid": 1, "cat": "step"}
        yield {**common, "name": "step", "ts": begin, "dur": step.elapsed_ns / 1000, "args": arguments}
        at = begin
        for name, us in zip(_PARTS, np.frombuffer(step.times, "<i4").tolist(), strict=False):
            yield {**common, "name": name, "ts": at, "dur": us}
            at += us
        counters = {
            "running": self.watcher.num_rows,
            "waiting": step.num_waiting,
            "free blocks": step.num_free_blocks,
            "tokens in the step": self.watcher.num_tokens,
        }
        for name, value in counters.items():
            yield {"ph": "C", "pid": _ENGINE, "name": name, "ts": begin, "args": {name: value}}

    def _enter(self, key: _ChoiceKey, name: str, now_ns: int) -> Iterator[Event]:
        life = self._lives.get(key)
        if life is not None:
            yield from self._span(life, now_ns, "")
            life.name, life.since_ns = name, now_ns

    def _end(self, key: _ChoiceKey, now_ns: int, how: str) -> Iterator[Event]:
        yield from self._span(self._lives.pop(key), now_ns, how)

    def _span(self, life: _Life, end_ns: int, how: str) -> Iterator[Event]:
        """The events of a choice's present span, which ends now."""
        client, number, choice = life.key
        common = {"cat": "request", "id": f"{client}/{number}.{choice}", "pid": _REQUESTS, "tid": client}
        label = f"{client}/{number}" + (f".{choice}" if choice else "")
        begin = {"request": label, "end": how} if how else {"request": label}
        yield {**common, "ph": "b", "name": life.name, "ts": self._us(life.since_ns), "args": begin}
        yield {**common, "ph": "e", "name": life.name, "ts": self._us(end_ns)}

    def _us(self, ns: int) -> float:
        return (ns - self._begin_ns) / 1000


def write_perfetto(file: CaptureFile, path: str) -> int:
    """Write the capture's trace to a new file, compressed if its name ends in .gz.

    Returns the number of the capture's events, including those beyond MAX_EVENTS, which are not in the file.
    Errors: CaptureFileError if this version decides differently from the captured engine; ConfigError for the path.
    """
    first = next(file.turns(), None)  # None: an engine that ended before its first step
    times = [] if first is None else [first.step.now_ns, *(ns for ns in first.received_ns if ns)]
    maker = TraceMaker(min(times, default=0))
    events = [
        {"ph": "M", "pid": _ENGINE, "name": "process_name", "args": {"name": f"engine: {file.header.model.name}"}},
        {"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests, by client"}},
    ]
    run = rerun(
        file,
        replay_config(file.header),
        recorded_executor(file),
        on_turn=lambda turn, replies: events.extend(maker.add(turn, replies)),
        watcher=maker.watcher,
    )
    if run.difference is not None:
        raise CaptureFileError(
            f"{file.path}: step {run.difference.step} is decided otherwise by this version; --mode resched shows how"
        )
    events.extend(maker.finish())
    data = msgspec.json.encode({"traceEvents": events[:MAX_EVENTS], "displayTimeUnit": "ms"})
    try:
        with Path(path).open("xb") as out:
            out.write(gzip.compress(data, mtime=0) if path.endswith(".gz") else data)
    except OSError as error:
        raise ConfigError(f"--perfetto {path}: {error.strerror}") from None
    return len(events)
