"""Series: what an engine did, step by step, as columns; and the times of its requests."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from core.batch.table import BatchTable
from core.capture.file import CaptureFile, Turn
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.inputs import EngineReply
from ipc.errors import CaptureFileError
from ipc.tables.arrays import Doubles, Ints
from ipc.wire.messages import Goodbye, Outputs, RequestFailed, Submission
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun

_NS = 1e-9
_COLUMNS = ("begins", "durations", "rows", "tokens", "waiting", "free_blocks")


class RequestTimes(msgspec.Struct):
    """One request. Seconds since the start of the capture; None: it did not get that far."""

    client: int
    number: int
    arrival: float
    num_prompt_tokens: int
    num_tokens: int = 0  # of the first choice
    first_token: float | None = None
    last_token: float | None = None
    end: float | None = None
    how: str = "open"  # how it ended


class Series(msgspec.Struct):
    """Columns [steps] and the requests in order of arrival. begin_ns: on the clock of the steps."""

    begin_ns: int
    begins: Doubles  # s
    durations: Doubles  # s
    rows: Ints
    tokens: Ints
    waiting: Ints
    free_blocks: Ints
    requests: list[RequestTimes]
    num_preemptions: int
    num_cached_tokens: int


class _Rows:
    """Notes how many rows and tokens a plan has."""

    table: BatchTable

    def __init__(self) -> None:
        self.sizes = (0, 0)

    def begin(self, plan: SchedulerOutput) -> None:
        self.sizes = len(plan.rows), plan.num_tokens

    def end(self, output: ModelRunnerOutput) -> None:
        """Do nothing: plans have everything needed."""


class _Collector:
    def __init__(self, watcher: _Rows, begin_ns: int) -> None:
        self.requests: list[RequestTimes] = []
        self.steps: list[tuple[float, float, int, int, int, int]] = []
        self._watcher, self._begin_ns = watcher, begin_ns
        self._live: dict[tuple[int, int], RequestTimes] = {}

    def add(self, turn: Turn, replies: Sequence[tuple[int, EngineReply]]) -> None:
        step, (num_rows, num_tokens) = turn.step, self._watcher.sizes
        self._watcher.sizes = (0, 0)
        begin, duration = self._seconds(step.now_ns), step.elapsed_ns * _NS
        self.steps.append((begin, duration, num_rows, num_tokens, step.num_waiting, step.num_free_blocks))
        for (client, message), received_ns in zip(turn.inbox, turn.received_ns, strict=True):
            if isinstance(message, Submission) and (client, message.number) not in self._live:
                arrival = self._seconds(received_ns or step.now_ns)
                one = RequestTimes(client, message.number, arrival, len(message.prompt_token_ids) // 4)
                self.requests.append(one)
                self._live[client, message.number] = one
            elif isinstance(message, Goodbye):
                for key in [key for key in self._live if key[0] == client]:
                    self._end(key, begin, "left")
        for client, reply in replies:
            if isinstance(reply, RequestFailed):
                self._end((client, reply.number), begin + duration, "failed")
            elif isinstance(reply, Outputs):
                self._add_outputs(client, reply, begin + duration)

    def _add_outputs(self, client: int, outputs: Outputs, now: float) -> None:
        for row in output_rows(outputs):
            one = self._live.get((client, row.number))
            if one is None or row.choice:
                continue
            if row.tokens:
                one.num_tokens += len(row.tokens)
                one.first_token = now if one.first_token is None else one.first_token
                one.last_token = now
            if row.finish:
                self._end((client, row.number), now, row.finish.name.lower())

    def _end(self, key: tuple[int, int], now: float, how: str) -> None:
        one = self._live.pop(key, None)
        if one is not None:
            one.end, one.how = now, how

    def _seconds(self, ns: int) -> float:
        return (ns - self._begin_ns) * _NS


def read_series(file: CaptureFile) -> Series:
    """Run the capture again and return what it did. Errors: CaptureFileError if this version decides differently."""
    first = next(file.turns(), None)
    begin_ns = 0 if first is None else min([first.step.now_ns, *(ns for ns in first.received_ns if ns)])
    watcher = _Rows()
    collector = _Collector(watcher, begin_ns)
    run = rerun(file, replay_config(file.header), recorded_executor(file), on_turn=collector.add, watcher=watcher)
    if run.difference is not None:
        raise CaptureFileError(
            f"{file.path}: this version decides step {run.difference.step} differently; --mode resched shows how"
        )
    found = [np.array(column) for column in zip(*collector.steps, strict=True)] or [np.zeros(0)] * len(_COLUMNS)
    columns: dict[str, Any] = dict(zip(_COLUMNS, found, strict=True))
    return Series(
        begin_ns,
        **columns,
        requests=collector.requests,
        num_preemptions=run.num_preemptions,
        num_cached_tokens=run.num_cached_tokens,
    )
