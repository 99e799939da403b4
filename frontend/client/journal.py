"""The journal: a client's live requests, one row per choice, updated from the engine's output columns.

It keeps every request as submitted and every token received, so requests can be resumed from it after an engine is
lost. Applying a batch of outputs is a handful of column operations. Python code runs for a single request only when it
is added, stopped by a token, failed or removed. Owner and lock: frontend/client/client.py.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from frontend.client.news import NO_NEWS, News
from frontend.client.output_columns import OutputColumns, columns_of
from frontend.client.progress import Progress
from frontend.client.received_logprobs import ReceivedLogprobs, logprob_columns_of
from frontend.client.request_events import RequestEvent, read_events
from ipc.errors import EngineCoreError, MalformedMessageError
from ipc.tables.arrays import AnyInts, Bools, Doubles, Floats, Int32s, Ints, UInt8s
from ipc.tables.columns import Columns, column
from ipc.tables.paged_rows import PagedRows
from ipc.wire.feature_messages import PutFeature, parts_of
from ipc.wire.messages import Abort, AddRequest, FinishReason, Outputs, Submission
from ipc.wire.pin_messages import PinAnswer, granted
from ipc.wire.pooling_messages import Pooled

_PAGE_SIZE = 64  # tokens
_SIBLINGS_PAGE = 4  # rows
_FIRST_ROWS = 64
_NO_STOP_TOKEN = -1
_MANY = 2**62  # tokens
#: Most requests, and most tokens of each choice, in one batch of news. They bound a consumer's work for it.
MAX_NEWS_REQUESTS, MAX_NEWS_TOKENS = 2048, 256


class Journal(Columns):
    """Table of one session's live requests; see the module's docstring. Times: monotonic seconds, 0 = none."""

    _num_choices: Ints = column()  # in rows of first choices only
    _first: Ints = column()  # row of the first choice of the row's request
    _number: Ints = column(-1)
    _choice: Ints = column()
    _num_delivered: Ints = column()
    _num_taken: Ints = column()  # tokens that take_news() has returned
    _num_cached_tokens: Ints = column()
    _num_draft_tokens: Ints = column()
    _num_accepted_tokens: Ints = column()
    _finish: UInt8s = column()  # FinishReason
    _end_taken: Bools = column()  # take_news() has returned its finish
    _stop_token: Ints = column(_NO_STOP_TOKEN)
    _aborted: Bools = column()  # the engine was asked to abort it
    _streaming: Bools = column()
    _ready: Bools = column()  # has news that its consumer waits for but has not taken
    _held: Bools = column()  # its consumer takes no news now; in rows of first choices only
    _arrival_time: Doubles = column()
    _first_token_time: Doubles = column()
    _last_token_time: Doubles = column()
    _finished_time: Doubles = column()
    _seat: Ints = column()  # scratch of apply
    _version: Ints = column()  # of the weights of its last token

    def __init__(self) -> None:
        super().__init__(_FIRST_ROWS)
        self.num_live = 0
        self._tokens = PagedRows(_FIRST_ROWS, _PAGE_SIZE)
        self._requests: list[Submission | None] = [None] * _FIRST_ROWS
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._errors: dict[int, EngineCoreError] = {}  # by row
        self._logprobs: dict[int, ReceivedLogprobs] = {}  # by row, of requests that asked for them
        self._events: dict[int, list[RequestEvent]] = {}  # by row of the first choice
        self._siblings = PagedRows(_FIRST_ROWS, _SIBLINGS_PAGE)  # rows of all choices, by first row, if n > 1
        self._puts: dict[int, Sequence[PutFeature]] = {}  # by row of the first choice, of requests with features
        self._vectors: dict[int, Floats] = {}  # by row, of pooling requests
        self._index = NumberIndex()
        self._has_versions = False  # whether any token came from other weights than those of an engine's start
        self._versions: dict[int, list[tuple[int, int]]] = {}  # by row; see Progress
        self._pins: dict[int, Sequence[PinAnswer]] = {}  # by row of the first choice, of requests with pins
        self._next_news = 0  # row at which take_news() begins if there are too many

    # --- events: one request ------------------------------------------------------------------------------------

    def add(self, request: Submission, *, streaming: bool, now: float, puts: Sequence[PutFeature] = ()) -> int:
        """Add a request, whose number must be above all earlier numbers; return the row of its first choice.

        streaming: every new token is news; otherwise only the end is. now: monotonic seconds. puts: its features.
        """
        while len(self._free) < request.params.n:
            self._grow_rows()
        rows = [self._free.pop() for _ in range(request.params.n)]
        row = rows[0]
        self._index.add(request.number, row)
        self._requests[row] = request
        self._puts |= {row: puts} if puts else {}
        self._num_choices[row] = len(rows)
        if len(rows) > 1:
            self._siblings.extend(row, 0, np.array(rows))
            self._choice[rows] = range(len(rows))
        which: list[int] | int = row if len(rows) == 1 else rows  # writing a single entry takes a fifth of the time
        self._first[which] = row
        self._number[which] = request.number
        self._streaming[which] = streaming
        self._arrival_time[which] = now
        for each, tokens in zip(rows, request.delivered, strict=False):
            self._deliver(each, np.frombuffer(tokens, "<i4"))
        if request.params.reports_logprobs:
            num_prompt_tokens = len(request.prompt_token_ids) // 4
            self._logprobs |= {each: ReceivedLogprobs(num_prompt_tokens) for each in rows}
        self.num_live += 1
        return row

    def _deliver(self, row: int, tokens: Int32s) -> None:
        """Enter the first tokens of a choice."""
        self._tokens.extend(row, 0, tokens)
        self._num_delivered[row] = len(tokens)

    def fail(self, number: int, error: EngineCoreError, now: float) -> bool:
        """Finish a request with the engine's error; its tokens stay readable. Return False as finish() does."""
        rows = [row for row in self._rows_of_request(number) if not self._finish[row]]
        if not rows:
            return False
        self._errors |= dict.fromkeys(rows, error)
        return self.finish(number, FinishReason.ABORT, now)

    def finish(self, number: int, reason: FinishReason, now: float) -> bool:
        """Finish a request without an output of the engine. Return False if it is not live or has finished."""
        rows = [row for row in self._rows_of_request(number) if not self._finish[row]]
        if not rows:
            return False
        self._finish[rows] = reason
        self._finished_time[rows] = now
        self._ready[self._first[rows]] = True
        return True

    def is_aborted(self, number: int) -> bool:
        """Return whether the engine was asked to abort all unfinished choices of a request."""
        return all(self._aborted[row] or self._finish[row] for row in self._rows_of_request(number))

    def resubmission(self, number: int, now: float) -> list[PutFeature | Submission | Abort]:
        """Return the messages that resume a request in a new session.

        The request continues after the delivered tokens, with the remaining part of the deadline. Its features come
        before it. An Abort follows for choices that were aborted alone, as by stop strings.
        """
        rows, request = self._rows_of_request(number), self.request(number)
        delivered = [self._tokens.read(row, 0, int(self._num_delivered[row])) for row in rows]
        left_ms = request.deadline_ms - int((now - self._arrival_time[rows[0]]) * 1000)
        again = msgspec.structs.replace(request, deadline_ms=max(1, left_ms) if request.deadline_ms else 0)
        if isinstance(again, AddRequest):
            tokens = [column.astype("<i4", copy=False).tobytes() for column in delivered]
            pins = granted(again.pins) if rows[0] in self._pins else again.pins
            again = msgspec.structs.replace(again, delivered=tokens, pins=pins)
        aborted = np.flatnonzero(self._aborted[rows])
        first: list[PutFeature | Submission | Abort] = [
            part for put in self._puts.get(rows[0], ()) for part in parts_of(put)
        ]
        first.append(again)
        if not len(aborted):
            return first
        return [*first, Abort(np.full(len(aborted), number, "<u4").tobytes(), aborted.astype("<u2").tobytes())]

    def remove(self, number: int) -> bool:
        """Remove a request; later outputs for it are dropped. Return whether it was live and unfinished."""
        rows = self._rows_of_request(number)
        if not rows:
            return False
        unfinished = not all(self._finish[row] for row in rows)
        self._index.remove(number)
        self._requests[rows[0]] = None
        if len(rows) > 1:
            self._siblings.clear(rows[0])
        for row in rows:
            self._clear(row)
        self.clear_columns(rows if len(rows) > 1 else slice(rows[0], rows[0] + 1))
        self._free.extend(reversed(rows))
        self.num_live -= 1
        return unfinished

    def _clear(self, row: int) -> None:
        self._tokens.clear(row)
        self._errors.pop(row, None)
        self._logprobs.pop(row, None)
        self._vectors.pop(row, None)
        self._puts.pop(row, None)
        self._events.pop(row, None)
        self._versions.pop(row, None)
        self._pins.pop(row, None)

    def read(self, number: int, start: int = 0, choice: int = 0) -> Progress:
        """Return the state of one choice of a live request, with its tokens from output position `start` on."""
        row = self.row(number, choice)
        assert row >= 0, f"request {number} is not in the journal"
        stop_token = self._stop_token.item(row)
        first = self._first.item(row)
        return Progress(
            token_ids=self._tokens.read(row, start, self._num_delivered.item(row)),
            finish=FinishReason(self._finish.item(row)),
            stop_token=None if stop_token == _NO_STOP_TOKEN else stop_token,
            num_cached_tokens=self._num_cached_tokens.item(first),
            arrival_time=self._arrival_time.item(row),
            first_token_time=self._first_token_time.item(row),
            last_token_time=self._last_token_time.item(row),
            finished_time=self._finished_time.item(row),
            error=self._errors.get(row),
            logprobs=self._logprobs.get(row),
            vectors=self._vectors.get(row),
            events=tuple(self._events.get(first, ())),
            num_draft_tokens=self._num_draft_tokens.item(row),
            num_accepted_tokens=self._num_accepted_tokens.item(row),
            weights_versions=tuple(self._versions.get(row, ())),
            pins=self._pins.get(first, ()),
        )

    def row(self, number: int, choice: int = 0) -> int:
        """Return the row of one choice of a request; -1 if the request is not live."""
        row = self._index.row(number)
        return row if row < 0 or choice == 0 else self._rows_of_request(number)[choice]

    def _rows_of_request(self, number: int) -> list[int]:
        """Return the rows of all choices of a request; empty if it is not live."""
        row = self.row(number)
        if row < 0 or self._num_choices[row] == 1:
            return [row] if row >= 0 else []
        rows: list[int] = self._siblings.read(row, 0, int(self._num_choices[row])).tolist()
        return rows

    def request(self, number: int) -> Submission:
        """Return a live request as it was submitted."""
        request = self._requests[self.row(number)] if self.row(number) >= 0 else None
        assert request is not None, f"request {number} is not in the journal"
        return request

    # --- columns ------------------------------------------------------------------------------------------------

    def rows_of(self, numbers: AnyInts, choices: Ints | None = None) -> Ints:
        """Return the rows [N] of these requests' choices (None = the first choice); -1 for one that is not live.

        Errors: MalformedMessageError for a choice that its request does not have.
        """
        rows = self._index.rows(numbers)
        if choices is None:
            return rows
        others = np.flatnonzero((choices > 0) & (rows >= 0))
        first, choice = rows[others], choices[others]
        if (choice >= self._num_choices[first]).any():
            raise MalformedMessageError("an output row has a choice that its request does not have")
        rows[others] = self._siblings.get(first, choice)
        return rows

    def take_ready(self, numbers: Ints | None = None) -> Ints:
        """Take and return the numbers of requests with news: finished, or new tokens while streaming.

        numbers: only these requests; None = all.
        """
        rows = np.flatnonzero(self._ready) if numbers is None else self.rows_of(numbers)
        rows = rows[(rows >= 0) & self._ready[rows]]
        self._ready[rows] = False
        return self._number[rows]

    def take_news(self) -> News:
        """Take and return new tokens and ends of requests with news, except of those on hold.

        Of at most MAX_NEWS_REQUESTS requests, and at most MAX_NEWS_TOKENS tokens of a choice: has_more: there is more.
        A choice's end comes with its last tokens.
        """
        firsts = (self._ready & ~self._held).nonzero()[0]
        if not len(firsts):
            return NO_NEWS
        if has_more := len(firsts) > MAX_NEWS_REQUESTS:  # those after the last ones first, so that each has its turn
            firsts = np.roll(firsts, -int(firsts.searchsorted(self._next_news)))[:MAX_NEWS_REQUESTS]
            self._next_news = int(firsts[-1]) + 1
        rows = firsts
        self._ready[rows] = False
        if np.count_nonzero(self._num_choices[rows] > 1):
            rows = np.array([each for row in rows.tolist() for each in self._rows_of_request(int(self._number[row]))])
        has_ended = (self._finish[rows] > 0) & ~self._end_taken[rows]
        rows = rows[(self._num_delivered[rows] > self._num_taken[rows]) | has_ended]
        starts, ends, finish = self._num_taken[rows], self._num_delivered[rows], self._finish[rows]
        counts = ends - starts
        if np.count_nonzero(counts > MAX_NEWS_TOKENS):
            cut = counts > MAX_NEWS_TOKENS
            counts = np.minimum(counts, MAX_NEWS_TOKENS)
            ends, finish = starts + counts, np.where(cut, 0, finish).astype(np.uint8)
            self._ready[self._first[rows[cut]]] = has_more = True
        before = counts.cumsum() - counts
        positions = np.arange(int(counts.sum())) + (starts - before).repeat(counts)
        self._num_taken[rows] = ends
        self._end_taken[rows] = finish > 0
        tokens = self._tokens.get(rows.repeat(counts), positions)
        return News(self._number[rows], self._choice[rows], counts, tokens, finish, has_more)

    def hold(self, number: int, held: bool) -> int:
        """Start or stop holding a live request; return how many of its first choice's tokens were not taken."""
        row = self.row(number)
        self._held[row] = held
        return int(self._num_delivered[row] - self._num_taken[row])

    def mark_aborted(self, numbers: Sequence[int], choices: Sequence[int]) -> None:
        """Record that the engine was asked to abort these requests, so that they are not resubmitted.

        choices: the aborted choice of each number; empty = all choices.
        """
        if len(choices):
            rows = [self.row(number, choice) for number, choice in zip(numbers, choices, strict=True)]
        else:
            rows = [row for number in numbers for row in self._rows_of_request(number)]
        self._aborted[[row for row in rows if row >= 0]] = True

    def unfinished(self) -> Ints:
        """Return the numbers of unfinished requests, ascending: those to resubmit to a new engine."""
        return np.unique(self._number[(self._number >= 0) & (self._finish == 0)])

    def unfinished_in_order(self) -> Ints:
        """Return the numbers of unfinished requests: those with tokens first, the shortest first, then by number."""
        numbers = self.unfinished()
        lengths = np.array([self._length_if_begun(number) for number in numbers.tolist()], np.int64)
        return numbers[np.lexsort((numbers, lengths))]

    def _length_if_begun(self, number: int) -> int:
        """Return the number of a request's tokens, including the prompt's; a large number if it has no output."""
        num_output = int(self._num_delivered[self._rows_of_request(number)].sum())
        return len(self.request(number).prompt_token_ids) // 4 + num_output if num_output else _MANY

    def apply(self, outputs: Outputs, now: float) -> Ints:
        """Apply the outputs of one step; return the rows [N] with news.

        Outputs for removed or finished requests, and tokens at positions that were delivered before, are dropped. A
        position above the delivered ones is an AssertionError. Errors: MalformedMessageError if columns do not fit.
        """
        columns = columns_of(outputs)
        return self.apply_columns(outputs, columns, self.rows_of(columns.numbers, columns.choices), now)

    def apply_columns(self, outputs: Outputs, columns: OutputColumns, rows: Ints, now: float) -> Ints:
        """Apply outputs whose columns and rows are known; see apply()."""
        live = (rows >= 0) & (self._finish[rows] == 0)
        if np.count_nonzero(live) < len(live):
            columns, rows = columns.where(live), rows[live]
        seats = np.arange(len(rows))
        self._seat[rows] = seats
        if np.count_nonzero(self._seat[rows] != seats):
            raise MalformedMessageError(f"a choice has two rows in the output message of step {outputs.step}")
        delivered = self._num_delivered[rows]
        if np.count_nonzero(columns.positions > delivered):
            gap = int(np.argmax(columns.positions > delivered))
            raise AssertionError(
                f"request {columns.numbers[gap]}: {delivered[gap]} tokens were delivered, the next begin at position "
                f"{columns.positions[gap]} (epoch {outputs.epoch}, step {outputs.step})"
            )
        ends = np.maximum(columns.positions + columns.counts, delivered)
        self._write_tokens(columns, rows, delivered, ends)
        touched = ends > delivered
        fed = rows[touched]
        self._num_delivered[fed] = ends[touched]
        self._last_token_time[fed] = now
        if outputs.weights_version or self._has_versions:
            self._note_version(fed, delivered[touched], outputs.weights_version)
        first = fed[self._first_token_time[fed] == 0.0]
        self._first_token_time[first] = now
        if columns.finish is not None:
            finished = columns.finish > 0
            self._finish[rows[finished]] = columns.finish[finished]
            self._finished_time[rows[finished]] = now
            touched = touched | finished
        self._apply_events(outputs)
        news: Ints = rows[touched]
        awaited = news[self._streaming[news] | (self._finish[news] > 0)]
        self._ready[self._first[awaited]] = True
        return news

    def _note_version(self, rows: Ints, positions: Ints, version: int) -> None:
        """Note the weights of these rows' new tokens, which begin at these output positions."""
        self._has_versions = True
        changed = ((self._version[rows] != version) | (positions == 0)).nonzero()[0]
        for row, position in zip(rows[changed].tolist(), positions[changed].tolist(), strict=True):
            first = [(0, self._version.item(row))] if position else []
            self._versions.setdefault(row, first).append((position, version))
        self._version[rows] = version

    def note_pins(self, number: int, answers: Sequence[PinAnswer]) -> None:
        """Note the engine's answers to a request's pins; after a resumption, those of the next engine."""
        if (row := self.row(number)) >= 0:
            self._pins[row] = answers

    def any_ready(self, rows: Ints) -> bool:
        """Return whether one of these rows has news that its consumer waits for."""
        return bool(np.count_nonzero(self._ready[self._first[rows]]))

    def _write_tokens(self, columns: OutputColumns, rows: Ints, delivered: Ints, ends: Ints) -> None:
        if not len(columns.tokens):
            return
        self._tokens.ensure(rows, ends)
        if len(columns.tokens) == len(rows) == np.count_nonzero(columns.counts == 1):
            token_rows, positions, known = rows, columns.positions, delivered
        else:
            token_rows = rows.repeat(columns.counts)
            known = delivered.repeat(columns.counts)
            starts = np.cumsum(columns.counts) - columns.counts
            positions = np.arange(len(columns.tokens)) + (columns.positions - starts).repeat(columns.counts)
        new = positions >= known
        if np.count_nonzero(new) == len(new):
            self._tokens.set(token_rows, positions, columns.tokens)
        else:
            self._tokens.set(token_rows[new], positions[new], columns.tokens[new])

    def _apply_events(self, outputs: Outputs) -> None:
        if outputs.started:
            pairs = np.frombuffer(outputs.started, "<u4").reshape(-1, 2)
            rows = self.rows_of(pairs[:, 0])
            self._num_cached_tokens[rows[rows >= 0]] = pairs[rows >= 0, 1]
        if outputs.drafts:
            entries = np.frombuffer(outputs.drafts, "<u4").reshape(-1, 4).astype(np.int64)
            rows = self.rows_of(entries[:, 0], entries[:, 1])
            known = rows >= 0
            self._num_draft_tokens[rows[known]] = entries[known, 2]
            self._num_accepted_tokens[rows[known]] = entries[known, 3]
        if outputs.events is not None:
            for number, event in read_events(outputs.events):
                if (row := self.row(number)) >= 0:
                    self._events.setdefault(row, []).append(event)
        if outputs.logprobs is not None:
            for number, choice, position, logprobs in logprob_columns_of(outputs.logprobs).split():
                received = self._logprobs.get(self.row(number, choice))
                if received is not None:
                    received.add(position, logprobs, outputs.weights_version)
        if outputs.pooled is not None:
            for number, vectors in vectors_of(outputs.pooled):
                if (row := self.row(number)) >= 0:
                    self._vectors[row] = vectors
        for index, token in outputs.stop_tokens:
            numbers = np.frombuffer(outputs.numbers, "<u4")
            choices = np.frombuffer(outputs.choices or bytes(2 * len(numbers)), "<u2")
            if not 0 <= index < len(numbers):
                raise MalformedMessageError(f"stop token {token} is for row {index}; there are {len(numbers)} rows")
            row = self.row(int(numbers[index]), int(choices[index]))
            if row >= 0:
                self._stop_token[row] = token

    # --- growth -------------------------------------------------------------------------------------------------

    def _grow_rows(self) -> None:
        size = self.num_column_rows
        self.grow_columns(2 * size)
        self._tokens.grow_rows(2 * size)
        self._siblings.grow_rows(2 * size)
        self._requests.extend([None] * size)
        self._free.extend(range(2 * size - 1, size - 1, -1))


# NumberIndex: the journal's row of each live request, by the request's number; looked up as a column.


class NumberIndex:
    """Rows by request numbers, which only increase. -1: not live."""

    def __init__(self) -> None:
        # [1 + i]: row of number _first_number + i. Both ends stay -1: clipped look-ups land on them.
        self._row_of = np.full(66, -1, np.int64)
        self._first_number = 0

    def row(self, number: int) -> int:
        """Return the row of a number."""
        slot = number - self._first_number + 1
        return self._row_of.item(slot) if 0 < slot < len(self._row_of) else -1

    def rows(self, numbers: AnyInts) -> Ints:
        """Return the rows [N] of these numbers, in a new array."""
        slots = numbers.astype(np.int64) - (self._first_number - 1)
        rows: Ints = self._row_of.take(slots, mode="clip")
        return rows

    def add(self, number: int, row: int) -> None:
        """Enter a number above all earlier ones."""
        slot = self._slot_for(number)
        assert self._row_of[slot] == -1, (number, int(self._row_of[slot]))
        self._row_of[slot] = row

    def remove(self, number: int) -> None:
        """Remove a live number."""
        self._row_of[number - self._first_number + 1] = -1

    def _slot_for(self, number: int) -> int:
        """Return the index of `number` in _row_of; drop leading removed numbers and enlarge the array if needed."""
        slot = number - self._first_number + 1
        assert slot > 0, (number, self._first_number)
        if slot < len(self._row_of) - 1:
            return slot
        live = np.flatnonzero(self._row_of >= 0)
        dropped = int(live[0]) - 1 if len(live) else slot - 1
        kept = self._row_of[1 + dropped : -1]
        slot -= dropped
        self._row_of = np.full(max(len(self._row_of), 2 * (slot + 1)), -1, np.int64)
        self._row_of[1 : 1 + len(kept)] = kept
        self._first_number += dropped
        return slot


# The received vectors of pooling requests, read from the wire's columns.


def vectors_of(pooled: Pooled) -> Iterator[tuple[int, Floats]]:
    """Yield (number, vectors [n, width] float32) of each request. Errors: MalformedMessageError."""
    try:
        columns = (np.frombuffer(column, "<u4") for column in (pooled.numbers, pooled.counts, pooled.widths))
        numbers, counts, widths = (column.astype(np.int64) for column in columns)
        values = np.frombuffer(pooled.values, "<f4").astype(np.float32, copy=False)
    except ValueError as error:
        raise MalformedMessageError(f"a column of vectors is not a whole number of entries: {error}") from error
    if not len(numbers) == len(counts) == len(widths) or int((counts * widths).sum()) != len(values):
        raise MalformedMessageError(
            f"columns of vectors do not fit: {len(numbers)} numbers, {len(counts)} counts, {len(widths)} widths, "
            f"{len(values)} values"
        )
    end = 0
    for number, count, width in zip(numbers.tolist(), counts.tolist(), widths.tolist(), strict=True):
        start, end = end, end + count * width
        yield number, values[start:end].reshape(count, width)
