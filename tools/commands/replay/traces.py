"""The requests of a captured engine, with the times of their arrival and of their tokens: a trace for each."""

from collections.abc import Sequence
from enum import Enum

import msgspec

from core.capture.file import CaptureFile, Turn
from core.inputs import EngineReply
from ipc.errors import CaptureFileError
from ipc.wire.messages import AddRequest, FinishReason, Goodbye, Outputs, RequestFailed
from tools.commands.replay.differences import unpack
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun

NS = 1e-9


class End(Enum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"  # by its client, or because its client left
    FAILED = "failed"
    OPEN = "open"  # still running at the end of the capture


class Trace(msgspec.Struct):
    """One request. Times: seconds since the first step of the capture. A token's time is the end of its step."""

    client: int
    message: AddRequest
    arrival: float  # start of the step that received it
    tokens: list[list[int]]  # by choice, including those in AddRequest.delivered
    first_token: float | None = None
    last_token: float | None = None
    end: End = End.OPEN
    end_time: float | None = None  # of an unfinished request: the end of the capture
    finishes: list[FinishReason] = []  # of the choices that have ended

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(map(len, self.tokens))


def read_traces(file: CaptureFile) -> list[Trace]:
    """Return the traces in order of arrival.

    Errors: CaptureFileError, also for a capture that resched does not reproduce.
    """
    collector = _Collector()
    run = rerun(file, replay_config(file.header), recorded_executor(file), on_turn=collector.add)
    if run.difference is not None:
        raise CaptureFileError(
            f"{file.path}: this version of the engine decides step {run.difference.step} differently, so its requests "
            "cannot be identified; --mode resched shows the difference"
        )
    collector.finish()
    return collector.traces


class _Collector:
    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._live: dict[tuple[int, int], Trace] = {}
        self._begin_ns: int | None = None
        self._now = 0.0

    def add(self, turn: Turn, replies: Sequence[tuple[int, EngineReply]]) -> None:
        if self._begin_ns is None:
            self._begin_ns = turn.step.now_ns
        begin = (turn.step.now_ns - self._begin_ns) * NS
        for client, message in turn.inbox:
            if isinstance(message, AddRequest) and (client, message.number) not in self._live:
                delivered = message.delivered or [b""] * message.params.n
                trace = Trace(client, message, begin, [unpack(tokens) for tokens in delivered])
                self._live[client, message.number] = trace
                self.traces.append(trace)
            elif isinstance(message, Goodbye):
                for key in [key for key in self._live if key[0] == client]:
                    self._end(key, End.ABORTED, begin)
        self._now = end = begin + turn.step.elapsed_ns * NS
        for client, reply in replies:
            if isinstance(reply, Outputs):
                self._add_outputs(client, reply, end)
            elif isinstance(reply, RequestFailed):
                self._end((client, reply.number), End.FAILED, end)

    def finish(self) -> None:
        for key in list(self._live):
            self._end(key, End.OPEN, self._now)

    def _add_outputs(self, client: int, outputs: Outputs, now: float) -> None:
        for row in output_rows(outputs):
            trace = self._live.get((client, row.number))
            if trace is None:
                continue
            if row.tokens:
                trace.tokens[row.choice] += row.tokens
                trace.first_token = now if trace.first_token is None else trace.first_token
                trace.last_token = now
            if row.finish:
                trace.finishes.append(row.finish)
            if len(trace.finishes) == trace.message.params.n:
                self._end((client, row.number), _end_of(trace), now)

    def _end(self, key: tuple[int, int], end: End, now: float) -> None:
        trace = self._live.pop(key, None)
        if trace is not None:
            trace.end, trace.end_time = end, now


def _end_of(trace: Trace) -> End:
    """Return how a request ended, once all of its choices have. A beam search may have fewer sequences than choices."""
    aborted = [finish == FinishReason.ABORT for finish in trace.finishes]
    is_aborted = all(aborted) if trace.message.params.use_beam_search else any(aborted)
    return End.ABORTED if is_aborted else End.FINISHED
