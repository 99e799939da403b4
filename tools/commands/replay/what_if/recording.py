"""Recording: a capture's requests and steps without its schedule: arrivals, tokens, step times."""

from collections.abc import Sequence

import msgspec
import numpy as np

from core.batch.table import BatchTable
from core.capture.file import CaptureFile, Turn
from core.capture.recorded_executor import RecordedExecutor
from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.inputs import EngineInput, EngineReply
from ipc.errors import CaptureFileError
from ipc.tables.arrays import Floats, Int32s, Ints
from ipc.tables.columns import unpack_numbers
from ipc.wire.messages import Abort, AddRequest, FinishReason, Goodbye, Outputs, RequestFailed, Submission
from tools.commands.replay.output_rows import OutputRow, output_rows, output_vectors
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.oracle_executor import beam_key
from tools.commands.replay.what_if.step_time import FEATURES, FeatureWatcher

#: (client, request number)
RequestKey = tuple[int, int]


class Recorded(msgspec.Struct):
    """One request. Times: ns on the capture's clock; 0 = not in the capture."""

    client: int
    message: Submission
    received_ns: int  # from the border, or from the step that took it in if the border gave none
    tokens: list[list[int]]  # of each choice, those in AddRequest.delivered first
    token_times: list[int]  # of the steps that returned a token of choice 0
    ended_ns: int = 0  # 0: it is unfinished at the end of the capture
    aborted_ns: int = 0  # 0: its client did not abort it
    num_open: int = 1  # choices
    vectors: Floats | None = None  # [n, width] of a pooling request that ended with them

    @property
    def num_choices(self) -> int:
        """Return how many answers the request gets; a pooling request gets one vector."""
        return self.message.params.n if isinstance(self.message, AddRequest) else 1

    @property
    def is_odd(self) -> bool:
        """Return whether it is more than one choice of sampled tokens, or has images or a deadline."""
        message = self.message
        if not isinstance(message, AddRequest):
            return True
        params = message.params
        return bool(
            params.n > 1
            or params.use_beam_search
            or params.structured_outputs is not None
            or message.deadline_ms
            or message.features
        )

    @property
    def key(self) -> RequestKey:
        """Return the request's name within its capture."""
        return self.client, self.message.number


class Recording(msgspec.Struct):
    """The requests in order of arrival, and the steps that ran a plan."""

    requests: list[Recorded]
    features: Ints  # [steps, 8], see step_time.FEATURES
    durations: Ints  # ns [steps]
    begins: Ints  # ns [steps]
    gap_ns: int  # median time from one step's end to the next one's start, if there is work
    empty_ns: int  # median duration of a step without a plan
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    begin_ns: int  # the first request's arrival
    end_ns: int  # of the last step
    candidates: dict[bytes, tuple[Int32s, Floats]] = {}  # of beam searches, by oracle_executor.beam_key()
    offers: dict[tuple[int, int, int, int], Int32s] = {}  # drafts of the executor, see oracle_executor.Offers


def unmeasured(requests: Sequence[Recorded], gap_ns: int, empty_ns: int) -> Recording:
    """Return requests to simulate that no engine has run: there are no steps."""
    begin_ns = requests[0].received_ns if requests else 0
    return Recording(
        requests=list(requests),
        features=np.zeros((0, len(FEATURES)), np.int64),
        durations=np.zeros(0, np.int64),
        begins=np.zeros(0, np.int64),
        gap_ns=gap_ns,
        empty_ns=empty_ns,
        num_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        begin_ns=begin_ns,
        end_ns=begin_ns,
    )


class _Executor(RecordedExecutor):
    """Recorded results, with what another schedule needs from them. table: set before the first step.

    Candidates of beams are stored by the beams' tokens, drafts by their request and position.
    """

    table: BatchTable

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.candidates: dict[bytes, tuple[Int32s, Floats]] = {}
        self.offers: dict[tuple[int, int, int, int], Int32s] = {}

    def tokens_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output, table = super().tokens_of(plan), self.table
        if (found := output.candidates) is not None:
            ends = found.counts.cumsum().tolist()
            for index, end, count in zip(found.rows.tolist(), ends, found.counts.tolist(), strict=True):
                row = int(plan.rows[index])
                key = beam_key(int(table.client[row]), int(table.number[row]), table.token_ids(row))
                self.candidates[key] = found.token_ids[end - count : end], found.values[end - count : end]
        if output.draft_counts is not None and np.count_nonzero(output.draft_counts):
            self._note_offers(plan, output, output.draft_counts)
        return output

    def _note_offers(self, plan: SchedulerOutput, output: ModelRunnerOutput, draft_counts: Int32s) -> None:
        """Note the drafts that follow the tokens of this result, which the table does not have yet."""
        table, rows = self.table, plan.rows.astype(np.int64)
        new = output.token_ids >= 0 if output.counts is None else output.counts
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows] + new
        ends = draft_counts.cumsum()
        for index in np.flatnonzero(draft_counts).tolist():
            client, number, choice = (int(one[index]) for one in table.address(rows))
            key = client, number, choice, int(positions[index])
            self.offers[key] = output.draft_token_ids[int(ends[index] - draft_counts[index]) : int(ends[index])]


def read_recording(file: CaptureFile) -> Recording:
    """Run a capture's steps with its own tokens, and return its content.

    Errors: CaptureFileError, also if this version of the engine decides differently from the captured one.
    """
    executor, watcher = _Executor(file.header.model), FeatureWatcher()
    engine = EngineCore(replay_config(file.header), executor, file.header.epoch, [watcher])
    watcher.table = executor.table = engine.scheduler.table
    reader, features, durations, begins = Requests(), list[Ints](), list[int](), list[int]()
    gaps, empty, last_end_ns, end_ns = list[int](), list[int](), 0, 0
    for turn in file.turns():
        step = turn.step
        executor.feed(step)
        reader.receive(turn)
        if last_end_ns:
            gaps.append(step.now_ns - last_end_ns)
        end_ns = step.now_ns + step.elapsed_ns
        try:
            replies = engine.step(turn.inbox, step.now_ns)
        except Exception as error:
            if step.error:
                break
            raise CaptureFileError(
                f"{file.path}: this version of the engine decides step {turn.step_index} differently "
                f"({type(error).__name__}: {error}); --mode resched shows the difference"
            ) from None
        reader.note(replies, end_ns)
        if (found := watcher.take()) is None:
            empty.append(step.elapsed_ns)
        else:
            features.append(found)
            durations.append(step.elapsed_ns)
            begins.append(step.now_ns)
        last_end_ns = end_ns if engine.has_work else 0
    if not features:
        raise CaptureFileError(f"{file.path}: no step of it ran anything, so there is nothing to measure")
    stats = engine.scheduler.stats
    return Recording(
        reader.requests,
        np.stack(features),
        np.array(durations),
        np.array(begins),
        int(np.median(gaps)) if gaps else 0,
        int(np.median(empty)) if empty else 10_000,
        stats.num_generation_tokens,
        stats.prefix_cache_hits,
        stats.num_preemptions,
        reader.requests[0].received_ns if reader.requests else 0,
        end_ns,
        executor.candidates,
        executor.offers,
    )


class Requests:
    """Follows the requests from their arrival to their end."""

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self._live: dict[RequestKey, Recorded] = {}

    def live(self, key: RequestKey) -> Recorded | None:
        """Return a request that has not ended, or None."""
        return self._live.get(key)

    def receive(self, turn: Turn) -> None:
        """Note the messages of a step."""
        for (client, message), received_ns in zip(turn.inbox, turn.received_ns, strict=True):
            self.take_in(client, message, received_ns, turn.step.now_ns)

    def take_in(self, client: int, message: EngineInput, received_ns: int, now_ns: int) -> None:
        """Note a message that the engine received at now_ns."""
        if isinstance(message, Submission) and (client, message.number) not in self._live:
            delivered = message.delivered if isinstance(message, AddRequest) else []
            tokens = [np.frombuffer(part, "<i4").tolist() for part in delivered]
            one = Recorded(client, message, received_ns or now_ns, tokens, [])
            tokens += [[] for _ in range(one.num_choices - len(tokens))]
            one.num_open = one.num_choices
            self._live[client, message.number] = one
            self.requests.append(one)
        elif isinstance(message, Abort):
            self._abort(client, message, now_ns)
        elif isinstance(message, Goodbye):
            for key in [key for key in self._live if key[0] == client]:
                one = self._live.pop(key)
                one.aborted_ns = one.ended_ns = now_ns

    def _abort(self, client: int, message: Abort, now_ns: int) -> None:
        for number in unpack_numbers(message.numbers):
            one = self._live.get((client, number))
            if one is not None and (not message.choices or one.num_open == 1):
                one.aborted_ns = now_ns

    def note(self, replies: Sequence[tuple[int, EngineReply]], end_ns: int) -> None:
        """Note the results of a step that ended at this time."""
        for client, reply in replies:
            if isinstance(reply, RequestFailed) and (client, reply.number) in self._live:
                self._live.pop((client, reply.number)).ended_ns = end_ns
            elif isinstance(reply, Outputs):
                for number, vectors in output_vectors(reply):
                    if (pooled := self._live.get((client, number))) is not None:
                        pooled.vectors = vectors
                for row in output_rows(reply):
                    if (one := self._live.get((client, row.number))) is not None:
                        self._note_row(one, row, end_ns)

    def _note_row(self, one: Recorded, row: OutputRow, end_ns: int) -> None:
        one.tokens[row.choice] += row.tokens
        if row.choice == 0:
            one.token_times += [end_ns] * len(row.tokens)
        if row.finish:
            self._end(one, row.finish, end_ns)

    def _end(self, one: Recorded, reason: FinishReason, end_ns: int) -> None:
        one.num_open -= 1
        if reason != FinishReason.ABORT:
            one.aborted_ns = 0
        if not one.num_open:
            one.ended_ns = end_ns
            self._live.pop((one.client, one.message.number), None)
