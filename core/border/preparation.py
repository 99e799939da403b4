"""Preparation: work for a request before the engine thread receives it, done by separate threads.

Each kind of work has its own thread, so that an image need not wait for a grammar. A request that needs several passes
through them in turn.

A request counts as queued from its admission. The engine's step remains a pure function of its inbox, and a capture
contains only prepared requests. Clients take turns, and so do one client's tenants, each with its share of the time
while others have work. Requests of one client without preparation keep their order, and so do requests of one tenant
with preparation. There is no order between the two kinds.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import msgspec
import numpy as np

from core import log
from core.border.busy import Busy
from core.border.inbox import Inbox
from core.border.turns import Turns
from ipc.errors import InvalidRequestError
from ipc.tables.columns import unpack_choices, unpack_numbers
from ipc.wire.messages import (
    Abort,
    ErrorCode,
    FinishReason,
    Outputs,
    RequestFailed,
    ServerMessage,
    Submission,
)

#: The most requests in preparation, over all clients.
MAX_PREPARING = 1024
_JOIN_S = 1.0  # seconds that close() waits for the running preparation; then its thread is abandoned


class Preparer(Protocol):
    """Protocol for work that requests need.

    share: the fraction of the time that the work may be done for one client while others have unfinished requests; 1.0
    = all. The work takes cores and the GIL from the others' steps.
    """

    share: float

    def start(self) -> None:
        """Do what the work for all requests needs, before the first of it. Called once, by this work's thread.

        If it fails, each prepare() fails.
        """
        ...

    def needs(self, message: Submission) -> bool:
        """Return whether a valid request needs preparation.

        Called with the socket's lock held, so it must not block.
        """
        ...

    def prepare(self, message: Submission) -> bool:
        """Prepare a part of a request, and return whether more is left. Called by this work's thread.

        Errors: InvalidRequestError, whose text is sent to the request's client.
        """
        ...

    def close(self) -> None:
        """Release the work's resources. A prepare() that is still running in another thread may fail."""
        ...


class Job(msgspec.Struct, eq=False):
    """A request waiting at the border."""

    client: int
    message: Submission
    aborts: list[Abort] = msgspec.field(default_factory=list)  # aborts of some of its choices
    is_free: bool = False  # its preparation is not charged to a share
    is_dropped: bool = False
    error: str = ""
    code: ErrorCode = ErrorCode.INVALID_ARGUMENT  # for the error

    @property
    def owner(self) -> tuple[int, str]:
        """Return the owner: the client, and the tenant that the request was sent for."""
        return self.client, self.message.tenant


class Waiting:
    """Requests that wait at the border and count as queued. Use it with the socket's lock held."""

    def __init__(self, inbox: Inbox, epoch: int) -> None:
        self._inbox = inbox
        self._epoch = epoch
        self._jobs: dict[tuple[int, int], Job] = {}  # by client and request number
        self._done: SimpleQueue[Job] = SimpleQueue()

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._jobs)

    def keep(self, client: int, message: Submission, *, is_free: bool = False) -> Job:
        """Make a request wait. take_done() puts it into the inbox once it is done."""
        job = self._jobs[client, message.number] = Job(client, message, is_free=is_free)
        self._inbox.begin_preparation(message)
        return job

    def abort(self, client: int, abort: Abort) -> tuple[Abort | None, Outputs | None]:
        """Abort requests that wait here.

        Return an Abort of the other requests, for the engine, and the last rows of the requests that ended here. If n >
        1, an abort of one choice follows the request into the inbox.
        """
        if not self._jobs:  # saves a lookup of thousands of numbers
            return abort, None
        numbers = unpack_numbers(abort.numbers)
        if not any((client, number) in self._jobs for number in numbers):
            return abort, None
        choices = unpack_choices(abort.choices) if abort.choices else [None] * len(numbers)
        left: list[tuple[int, int]] = []
        ended: dict[int, Job] = {}
        for number, choice in zip(numbers, choices, strict=True):
            job = self._jobs.get((client, number))
            if job is None:
                if number not in ended:
                    left.append((number, 0 if choice is None else choice))
            elif choice is None or job.message.params.n == 1:
                ended[number] = job
                self._drop(job)
            else:
                job.aborts.append(_pack([(number, choice)], has_choices=True))
        rest = _pack(left, has_choices=bool(abort.choices)) if left else None
        return rest, self._last_rows(list(ended.values())) if ended else None

    def forget(self, client: int) -> None:
        """Drop all requests of a client that is gone."""
        for job in [job for job in self._jobs.values() if job.client == client]:
            self._drop(job)

    def take_done(self) -> list[tuple[int, ServerMessage]]:
        """Put finished requests into the inbox; return (client, RequestFailed) for those that failed."""
        failed: list[tuple[int, ServerMessage]] = []
        for _ in range(self._done.qsize()):
            job = self._done.get_nowait()
            if job.is_dropped:
                continue
            self._drop(job)
            if job.error:
                failed.append((job.client, RequestFailed(job.message.number, job.code, job.error)))
            else:
                self._inbox.put(job.client, job.message)
                for abort in job.aborts:
                    self._inbox.put(job.client, abort)
        return failed

    def _drop(self, job: Job) -> None:
        """Remove a request from those that wait."""
        job.is_dropped = True
        del self._jobs[job.client, job.message.number]
        self._inbox.end_preparation(job.message)

    def _last_rows(self, jobs: list[Job]) -> Outputs:
        """Return one row with finish code ABORT for each choice of these requests."""
        rows = []
        for job in jobs:
            delivered = [len(tokens) // 4 for tokens in job.message.delivered]
            delivered += [0] * (job.message.params.n - len(delivered))
            rows += [(job.message.number, position, choice) for choice, position in enumerate(delivered)]
        numbers, positions, choices = zip(*rows, strict=True)
        return Outputs(
            epoch=self._epoch,
            step=0,
            numbers=np.array(numbers, "<u4").tobytes(),
            positions=np.array(positions, "<u4").tobytes(),
            counts=bytes(2 * len(rows)),
            tokens=b"",
            choices=np.array(choices, "<u2").tobytes() if any(choices) else b"",
            finish=bytes([FinishReason.ABORT]) * len(rows),
        )


class Preparation(Waiting):
    """Requests in preparation. Call all methods with the socket's lock held.

    wake: called by another thread when take_done() has a result.
    """

    def __init__(
        self, preparers: Sequence[Preparer], inbox: Inbox, busy: Busy, epoch: int, *, wake: Callable[[], None]
    ) -> None:
        super().__init__(inbox, epoch)
        self._wake = wake
        self._stages: list[_Stage] = []
        then = self._end
        for preparer in reversed(preparers):
            stage = _Stage(preparer, busy, then, self._end)
            self._stages.append(stage)
            then = stage.put
        self._first = then

    @property
    def is_full(self) -> bool:
        """Return whether MAX_PREPARING requests are in preparation."""
        return len(self._jobs) >= MAX_PREPARING

    def needs(self, message: Submission) -> bool:
        """Return whether a valid request needs preparation."""
        return any(stage.preparer.needs(message) for stage in self._stages)

    def begin(self, client: int, message: Submission, *, is_free: bool) -> None:
        """Start preparing a request. take_done() puts it into the inbox.

        is_free: it is not charged to a share, for example if a client resends it after losing its engine.
        """
        self._first(self.keep(client, message, is_free=is_free))

    def close(self) -> None:
        """Drop all requests, and stop the threads after the work that is running."""
        for job in list(self._jobs.values()):
            self._drop(job)
        for stage in self._stages:
            stage.close()

    def _end(self, job: Job) -> None:
        """Record that a request is done or has failed. For any thread."""
        self._done.put(job)
        self._wake()


class _Stage:
    """One kind of work and its thread. then: gets requests that are done here; end: gets those that fail."""

    def __init__(self, preparer: Preparer, busy: Busy, then: Callable[[Job], None], end: Callable[[Job], None]) -> None:
        self.preparer, self._busy, self._then, self._end = preparer, busy, then, end
        self._waiting: Turns[Job] = Turns(preparer.share)
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a request for this work, or pass it on. For any thread."""
        if self.preparer.needs(job.message):
            self._waiting.put(job.owner, job)
        else:
            self._then(job)

    def close(self) -> None:
        """Stop the thread after the work that is running, and close its preparer."""
        self._waiting.close()
        self._thread.join(_JOIN_S)
        self.preparer.close()

    def _run(self) -> None:
        has_started = False
        while (job := self._waiting.take()) is not None:
            if job.is_dropped:
                continue
            if not has_started:  # that is not charged to a share
                self._start()
                has_started = True
            begin = time.monotonic()
            is_done = self._prepare(job)
            if not job.is_free and self._busy.others_than(*job.owner):
                self._waiting.charge(job.owner, time.monotonic() - begin)
            if not is_done:
                self._waiting.give_back(job.owner, job)
            elif job.error:
                self._end(job)
            else:
                self._then(job)

    def _start(self) -> None:
        try:
            self.preparer.start()
        except Exception:  # the thread must go on: otherwise the requests would wait forever
            log.say(traceback.format_exc())

    def _prepare(self, job: Job) -> bool:
        """Do a part of the work for a request. Return whether nothing is left, or it has failed."""
        try:
            return not self.preparer.prepare(job.message)
        except InvalidRequestError as error:
            job.error = str(error)
        except Exception as error:  # only this request fails; the engine continues
            log.say(traceback.format_exc())
            job.error = f"the request could not be prepared: {type(error).__name__}: {error}"
        return True


def _pack(pairs: list[tuple[int, int]], *, has_choices: bool) -> Abort:
    """Return the Abort for these (number, choice) pairs."""
    numbers, choices = np.array(pairs).T
    return Abort(numbers.astype("<u4").tobytes(), choices.astype("<u2").tobytes() if has_choices else b"")
