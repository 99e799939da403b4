"""`--mode live`: a capture's requests, sent to a running engine at their recorded times and compared."""

import sys
import time
from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np
from rich.console import Console

from core.capture.file import CaptureFile, Turn
from core.capture.records import OtherModelError
from core.inputs import EngineReply
from frontend.client.client import EngineClient
from frontend.client.progress import Progress
from frontend.client.transport import ZmqTransport
from ipc.errors import CaptureFileError, EngineCoreError
from ipc.log_lines import counted
from ipc.wire.messages import AddRequest, FinishReason, Goodbye, Outputs, RequestFailed
from tools.commands.replay.differences import unpack
from tools.commands.replay.latency import Latencies, Summary, Times, latencies, print_latencies, summarize
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import recorded_executor, replay_config, rerun

# The requests of a captured engine, with the times of their arrival and of their tokens: a trace for each.


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


_MAX_SHOWN = 10


class TokenDifference(msgspec.Struct, frozen=True):
    """The first token of a request that differs from the recorded one; None: no token at this position."""

    client: int
    request: int
    position: int
    expected: int | None
    got: int | None
    choice: int = 0


class Failure(msgspec.Struct, frozen=True):
    """A request that failed in the replay and not in the capture."""

    client: int
    request: int
    error: str


class LiveReport(msgspec.Struct, frozen=True):
    """The object that --json prints for the mode live."""

    capture: str
    mode: str
    speed: float | None  # None: as soon as possible
    num_requests: int
    num_aborted: int  # by the replay, after the recorded number of tokens
    num_tokens: int  # compared
    recorded: Latencies
    replayed: Latencies
    lateness_ms: Summary | None  # how late requests were sent
    differences: list[TokenDifference]
    failures: list[Failure]  # requests that failed now and not in the capture
    seconds: float  # from the first request sent to the end


class _Sent(msgspec.Struct):
    trace: Trace
    late: float  # seconds
    progress: list[Progress]  # of each choice; their token_ids are only the latest
    sent: float  # monotonic seconds
    tokens: list[list[int]]  # by choice
    abort_at: float | None = None  # monotonic seconds; for a request that was aborted before its first token
    is_aborted: bool = False

    @property
    def error(self) -> EngineCoreError | None:
        """Return why the request has failed."""
        return self.progress[0].error

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more will arrive."""
        return self.error is not None or all(one.finish for one in self.progress)


def run_live(file: CaptureFile, address: str, speed: float | None) -> LiveReport:
    """Send all requests to the engine at `address` and return the report.

    speed: factor on the recorded times; None = all at once. Errors: OtherModelError; EngineDeadError; CaptureFileError.
    """
    traces = read_traces(file)
    client = EngineClient(ZmqTransport(address), name="replay")
    try:
        _check_model(file, client)
        begin = time.monotonic()
        sent = _Player(client, traces, speed).run()
    finally:
        client.close()
    seconds = time.monotonic() - begin
    return LiveReport(
        capture=str(file.path),
        mode="live",
        speed=speed,
        num_requests=len(traces),
        num_aborted=sum(one.is_aborted for one in sent),
        num_tokens=sum(min(len(a), len(b)) for one in sent for a, b in zip(one.trace.tokens, one.tokens, strict=True)),
        recorded=latencies([_recorded_times(trace) for trace in traces]),
        replayed=latencies([_replayed_times(one) for one in sent]),
        lateness_ms=summarize([one.late for one in sent]),
        differences=[found for one in sent for found in _differences(one)],
        failures=[
            Failure(one.trace.client, one.trace.message.number, str(one.error))
            for one in sent
            if one.error is not None and one.trace.end is not End.FAILED
        ],
        seconds=round(seconds, 3),
    )


def _check_model(file: CaptureFile, client: EngineClient) -> None:
    recorded, welcome = file.header.model, client.welcome
    if recorded.fingerprint != welcome.model_fingerprint:
        raise OtherModelError(
            f"the capture is of {recorded.name} with fingerprint {recorded.fingerprint:.16}, the engine runs "
            f"{welcome.model_name} with {welcome.model_fingerprint:.16}: weights, dtype, kernels or torch differ"
        )


class _Player:
    """Sends every request when it is due, and aborts those that their clients aborted in the capture."""

    def __init__(self, client: EngineClient, traces: Sequence[Trace], speed: float | None) -> None:
        self._client = client
        self._due = [0.0 if speed is None else trace.arrival / speed for trace in traces]
        self._scale = 0.0 if speed is None else 1 / speed
        self._traces = traces
        self._live: dict[int, _Sent] = {}  # by number in this session
        self._sent: list[_Sent] = []

    def run(self) -> list[_Sent]:
        """Return the sent requests, in order of the traces. Errors: EngineDeadError."""
        begin = time.monotonic()
        while len(self._sent) < len(self._traces) or self._live:
            now = time.monotonic()
            while len(self._sent) < len(self._traces) and begin + self._due[len(self._sent)] <= now:
                self._send(self._traces[len(self._sent)], begin + self._due[len(self._sent)])
            numbers = np.fromiter(self._live, np.int64)
            for number in self._client.wait(numbers, self._timeout(begin)).tolist():
                self._look(number)
            self._abort_due()
        return self._sent

    def _timeout(self, begin: float) -> float | None:
        """Return the seconds until a request or an abort is due; None: there are only the engine's messages to wait
        for.
        """
        due = [one.abort_at for one in self._live.values() if one.abort_at is not None and not one.is_aborted]
        if len(self._sent) < len(self._traces):
            due.append(begin + self._due[len(self._sent)])
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _send(self, trace: Trace, due: float) -> None:
        message = trace.message
        if message.features:
            raise CaptureFileError("the capture has requests with images or prompt_embeds, whose content is not in it")
        sent = time.monotonic()
        one = _Sent(trace, sent - due, [_NOTHING] * message.params.n, sent, [[] for _ in range(message.params.n)])
        self._sent.append(one)
        try:
            number = self._client.submit(
                np.frombuffer(message.prompt_token_ids, "<i4"),  # type: ignore[arg-type]
                message.params,
                seed=message.seed,
                priority=message.priority,
                cache_salt=message.cache_salt,
                tenant=message.tenant,
                adapter=message.adapter,
                deadline_ms=message.deadline_ms,
                streaming=True,
            )
        except EngineCoreError as error:
            self._client.raise_if_ended()
            one.progress[0] = _NOTHING._replace(error=error)
            return
        if trace.end in (End.ABORTED, End.OPEN) and not trace.num_tokens and trace.end_time is not None:
            one.abort_at = sent + (trace.end_time - trace.arrival) * self._scale
        self._live[number] = one

    def _look(self, number: int) -> None:
        one = self._live[number]
        for choice, tokens in enumerate(one.tokens):
            one.progress[choice] = self._client.read(number, len(tokens), choice)
            tokens += one.progress[choice].token_ids.tolist()
        gave_up = one.trace.end in (End.ABORTED, End.OPEN) and one.trace.num_tokens > 0
        has_all = all(len(got) >= len(wanted) for got, wanted in zip(one.tokens, one.trace.tokens, strict=True))
        if one.has_ended:
            del self._live[number]
            self._client.discard([number])
        elif gave_up and not one.is_aborted and has_all:
            one.is_aborted = True
            self._client.abort([number])

    def _abort_due(self) -> None:
        now = time.monotonic()
        for number, one in self._live.items():
            if one.abort_at is not None and not one.is_aborted and one.abort_at <= now:
                one.is_aborted = True
                self._client.abort([number])


_NOTHING = Progress(np.zeros(0, np.int32), FinishReason.NONE, None, 0, 0.0, 0.0, 0.0, 0.0, None)


def _differences(one: _Sent) -> list[TokenDifference]:
    """Compare the choices of a finished request completely, those of any other request as far as both go."""
    if one.error is not None:
        return []
    found, message = [], one.trace.message
    for choice, (expected, got) in enumerate(zip(one.trace.tokens, one.tokens, strict=True)):
        length = min(len(expected), len(got))
        at = next((place for place in range(length) if expected[place] != got[place]), length)
        if at < length or (len(expected) != len(got) and one.trace.end is End.FINISHED):
            found.append(TokenDifference(one.trace.client, message.number, at, _at(expected, at), _at(got, at), choice))
    return found


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


def _recorded_times(trace: Trace) -> Times:
    end = trace.end_time if trace.end is End.FINISHED else None
    return Times(trace.arrival, trace.first_token, trace.last_token, end, trace.num_tokens)


def _replayed_times(one: _Sent) -> Times:
    begun = [progress for progress in one.progress if progress.first_token_time]
    is_whole = one.has_ended and one.error is None and not one.is_aborted and one.trace.end is End.FINISHED
    return Times(
        one.sent,
        min((progress.first_token_time for progress in begun), default=None),
        max((progress.last_token_time for progress in begun), default=None),
        max(progress.finished_time for progress in one.progress) if is_whole else None,
        sum(map(len, one.tokens)),
    )


def print_live(report: LiveReport) -> None:
    """Print the report as text."""
    timing = "as soon as possible" if report.speed is None else f"at {report.speed:g} times the recorded speed"
    print(
        f"{report.capture}: {counted(report.num_requests, 'request')} {timing}, {report.num_aborted} aborted, "
        f"{counted(report.num_tokens, 'token')} compared in {report.seconds:.2f} s"
    )
    print_latencies(Console(file=sys.stdout, highlight=False), report.recorded, report.replayed, report.lateness_ms)
    print(
        "recorded: from the step that took the request in to the end of the token's step; replayed: as the client "
        "sees it"
    )
    for failure in report.failures[:_MAX_SHOWN]:
        print(f"client {failure.client} request {failure.request} failed: {failure.error}")
    for found in report.differences[:_MAX_SHOWN]:
        print(
            f"client {found.client} request {found.request}{f'.{found.choice}' if found.choice else ''}, position "
            f"{found.position}: expected token "
            f"{found.expected}, got {found.got}"
        )
    print(f"{counted(len(report.differences), 'difference')}, {counted(len(report.failures), 'failure')}")
