"""run_batch(): the requests of a batch file through the HTTP server's own handlers, so many at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from frontend.http.app import App
from frontend.http.batch_files import BatchOutput, BatchRequest, read_requests
from frontend.http.local_caller import LocalAnswer, LocalCaller
from frontend.http.options import HttpOptions
from frontend.http.service import Service
from frontend.session import EngineHandle

_MAX_PAUSE_S = 5.0
_PAUSE_S = 0.1  # before a request that the engine had no room for is sent again


async def run_batch(
    engine: EngineHandle,
    options: HttpOptions,
    source: Path,
    output: BatchOutput,
    *,
    max_in_flight: int,
    on_answer: Callable[[], None],
) -> None:
    """Answer all requests of `source` that `output` has no answer to.

    on_answer: called after each. What the engine refuses because it is full is sent again. Errors: EngineDeadError
    where the engine is gone for good; ConfigError; OSError where the output cannot be written.
    """
    service = Service(engine, options)
    caller = LocalCaller(App(service))
    todo = (request for request in read_requests(source) if request.custom_id not in output.done)

    async def work(requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            output.write(request.custom_id, await _ask(engine, caller, request))
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


async def _ask(engine: EngineHandle, caller: LocalCaller, request: BatchRequest) -> LocalAnswer:
    """Return the answer to one request, however often the engine has no room for it."""
    pause_s = _PAUSE_S
    while True:
        answer = await caller.post(request.url, bytes(request.body))
        if answer.status != 503:
            return answer
        if engine.client.error is not None:
            raise engine.client.error
        given = answer.headers.get(b"retry-after-ms", b"")
        await asyncio.sleep(max(pause_s, int(given) / 1000 if given.isdigit() else 0.0))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
