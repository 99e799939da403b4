"""Batches: the batches of a server, which are worked off behind the requests of callers that wait.

A line of a batch is answered by the server's own handlers, as a request of the key that made the batch. Its answer is
stored as one row, under the line's number. If the server is killed, the next one answers the lines that have no row, so
no line is lost or doubled. A line that gives no seed has one of its batch and number, so its tokens are the same.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from frontend.http.callers.keys import Key, KeyRing
from frontend.http.errors import HttpError
from frontend.http.openai.batch_lines import MAX_LINE_BYTES, BatchRequest, answer_line, read_line, response_of
from frontend.http.request import LocalAnswer
from frontend.http.stored.batch_store import CANCELLING, FINALIZING, RUNNING, VALIDATING, Batch, BatchStore, Problem
from frontend.http.stored.files import FileStore
from frontend.http.stored.slots import Place, Slots
from frontend.http.turns import Turns
from ipc.errors import ConfigError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
#: Added to the priorities of a batch's requests: with the engine's policy "priority" or "fair", others go first.
PRIORITY = 1000
MAX_LINES = 50_000
_MAX_PROBLEMS = 20
_MAX_RUNNING = 16  # batches at the same time
_TIDY_S = 600.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0  # before a line that was refused is sent again
_STORE_AGAIN_S = 5.0
_MAX_PENDING, _MAX_PENDING_BYTES = 256, 4 << 20  # lines of one batch that are read and not answered
_LONG_BYTES = 64 << 10  # of a line that is read on a thread
_LOOK_S = 0.1  # while requests of callers wait
_MOST_PRIORITY = 2**31 - 1
_T = TypeVar("_T")
_log = logging.getLogger("engine_core.http")


class Post(Protocol):
    """Sends a request to the server's own handlers (frontend/http/wire/local_caller.py)."""

    async def __call__(
        self, path: str, body: bytes, *, key: Key | None = None, request_id: str | None = None
    ) -> LocalAnswer:
        """Return the answer to a POST of JSON."""


class Batches:
    """See the module's docstring. Created in the event loop that it is used in.

    most_stored: returns the bytes that a key may store.
    """

    def __init__(self, files: FileStore, turns: Turns, keys: KeyRing, most_stored: Callable[[Key | None], int]) -> None:
        self.files, self.store = files, BatchStore(files)
        self.turns, self.keys, self.most_stored = turns, keys, most_stored
        self.runs: dict[str, BatchRun] = {}
        self.places = Slots(lambda: _MAX_RUNNING)
        self.num_lines = 0  # that are being answered
        self._tidying: asyncio.Task[None] | None = None

    async def start(self, post: Post, num_lines: Callable[[], int], has_room: Callable[[], Awaitable[bool]]) -> None:
        """Begin to work, with the batches that an earlier server has left, as far as the store can be read.

        post: answers a line. num_lines: returns how many lines may run now, of all batches. has_room: returns whether
        no request waits in an engine; one line may run even then, so that every batch ends.
        """
        self.post, self.lines, self.has_room = post, Slots(num_lines), has_room
        try:
            await self.files.remove_left()
            left, damaged = await self.store.unfinished()
        except HttpError as error:
            _log.error("no batch is taken up again: %s", error)
            return
        for one in damaged:
            _log.error("the batch %.80r in the store is damaged", one)
        for batch in left:
            self.begin(batch)
        self._tidying = asyncio.create_task(self._tidy())

    def begin(self, batch: Batch) -> None:
        """Work off a batch."""
        self.runs[batch.id] = BatchRun(self, batch)

    async def cancel(self, batch: Batch) -> Batch:
        """End a batch early; return its state. One that has ended stays as it is. Errors: HttpError 500, 507."""
        run = self.runs.get(batch.id)
        if run is None:
            return batch
        await run.cancel()
        return run.batch

    async def close(self) -> None:
        """Stop. The next server takes the batches up again."""
        tasks = [run.task for run in self.runs.values()]
        if self._tidying is not None:
            tasks.append(self._tidying)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tidy(self) -> None:
        """Remove what is too old, regularly."""
        while True:
            try:
                await self.files.remove_old()
                if days := self.files.database.max_days:
                    await self.store.remove_old(time.time() - days * 86_400)
            except HttpError as error:
                _log.error("old files are not removed: %s", error)
            await asyncio.sleep(_TIDY_S)


class BatchRun:
    """The work on one batch, by its own task."""

    def __init__(self, batches: Batches, batch: Batch) -> None:
        self.batch, self._all = batch, batches
        self._end_as = "cancelled" if batch.status == CANCELLING else batch.plan.end_as
        self._work: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        """End early. Errors: HttpError 500, 507: then it ends too, but a kill may begin it again."""
        if self._end_as or self.batch.status not in (VALIDATING, RUNNING):
            return
        self._end_as = "cancelled"
        try:
            await self._reach(CANCELLING)
        finally:
            self._stop("cancelled")

    def expire(self) -> None:
        """End because the completion window is over."""
        self._stop("expired")

    def _stop(self, end_as: str) -> None:
        self._end_as = self._end_as or end_as
        if self._work is not None:
            self._work.cancel()

    async def _run(self) -> None:
        batch = self.batch
        left_s = max(0.0, batch.plan.expires - time.time())
        timer = asyncio.get_running_loop().call_later(left_s, self.expire)
        self._work = asyncio.create_task(self._do())
        try:
            try:
                await self._work
            except asyncio.CancelledError:
                if not self._end_as:  # of this server
                    self._work.cancel()
                    await asyncio.gather(self._work, return_exceptions=True)
                    raise
            if self._end_as == "expired" and batch.status != FINALIZING:
                await self._add_expired()
            await self._finish(self._end_as or "completed")
        except HttpError as error:
            await self._fail(Problem("insufficient_storage" if error.status == 507 else "store_failed", str(error)))
        except _InvalidError as error:
            await self._fail(*error.problems)
        except Exception:
            _log.exception("the batch %s failed", batch.id)
            await self._fail(Problem("server_error", "the server failed to work off this batch"))
        finally:
            timer.cancel()
        self._all.runs.pop(batch.id, None)

    async def _do(self) -> None:
        """Validate the batch, and answer its lines. Errors: HttpError; _InvalidError."""
        batch, places = self.batch, self._all.places
        await places.take(batch.tenant)
        try:
            if batch.status == VALIDATING:
                await self._validate()
                if not self._end_as:
                    await self._reach(RUNNING)
            if batch.status == RUNNING:
                await self._answer_all()
        finally:
            places.give()

    # --- its states ---

    async def _reach(self, status: str) -> None:
        self.batch.status = status
        self.batch.plan.times[status] = int(time.time())
        await self._all.store.change(self.batch)

    async def _finish(self, status: str) -> None:
        """End the batch, show its files, and then say so: who sees the end finds the files. Errors: HttpError."""
        if self.batch.status != FINALIZING:
            self.batch.plan.end_as = status
            await self._reach(FINALIZING)
        ended = self._ended(status)
        await self._all.store.finish(ended)
        self.batch = ended

    def _ended(self, status: str) -> Batch:
        """Return the batch as it is when it has ended. Its own state stays."""
        plan = self.batch.plan
        times = {**plan.times, status: int(time.time())}
        return msgspec.structs.replace(self.batch, status=status, plan=msgspec.structs.replace(plan, times=times))

    async def _fail(self, *problems: Problem) -> None:
        """End the batch with an error. As long as that cannot be stored, this server alone says it."""
        self._end_as = self._end_as or "failed"  # it cannot be cancelled any more
        ended = self._ended("failed")
        ended.plan.problems = list(problems)
        _log.error("the batch %s: %s", ended.id, problems[0].message)
        while True:
            try:
                await self._all.store.finish(ended)
                return
            except HttpError as error:
                _log.error("the end of the batch %s is not stored yet: %s", ended.id, error)
            finally:
                self.batch = ended
            await asyncio.sleep(_STORE_AGAIN_S)

    # --- its lines ---

    async def _lines(self) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yield the lines of the input with their numbers, from 1, some at a time. Empty ones are left out."""
        number, begun, at = 1, b"", -1
        while parts := await self._all.files.parts(self.batch.input, at):
            at = parts[-1][0]
            *whole, begun = (begun + b"".join(part for _, part in parts)).split(b"\n")
            yield [(index, line) for index, line in enumerate(whole, number) if line.strip()]
            number += len(whole)
            if len(begun) > MAX_LINE_BYTES:
                text = f"the line is longer than {MAX_LINE_BYTES} bytes"
                raise _InvalidError([Problem("invalid_line", text, number)])
        if begun.strip():
            yield [(number, begun)]

    async def _validate(self) -> None:
        """Check all lines before any is answered. Errors: HttpError; _InvalidError."""
        plan, seen, problems = self.batch.plan, set[bytes](), list[Problem]()
        plan.total = 0
        async for lines in self._lines():
            plan.total += len(lines)
            size = sum(len(line) for _, line in lines)
            problems += await self._in_turn(size, partial(self._check, lines, seen))
            if plan.total > MAX_LINES:
                problems.append(Problem("too_many_requests", f"a batch has at most {MAX_LINES} requests"))
            if len(problems) >= _MAX_PROBLEMS:
                break
        if not plan.total:
            problems.append(Problem("empty_file", "the file has no requests"))
        if problems:
            raise _InvalidError(problems[:_MAX_PROBLEMS])

    def _check(self, lines: Sequence[tuple[int, bytes]], seen: set[bytes]) -> list[Problem]:
        problems = []
        for number, line in lines:
            try:
                request = read_line(line, (self.batch.plan.endpoint,))
            except ConfigError as error:
                problems.append(Problem("invalid_line", str(error), number))
                continue
            digest = hashlib.blake2b(request.custom_id.encode(errors="replace"), digest_size=16).digest()
            if digest in seen:
                text = f"the custom_id {request.custom_id!r:.80} appears twice"
                problems.append(Problem("duplicate_custom_id", text, number, "custom_id"))
            seen.add(digest)
        return problems

    async def _answer_all(self) -> None:
        """Answer the lines that have no answer yet. Errors: HttpError."""
        files, plan, tenant = self._all.files, self.batch.plan, self.batch.tenant
        done = await self._count()
        pending = dict[asyncio.Task[None], int]()  # bytes of its line
        try:
            async for lines in self._lines():
                for number, line in lines:
                    if number in done:
                        continue
                    await _settle(pending)
                    place = Place(self._all.lines, tenant)
                    await place.take()
                    task = asyncio.create_task(self._answer(number, line, place))
                    task.add_done_callback(lambda _, place=place: place.give())  # type: ignore[misc]
                    pending[task] = len(line)
            await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if len(await files.numbers((plan.output, plan.errors))) < plan.total:
            raise _InvalidError([Problem("input_lost", "the input file has fewer lines than when it was checked")])

    async def _count(self) -> set[int]:
        """Count the answers that are stored, and return the numbers of their lines."""
        files, plan = self._all.files, self.batch.plan
        completed, failed = await files.numbers((plan.output,)), await files.numbers((plan.errors,))
        plan.completed, plan.failed = len(completed), len(failed)
        return completed | failed

    async def _answer(self, number: int, line: bytes, place: Place) -> None:
        """Answer one line, with a place that was taken, and store the answer. Errors: HttpError; _InvalidError."""
        pause_s = _FIRST_PAUSE_S
        request, body = await self._read(number, line)
        while True:
            answer = await self._ask(request.url, body, number)
            if answer.status not in (429, 503) or answer.headers.get(b"x-should-retry") == b"false":
                break
            place.give()
            given = answer.headers.get(b"retry-after-ms", b"")
            await asyncio.sleep(max(pause_s, int(given) / 1000 if given.isdigit() else 0.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            await place.take()
        request_id = answer.headers.get(b"x-request-id", b"").decode()
        response = response_of(answer.status, request_id, answer.body)
        made = answer_line(self._line_id(number), request.custom_id, response)
        await self._store(number, made, is_error=answer.status >= 400)

    async def _read(self, number: int, line: bytes) -> tuple[BatchRequest, bytes]:
        """Return a line's request, and its body as it is sent."""

        def read() -> tuple[BatchRequest, bytes]:
            request = read_line(line)
            return request, own_body(request, self.batch.id, number)

        if len(line) <= _LONG_BYTES:
            return read()
        return await self._in_turn(len(line), read)

    async def _in_turn(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, run on a thread as soon as there is room for it. size: bytes of its input."""
        while True:
            try:
                return await self._all.turns.run(self.batch.tenant, size, work)
            except HttpError as error:
                if error.status != 503:
                    raise
            await asyncio.sleep(_MAX_PAUSE_S)

    async def _ask(self, url: str, body: bytes, number: int) -> LocalAnswer:
        """Send a line to the server's handlers, once no caller waits. Errors: _InvalidError if its key is gone."""
        batches, tenant = self._all, self.batch.tenant
        while batches.num_lines and not await batches.has_room():
            await asyncio.sleep(_LOOK_S)
        keys = batches.keys
        key = keys.named(tenant)
        if key is None and not keys.is_empty:
            raise _InvalidError([Problem("key_gone", "the key that made this batch is not known any more")])
        batches.num_lines += 1
        try:
            return await batches.post(url, body, key=key, request_id=f"{self.batch.id}-{number}")
        finally:
            batches.num_lines -= 1

    async def _store(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Store the answer to a line. Errors: HttpError 500, 507."""
        batch, plan, batches = self.batch, self.batch.plan, self._all
        most = batches.most_stored(batches.keys.named(batch.tenant))
        await batches.files.add_part(plan.errors if is_error else plan.output, batch.tenant, number, line, most)
        plan.completed, plan.failed = plan.completed + (not is_error), plan.failed + is_error

    async def _add_expired(self) -> None:
        """Store an error for each line without an answer. Errors: HttpError."""
        done = await self._count()
        error = {"code": "batch_expired", "message": "the request was not answered within the completion window"}
        if RUNNING in self.batch.plan.times:  # otherwise its lines were not checked
            async for lines in self._lines():
                for number, line in lines:
                    if number not in done:
                        request, _ = await self._read(number, line)
                        made = answer_line(self._line_id(number), request.custom_id, None, error)
                        await self._store(number, made, is_error=True)

    def _line_id(self, number: int) -> str:
        return f"batch_req_{_digest(self.batch.id, number, 12).hex()}"


async def _settle(pending: dict[asyncio.Task[None], int]) -> None:
    """Wait until few lines are pending. A line that is refused waits without a place. Errors: those of the lines."""
    while True:
        for task in [one for one in pending if one.done()]:
            del pending[task]
            task.result()
        if len(pending) < _MAX_PENDING and sum(pending.values()) < _MAX_PENDING_BYTES:
            return
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


class _InvalidError(Exception):
    """A batch cannot be worked off."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems[0].message)
        self.problems = problems


def own_body(request: BatchRequest, batch_id: str, number: int) -> bytes:
    """Return the body of a line as it is sent: less urgent, with a seed of its own, and not stored unless it says so.

    A field of a wrong type stays as it is, for the error that names it.
    """
    fields = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    given = {name: bytes(fields[name]) for name in ("seed", "priority", "store") if name in fields}
    absent = {name for name in ("seed", "priority", "store") if given.get(name, b"null") == b"null"}
    if "seed" in absent and request.url != "/v1/embeddings":
        seed = int.from_bytes(_digest(batch_id, number, 8), "little") >> 1
        fields["seed"] = msgspec.Raw(b"%d" % seed)
    if "store" in absent and request.url == "/v1/responses":
        fields["store"] = msgspec.Raw(b"false")
    if "priority" in absent:
        fields["priority"] = msgspec.Raw(b"%d" % PRIORITY)
    else:
        with contextlib.suppress(msgspec.ValidationError):
            own = msgspec.json.decode(given["priority"], type=int)
            fields["priority"] = msgspec.Raw(b"%d" % min(own + PRIORITY, max(own, _MOST_PRIORITY)))
    return msgspec.json.encode(fields)


def _digest(batch_id: str, number: int, size: int) -> bytes:
    return hashlib.blake2b(f"{batch_id}:{number}".encode(), digest_size=size).digest()
