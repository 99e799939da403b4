"""run_batch(): the requests of a batch file through the HTTP server's own handlers, a limited number at a time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from frontend.http.app import App
from frontend.http.openai.batch_files import BatchOutput, read_requests
from frontend.http.openai.batch_lines import BatchRequest
from frontend.http.process.options import HttpOptions
from frontend.http.request import LocalAnswer
from frontend.http.service import Service
from frontend.http.wire.local_caller import LocalCaller
from frontend.session import EngineHandle

_MAX_PAUSE_S = 5.0
_PAUSE_S = 0.1  # delay before a request that a full engine refused is sent again
_MAX_REFUSED_S = 600.0  # time without any answer: an engine that is only full answers some requests
_HELD_S = 30.0  # after this time a request that was not refused counts as running


async def run_batch(
    engine: EngineHandle,
    options: HttpOptions,
    source: Path,
    output: BatchOutput,
    *,
    max_in_flight: int,
    on_answer: Callable[[], None],
) -> None:
    """Answer all requests of `source` that have no answer in `output`.

    on_answer: called after each. Requests that a full engine refuses are sent again. Once it has refused all of them
    for _MAX_REFUSED_S, the refusal is the answer, and another run sends them again. Errors: EngineDeadError if the
    engine is gone and does not come back; ConfigError; OSError if the output cannot be written.
    """
    service = Service(engine, options)
    asker = Asker(engine, LocalCaller(App(service)))
    todo = (request for request in read_requests(source) if request.custom_id not in output.done)

    async def work(requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            output.write(request.custom_id, await asker.ask(request))
            on_answer()

    tasks = [asyncio.create_task(work(todo)) for _ in range(max_in_flight)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        service.pump.close()


class Asker:
    """Sends the requests of one batch, each until the engine has room for it."""

    def __init__(self, engine: EngineHandle, caller: LocalCaller) -> None:
        self._engine, self._caller = engine, caller
        self._answered_at = time.monotonic()  # when a request last had an answer other than 503
        self._sent_at: list[float] = []  # of the unanswered requests, oldest first

    async def ask(self, request: BatchRequest) -> LocalAnswer:
        """Return the answer to one request. Errors: EngineDeadError."""
        pause_s = _PAUSE_S
        while True:
            sent_at = time.monotonic()
            self._sent_at.append(sent_at)
            answer = await self._caller.post(request.url, bytes(request.body))
            self._sent_at.remove(sent_at)
            now = time.monotonic()
            if answer.status != 503:
                self._answered_at = now
                return answer
            if self._engine.client.error is not None:
                raise self._engine.client.error
            works = bool(self._sent_at) and now - self._sent_at[0] > _HELD_S
            if now - self._answered_at > _MAX_REFUSED_S and not works:
                return answer
            given = answer.headers.get(b"retry-after-ms", b"")
            await asyncio.sleep(max(pause_s, int(given) / 1000 if given.isdigit() else 0.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
