"""The first difference between a replay and its capture: step, request, position, and the two values."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from core.capture.file import Turn
from core.capture.records import Step
from core.engine import EngineCore
from core.inputs import EngineReply
from ipc.wire.messages import Outputs

#: (client, request number)
RequestKey: TypeAlias = tuple[int, int]
Kind = Literal["decision", "token", "error"]

_MAX_LINES = 20  # of Difference.details


class Difference(msgspec.Struct, frozen=True):
    """The first difference between a capture and its replay.

    step: index of the step's call, from 0. offset: of its record in the file, bytes.
    """

    kind: Kind
    step: int
    offset: int
    client: int | None = None
    request: int | None = None
    position: int | None = None  # of the token in its request's output
    expected: int | None = None  # token id in the capture
    got: int | None = None  # token id in the replay
    details: list[str] = []


class Batch:
    """The requests in a capture's rows, and the columns of the last plan, which later steps may refer to."""

    def __init__(self) -> None:
        self._requests: dict[int, RequestKey] = {}
        self._rows: list[int] = []
        self._counts: list[int] = []
        self._num_plans = 0
        self._of_plan: dict[int, list[RequestKey | None]] = {}  # by number of the plan, until its result arrives

    @staticmethod
    def of(engine: EngineCore) -> "Batch":
        """Return the requests in the rows of an engine that continues from a checkpoint."""
        batch, table = Batch(), engine.scheduler.table
        rows = engine.scheduler.batch.rows.tolist()
        batch._requests = {row: (int(table.client[row]), int(table.number[row])) for row in rows}
        plans = engine.pipeline.plans
        for plan in plans:
            batch._of_plan[plan.step] = [batch._requests.get(row) for row in plan.rows.tolist()]
        batch._num_plans = engine.scheduler.stats.num_steps
        return batch

    def copy(self) -> "Batch":
        """Return an independent copy."""
        other = Batch()
        other._requests, other._rows, other._counts = dict(self._requests), self._rows, self._counts
        other._num_plans, other._of_plan = self._num_plans, dict(self._of_plan)
        return other

    def apply(self, step: Step) -> None:
        """Bring rows and plans up to date with a step; a step without a plan changes nothing."""
        if not step.digest:
            return
        for row in unpack(step.removed_rows):
            self._requests.pop(row, None)
        for row, client, number, _ in step.added:
            self._requests[row] = (client, number)
        self._rows = unpack(step.rows) or self._rows
        self._counts = unpack(step.counts) or self._counts
        self._of_plan[self._num_plans] = [self._requests.get(row) for row in self._rows]
        self._num_plans += 1

    def forget(self, plan: int) -> None:
        """Drop the requests of a plan whose result has arrived."""
        self._of_plan.pop(plan, None)

    def requests_of(self, plan: int) -> list[RequestKey | None]:
        """Return the request of each row of a plan; None for a row without one. Empty for an unknown plan."""
        return self._of_plan.get(plan, [])

    def request(self, row: int) -> str:
        """Return the name of the request in a row."""
        return name_request(self._requests.get(row), row)

    def scheduled(self) -> dict[str, int]:
        """Return the tokens of each request, by its name, in the last plan."""
        return {self.request(row): count for row, count in zip(self._rows, self._counts, strict=False)}


def name_request(key: RequestKey | None, row: int) -> str:
    """Return "client C request N", or "row R" if the row has no request."""
    return f"row {row}" if key is None else f"client {key[0]} request {key[1]}"


def find_difference(
    turn: Turn, got: Step, batch: Batch, replies: Sequence[tuple[int, EngineReply]]
) -> Difference | None:
    """Return the first difference between a recorded step and a replayed one, or None if they are equal.

    batch: as before this turn; it is brought up to date if there is no difference.
    """
    expected = turn.step
    if _plan_of(expected) != _plan_of(got):
        return Difference("decision", turn.step_index, turn.offset, details=_plan_details(expected, got, batch))
    batch.apply(expected)
    if bool(expected.error) != bool(got.error):
        details = [f"{who}: {text or 'no error'}" for who, text in (("capture", expected.error), ("replay", got.error))]
        return Difference("error", turn.step_index, turn.offset, details=details)
    if got.error:
        return None
    if _result_of(expected) != _result_of(got):
        return _token_difference(turn, got, batch, replies)
    batch.forget(expected.result_step)
    gauges = [
        f"{name}: {before} in the capture, {now} in the replay"
        for name in ("num_preemptions", "num_waiting", "num_free_blocks")
        if (before := getattr(expected, name)) != (now := getattr(got, name))
    ]
    return Difference("decision", turn.step_index, turn.offset, details=gauges) if gauges else None


def _plan_of(step: Step) -> tuple[object, ...]:
    return step.digest, step.rows, step.counts, step.removed_rows, step.added


def _result_of(step: Step) -> tuple[object, ...]:
    return step.result_step, step.tokens, step.token_counts, step.draft_counts, step.draft_tokens, step.pooled


def _plan_details(expected: Step, got: Step, batch: Batch) -> list[str]:
    """Return lines about both plans: - only in the capture, + only in the replay, ~ in both but different."""
    if not expected.digest or not got.digest:
        who = "capture" if expected.digest else "replay"
        return [f"only the {who} scheduled anything in this step", *([f"replay: {got.error}"] if got.error else [])]
    before, now = batch.copy(), batch.copy()
    before.apply(expected)
    now.apply(got)
    lines = _compare("tokens", before.scheduled(), now.scheduled())
    lines += _compare("cached tokens", _cached(expected), _cached(got))
    given_up = [{batch.request(row): 1 for row in unpack(step.removed_rows)} for step in (expected, got)]
    lines += _compare("row preempted", *given_up)
    if expected.num_preemptions != got.num_preemptions:
        lines.append(f"~ preemptions so far: {expected.num_preemptions} in the capture, {got.num_preemptions} now")
    if not lines:
        lines = ["the same requests and tokens; rows, block ids or the contents of added requests differ"]
    return lines[:_MAX_LINES] + [f"and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)


def _compare(what: str, expected: dict[str, int], got: dict[str, int]) -> list[str]:
    lines = [f"- {key}: {expected[key]} {what}" for key in expected.keys() - got.keys()]
    lines += [f"+ {key}: {got[key]} {what}" for key in got.keys() - expected.keys()]
    both = expected.keys() & got.keys()
    lines += [f"~ {key}: {expected[key]} {what}, {got[key]} now" for key in both if expected[key] != got[key]]
    return sorted(lines, key=lambda line: (line[2:], line))


def _cached(step: Step) -> dict[str, int]:
    return {name_request((client, number), row): cached for row, client, number, cached in step.added}


def _token_difference(turn: Turn, got: Step, batch: Batch, replies: Iterable[tuple[int, EngineReply]]) -> Difference:
    expected = turn.step
    sizes = [(step.result_step, len(step.tokens), step.token_counts) for step in (expected, got)]
    if sizes[0] != sizes[1]:
        text = "tokens of plan {} ({} rows, {} tokens) arrived in the {}"
        details = [
            text.format(step.result_step, len(step.token_counts or step.tokens) // 4, len(step.tokens) // 4, who)
            for who, step in (("capture", expected), ("replay", got))
        ]
        return Difference("token", turn.step_index, turn.offset, details=details)
    ours, theirs = unpack(expected.tokens), unpack(got.tokens)
    if ours == theirs:
        text = "the vectors of pooling requests, or the drafts, of this step differ"
        return Difference("token", turn.step_index, turn.offset, details=[text])
    places = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    row, offset = _row_of(places[0], unpack(got.token_counts))
    requests = batch.requests_of(got.result_step)
    key = requests[row] if row < len(requests) else None
    first = None if key is None else _position(key, replies)
    return Difference(
        "token",
        turn.step_index,
        turn.offset,
        client=key and key[0],
        request=key and key[1],
        position=None if first is None else first + offset,
        expected=ours[places[0]],
        got=theirs[places[0]],
        details=[f"{len(places) - 1} more tokens of this step differ"] if len(places) > 1 else [],
    )


def _row_of(place: int, counts: list[int]) -> tuple[int, int]:
    """(index of the row, index among its tokens) of a token; counts: of each row; empty if all have one."""
    for row, count in enumerate(counts):
        if place < count:
            return row, place
        place -= count
    return place, 0


def _position(key: RequestKey, replies: Iterable[tuple[int, EngineReply]]) -> int | None:
    """Return the position of the request's first token in this step.

    None: its tokens were dropped, because its request had ended or was preempted.
    """
    for client, reply in replies:
        if client == key[0] and isinstance(reply, Outputs) and reply.tokens:
            numbers = np.frombuffer(reply.numbers, "<u4").tolist()
            if key[1] in numbers:
                return int(np.frombuffer(reply.positions, "<u4")[numbers.index(key[1])])
    return None


def unpack(column: bytes) -> list[int]:
    """Return an int32 column as a list; an incomplete last entry is left out."""
    values: list[int] = np.frombuffer(column[: len(column) // 4 * 4], "<i4").tolist()
    return values
