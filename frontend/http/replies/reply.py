"""Reply: one HTTP answer made from the tokens of one or several requests, as they arrive.

A stream's headers wait for the first news, so that a refusal is a status and not an event; after HEAD_S they are sent
alone. A stream is written once for each wake-up of the pump. While its connection is full, nothing is taken from the
journal, which is the buffer. Parts that take long to write are written on a thread, and the reply is on hold during
that. A reply always ends through end().
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from frontend.client.client import EngineClient
from frontend.client.progress import Progress
from frontend.client.received_logprobs import ReceivedLogprobs
from frontend.http.errors import Headers, HttpError, http_error
from frontend.http.holdings import MAX_LOGPROBS
from frontend.http.replies.answer_format import AnswerFormat, EchoingFormat, PromptSide, StoredFormat
from frontend.http.replies.receipts import Receipts
from frontend.http.replies.text_frames import FramedFormat
from frontend.http.replies.usage import Usage
from frontend.http.request import JSON, Request
from frontend.results.completion_state import CompletionState, free_slowly
from frontend.results.outputs import TokenLogprobs
from frontend.results.request_state import RequestState
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Answered
from ipc.wire.messages import FinishReason

HEAD_S = 0.25
KEEP_ALIVE_S = 15.0
STALL_S = 60.0  # how long a peer may read nothing
MAX_BEHIND = 4096  # most tokens that a peer may be behind
#: Most work for one answer in the event loop: tokens, log probabilities, and 16 for each choice. About 10 ms.
MAX_IN_LOOP = 4096

_UNAVAILABLE = "the engine ended this request before it was complete"


class Owner(Protocol):
    """The pump's interface for replies."""

    client: EngineClient

    def remove(self, reply: "Reply") -> None:
        """Remove an ended reply and its requests."""

    def wake(self) -> None:
        """Look for news of replies that were on hold."""

    def make(
        self,
        reply: "Reply",
        size: int,
        work: Callable[[], bytes],
        done: Callable[[bytes], None],
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run `work`, on a thread if it is long, and `then`; call done() with the work's result in the event loop, and
        flush the reply.

        size: of the work, in the units of MAX_IN_LOOP.
        """


class Part:
    """One request of a reply. first: index of its first choice among the reply's. The pump finds it by its number."""

    def __init__(self, reply: "Reply", state: RequestState, params: SamplingParams, first: int) -> None:
        self.reply = reply
        self.state = state
        self._first = first
        self.params = params
        self.last: Progress | None = None  # at the end of the last choice that has ended
        self._has_logprobs = params.logprobs is not None
        self._shows_logprobs = self._has_logprobs or params.prompt_logprobs is not None
        self._completions = state.completions
        self._num_going = len(state.completions)
        self._prompt_logprobs: ReceivedLogprobs | None = None
        self._is_prompt_due = reply.echo is not None
        #: Work for each new token; see Pump. For an answer that is not streamed it is done at the end.
        self.weight = 1 + 4 * (params.logprobs + 1) if params.logprobs is not None and reply.is_streamed else 1
        self._num_cached = -1  # tokens of the prompt in reply.usage; -1 = not counted yet

    @property
    def size(self) -> int:
        """Return the work of an answer with all of this request's tokens; see MAX_IN_LOOP."""
        return sum(16 + len(one.token_ids) for one in self._completions) + self.num_logprobs

    @property
    def num_logprobs(self) -> int:
        """Return the log probabilities shown by an answer that is not streamed, as far as they are known."""
        if not self._shows_logprobs:  # as nearly always
            return 0
        return sum(one.num_unread_logprobs for one in self._completions) + self.prompt_size

    @property
    def prompt_size(self) -> int:
        """Return the work for the prompt's log probabilities, as far as they are known."""
        positions = [] if self._prompt_logprobs is None else self._prompt_logprobs.prompt
        return len(positions) * len(positions[0].token_ids) if positions else 0

    def take(self, client: EngineClient, choice: int, ids: list[int], finish: int) -> None:
        """Take news of a choice."""
        completion, reply = self._completions[choice], self.reply
        if completion.finished or reply.is_ended:
            return
        if reply.takes_each_token and len(ids) > 1:
            for token in ids[:-1]:
                self.take(client, choice, [token], 0)
            ids = ids[-1:]
            if completion.finished or reply.is_ended:
                return
        if not finish and (frames := reply.frames) is not None:
            text = frames.table[ids[0]] if len(ids) == 1 else frames.table.join(ids)
            if text is not None and completion.take_whole(ids):
                reply.usage.completion_tokens += len(ids)
                if text:
                    reply.pending.append(frames.heads[self._first + choice] + text + frames.tail)
                return
        before = len(completion.token_ids)
        progress: Progress | None = None
        if finish or self._has_logprobs:
            progress = client.read(self.state.number, completion.num_tokens, choice)
            if len(progress.token_ids) > len(ids):  # the rest comes later
                progress = progress._replace(token_ids=progress.token_ids[: len(ids)], finish=FinishReason(finish))
            if not self._is_sound(choice, progress):
                return
            self._count_cached(progress)
            changed = completion.update(progress)
        else:
            if self._num_cached < 0:
                self._count_cached(client.read(self.state.number, completion.num_tokens, choice))
            changed = completion.take(ids, FinishReason.NONE)
        reply.usage.completion_tokens += len(completion.token_ids) - before
        if completion.finished:
            self.last = progress or self.last
            self._num_going -= 1
            reply.num_going -= 1
            if choice == 0:
                self._take_prompt_logprobs(progress or client.read(self.state.number, completion.num_tokens))
            if not finish and self._num_going:  # by a stop string, while other choices continue
                client.abort([self.state.number], [choice])
        if self._is_prompt_due and reply.echo is not None and progress is not None:
            self._is_prompt_due = False
            self._take_prompt_logprobs(progress)  # complete once there is a token
            piece = partial(reply.echo.prompt_piece, self._first)
            reply.add_piece(self.prompt_size, lambda: piece(self.prompt_side()))
        if changed and reply.is_streamed:
            reply.add(self._first + choice, completion)

    def prompt_side(self) -> PromptSide:
        """Return the prompt in the form for an answer."""
        prompt, received = self.state.prompt, self._prompt_logprobs
        logprobs = None if received is None else _PromptLogprobs(self.state, received)
        return PromptSide(prompt.text, prompt.token_ids, logprobs, max(0, self._num_cached))

    def _is_sound(self, choice: int, progress: Progress) -> bool:
        """Return whether a choice continues or ended with an answer; otherwise the reply fails.

        A beam search may find fewer sequences than choices: then the last choices end without an answer, but not the
        first.
        """
        has_no_sequence = choice > 0 and self.params.use_beam_search
        if progress.error is None and (progress.finish != FinishReason.ABORT or has_no_sequence):
            return True
        self.reply.fail(progress.error or HttpError(503, _UNAVAILABLE))
        return False

    def _count_cached(self, progress: Progress) -> None:
        """Count the prompt's cached tokens. They change if an engine began the request again."""
        self.reply.usage.cached_tokens += progress.num_cached_tokens - max(self._num_cached, 0)
        self._num_cached = progress.num_cached_tokens
        self.reply.usage.pins = progress.pins or self.reply.usage.pins

    def _take_prompt_logprobs(self, progress: Progress) -> None:
        if progress.logprobs is not None and self.params.prompt_logprobs is not None:
            self._prompt_logprobs = progress.logprobs


class _PromptLogprobs(Iterable[TokenLogprobs | None]):
    """The log probabilities of a prompt, made while they are read: those of a long one are 100,000 objects, and while
    they exist the garbage collector looks through them for tens of milliseconds.
    """

    def __init__(self, state: RequestState, received: ReceivedLogprobs) -> None:
        self._state, self._received = state, received

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return self._state.each_prompt_logprobs(self._received)


class Reply:
    """See the module's docstring. is_streamed: write tokens as they arrive, otherwise the whole answer at the end.

    on_end: called once, with the tokens of prompts and choices, when it has ended; `cause` says how. num_choices: of
    all its requests, which may be attached in parts; nothing is written before all are. receipts: makes those of the
    answer; None = it has none.
    """

    def __init__(
        self,
        request: Request,
        answer_format: AnswerFormat,
        *,
        is_streamed: bool,
        max_model_len: int,
        num_choices: int,
        receipts: Receipts | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self.request = request
        self.is_streamed = is_streamed
        self.is_ended = False
        self.cause = ""
        self.status = 200
        self.parts: list[Part] = []
        self.usage = Usage(0)
        self.pending: list[bytes] = []  # of a stream, for the next write
        self.unsent: bytes | None = None  # of a stream, for send(); empty if only its headers are due
        echoes = isinstance(answer_format, EchoingFormat) and answer_format.echoes
        self.echo = answer_format if isinstance(answer_format, EchoingFormat) and echoes else None
        self.frames = answer_format.text_frames() if isinstance(answer_format, FramedFormat) else None
        stored = answer_format if isinstance(answer_format, StoredFormat) and answer_format.is_stored else None
        self._store = None if stored is None else stored.store
        self.takes_each_token = stored is not None and stored.takes_each_token
        self._closing: bytes | None = None  # of a stream that is stored
        self.num_going = num_choices
        self._num_attached = 0  # choices
        self._num_choices = num_choices
        self._num_making = 0  # pieces being written by threads
        self.last_write = request.received_at  # monotonic seconds, as the following
        self.full_since = 0.0  # 0 = the connection takes data
        self.first_token_at = 0.0
        self._format, self._receipts = answer_format, receipts
        self._exchange = request.exchange
        self._max_model_len = max_model_len
        self._is_started = False
        self._failure: HttpError | None = None
        self._owner: Owner | None = None
        self._on_end = on_end
        self.on_closed: Callable[[], None] | None = None  # called last, once the reply has ended

    def attach(self, owner: Owner, states: Sequence[tuple[RequestState, SamplingParams]]) -> list[Part]:
        """Make the parts of these submitted requests and return them."""
        self._owner = owner
        num_before = len(self.parts)
        for state, params in states:
            self.parts.append(Part(self, state, params, self._num_attached))
            self._num_attached += len(state.completions)
            self.usage.prompt_tokens += len(state.prompt.token_ids)
        return self.parts[num_before:]

    def add(self, index: int, completion: CompletionState) -> None:
        """Add a choice's news to the next write."""
        size = completion.num_unread_logprobs
        if size <= MAX_IN_LOOP:
            self.pending.append(self._format.piece(index, completion.output(), self.usage))
        else:
            self.add_piece(size, lambda: self._format.piece(index, completion.output(), self.usage))

    def add_piece(self, size: int, make: Callable[[], bytes]) -> None:
        """Add the result of `make` to the next write. Long work is done on a thread, and the reply is on hold."""
        place = len(self.pending)
        if size <= MAX_IN_LOOP:
            self.pending.append(make())
            return
        self.pending.append(b"")
        self._make(size, make, partial(self.pending.__setitem__, place))

    def fail(self, error: Exception) -> None:
        """Let the next flush() end the reply with this error; only the first error counts."""
        if self._failure is None:
            self._failure = http_error(error, max_model_len=self._max_model_len)

    @property
    def failure(self) -> HttpError | None:
        """Return the error with which the reply ends."""
        return self._failure

    def flush(self, now: float) -> None:
        """Write the end and pending parts, or leave the next part of a stream to send(). now: monotonic seconds."""
        if self.is_ended or self.full_since or self._num_making or self._num_attached < self._num_choices:
            return
        if self._failure is not None:
            self._write_failure(self._failure)
        elif self.is_streamed:
            if self._store is not None and not self.num_going and self._closing is None:
                self._make(1, partial(self._close, tuple(self.parts)), partial(setattr, self, "_closing"), self._store)
            else:
                self._write_events(now)
        elif not self.num_going:
            size = sum(part.size for part in self.parts)
            whole = partial(self._whole, tuple(self.parts))
            if size <= MAX_IN_LOOP and self._store is None:
                self._end_whole(whole())
            else:
                self._make(size, whole, self._end_whole, self._store)

    def send(self, now: float) -> None:
        """Write the part that flush() has made. now: monotonic seconds."""
        body, self.unsent = self.unsent, None
        if body is not None and not self.is_ended and self._exchange.write(body):
            self._hold(now)

    def start_late(self) -> None:
        """Write the headers of a stream that has no news yet."""
        is_complete = self._num_attached >= self._num_choices and not self._num_making
        is_due = is_complete and not (self.is_ended or self._is_started or self.full_since)
        if is_due and self._failure is None:
            self._exchange.write(self._begin_stream())

    def tick(self, now: float) -> None:
        """Keep a silent stream alive; end one whose peer does not read."""
        if self.full_since:
            behind = max(self._client().hold(part.state.number, True) for part in self.parts)
            if now - self.full_since > STALL_S or behind > MAX_BEHIND:
                self.end("stalled")
                self.request.exchange.abort()
        elif self._is_started and self._format.keep_alive and now - self.last_write > KEEP_ALIVE_S:
            self._exchange.write(self._format.keep_alive)
            self.last_write = now

    def leave(self) -> None:
        """End the reply because its peer has left."""
        self.end("disconnected")

    def end(self, cause: str) -> None:
        """End the reply: remove its requests and abort running ones. Only the first call counts."""
        if self.is_ended:
            return
        self.is_ended, self.cause = True, cause
        if self._owner is not None:
            self._owner.remove(self)
        if self._on_end is not None:
            self._on_end(self.usage.prompt_tokens + self.usage.completion_tokens)
        closed, self.on_closed = self.on_closed, None
        if closed is not None:
            closed()
        self._exchange.on_left = self._exchange.on_writable = None  # no cycles: freed here, not by the collector
        self.parts.clear()

    def _make(
        self,
        size: int,
        work: Callable[[], bytes],
        done: Callable[[bytes], None],
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        assert self._owner is not None, "the reply has no pump"
        self._num_making += 1
        self._hold_parts(True)

        def end(made: bytes) -> None:
            self._num_making -= 1
            if self.is_ended:
                return
            if not (self._num_making or self.full_since):
                self._hold_parts(False)
            if self._failure is None:
                done(made)

        self._owner.make(self, size, work, end, then)

    def _whole(self, parts: Sequence[Part]) -> bytes:
        count = sum(part.num_logprobs for part in parts)
        if count > MAX_LOGPROBS:
            text = f"the answer has {count} log probabilities; at most {MAX_LOGPROBS} fit into one that is not streamed"
            raise HttpError(400, f"{text}: stream it, or ask for fewer tokens")
        choices = [one.output() for part in parts for one in part.state.completions]
        times = [part.last.first_token_time for part in parts if part.last is not None and part.last.first_token_time]
        self.usage.first_token_time = min(times, default=0.0)
        self._prove(parts)
        body = self._format.whole(choices, [part.prompt_side() for part in parts], self.usage)
        for choice in choices:
            free_slowly(choice.logprobs)
        for part in parts:
            for one in part.state.completions:
                one.forget_logprobs()
        return body

    def _close(self, parts: Sequence[Part]) -> bytes:
        """Return the end of a stream. parts: the reply's, which has none any more once it has been ended."""
        self._prove(parts)
        return self._format.closing(self.usage)

    def _prove(self, parts: Sequence[Part]) -> None:
        """Make the receipts, if there are to be any: every choice has ended."""
        if self._receipts is not None:
            choices = [[Answered(one.token_ids, one.finish_reason) for one in part.state.completions] for part in parts]
            self.usage.receipts = self._receipts.of(choices)

    def _end_whole(self, body: bytes) -> None:
        self._write_whole(200, body, [])
        self.end("finished")

    def _write_events(self, now: float) -> None:
        pending = self.pending
        body = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        is_last = not self.num_going
        if is_last:
            body += self._close(self.parts) if self._closing is None else self._closing
        if not self._is_started:
            self.first_token_at = now
            body = self._begin_stream() + body
        self.last_write = now
        if is_last:
            self._exchange.end(body)
            self.end("finished")
        else:
            self.unsent = body

    def _hold(self, now: float) -> None:
        """Take no more news until the peer has read."""
        self.full_since = now
        self._exchange.on_writable = self._resume
        self._hold_parts(True)

    def _hold_parts(self, held: bool) -> None:
        for part in self.parts:
            self._client().hold(part.state.number, held)

    def _resume(self) -> None:
        self.full_since = 0.0
        if self.is_ended or self._num_making:
            return
        self._hold_parts(False)
        if self._failure is not None:
            self.flush(self.last_write)
        elif self._owner is not None:
            self._owner.wake()

    def _write_failure(self, error: HttpError) -> None:
        if self._is_started:
            self._exchange.end(b"".join(self.pending) + self._format.failure(error))
        else:
            self.status = error.status
            self._write_whole(error.status, self.request.error_body(error), error.headers)
        self.end(f"error {error.status}")

    def _client(self) -> EngineClient:
        assert self._owner is not None, "the reply has no pump"
        return self._owner.client

    # --- the wire -----------------------------------------------------------------------------------------------

    def _begin_stream(self) -> bytes:
        """Begin the stream, and return its opening. If that fails, the error is still a status."""
        opening = self._format.opening()
        self._is_started = True
        fields = [
            (b"content-type", self._format.stream_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.request.answer_headers,
        ]
        self._exchange.begin(fields)
        return opening

    def _write_whole(self, status: int, body: bytes, headers: Headers) -> None:
        self._exchange.write_whole(status, [(b"content-type", JSON), *self.request.answer_headers, *headers], body)
