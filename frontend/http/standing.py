"""Standing: whether this server accepts new requests, and why not. Probes and requests get the same answer from it.

| state | /live | /health, /ready, /ping | a new request |
|---|---|---|---|
| serving, or the engine is being restarted | 200 | 200 | is answered |
| the engine hangs, and will be restarted | 200 | 503 | waits |
| this server has received SIGTERM | 200 | 503 | 503 |
| the engine drains, or its owner has paused it | 200 | 503 | 503 |
| there is no engine | 200 | 503 | 503 |
"""

import asyncio
import time

from frontend.client.client import EngineClient
from frontend.engine.signs import trouble
from frontend.http.errors import HttpError, retry_after
from ipc.errors import EngineCoreError
from ipc.records.black_box import BlackBoxReader, find_black_box

_TIMEOUT_S = 0.5


class Standing:
    """The standing of one server with one engine. hang_timeout: see HttpOptions."""

    def __init__(self, client: EngineClient, hang_timeout: float) -> None:
        self.is_draining = False  # this server ends
        self._client, self._hang_timeout = client, hang_timeout
        self._not_taking = ""  # why the engine accepts no requests, from its last answer
        self._asking: asyncio.Future[None] | None = None
        self._box: BlackBoxReader | None = None  # of the engine, if it is on this machine
        self._box_epoch = -1  # when it was last looked for

    def refuse_requests(self) -> None:
        """Do nothing while new requests are accepted. Errors: HttpError 503."""
        if self.is_draining:
            raise HttpError(503, "the server is shutting down", headers=retry_after(1000))
        if self._client.error is not None:
            raise HttpError(503, "the engine is not running", headers=retry_after(1000))
        if self._not_taking:
            raise HttpError(503, self._not_taking, headers=retry_after(1000))

    def refuse_probe(self) -> None:
        """Do nothing while new requests are accepted and answered soon. It never waits. Errors: HttpError 503."""
        self.refuse_requests()
        if text := self._describe_hang():
            raise HttpError(503, f"the engine hangs: {text}")

    def ask(self) -> None:
        """Ask the engine, without waiting, whether it accepts requests; called regularly."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask))

    def _ask(self) -> None:
        try:
            self._not_taking = self._client.model_information(_TIMEOUT_S).not_taking
        except EngineCoreError:  # it hangs or is being restarted: then requests are accepted, and wait
            self._not_taking = ""

    def _describe_hang(self) -> str:
        """Return why the engine counts as hung, "" if it does not; by its black box, so this never waits."""
        welcome = self._client.welcome
        if self._box_epoch != welcome.epoch:
            self._box_epoch = welcome.epoch
            self._box = find_black_box(welcome.pid, welcome.limits.max_num_seqs)
        return "" if self._box is None else trouble(self._box.read(), time.monotonic_ns(), self._hang_timeout)
