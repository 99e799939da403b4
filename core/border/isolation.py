"""Isolation: requests that the engine must not run, because one of them has killed it or may have.

The supervisor names them by digest (ipc/records/black_box.py). Quarantined requests are refused. Parked ones wait here
until they are released, and count as queued. The step is not aware of either.
"""

from collections.abc import Callable

import msgspec

from core.border.inbox import Inbox
from core.border.preparation import Waiting
from ipc.records.black_box import request_digest
from ipc.wire.messages import ErrorCode, Submission
from ipc.wire.start_messages import Isolate

QUARANTINED_TEXT = (
    "the engine died or hung repeatedly while it ran this request, so it does not run it again; change the prompt or "
    "the parameters"
)


class Isolation(Waiting):
    """The requests kept apart. Call all methods with the socket's lock held."""

    def __init__(self, inbox: Inbox, epoch: int, isolate: Isolate) -> None:
        super().__init__(inbox, epoch)
        self._parked = frozenset(isolate.parked)
        self._quarantined = frozenset(isolate.quarantined)
        self._since: dict[tuple[int, int], float] = {}  # by client and number; entries of aborted requests stay

    def is_quarantined(self, message: Submission) -> bool:
        """Return whether the request must be refused."""
        return bool(self._quarantined) and _digest(message) in self._quarantined

    def is_parked(self, message: Submission) -> bool:
        """Return whether the request must wait."""
        return bool(self._parked) and _digest(message) in self._parked

    def park(self, client: int, message: Submission, now: float) -> None:
        """Make a request wait. now: in seconds, with the same clock as change()."""
        self.keep(client, message)
        self._since[client, message.number] = now

    def change(self, isolate: Isolate, now: float, begin: Callable[[int, Submission], None]) -> None:
        """Apply the supervisor's current lists. begin: called with each request that need not wait any more.

        take_done() returns the requests that are now quarantined.
        """
        self._parked, self._quarantined = frozenset(isolate.parked), frozenset(isolate.quarantined)
        for key, job in list(self._jobs.items()):
            if self.is_parked(job.message):
                continue
            since, message = self._since.pop(key), job.message
            if self.is_quarantined(message):
                job.error, job.code = QUARANTINED_TEXT, ErrorCode.QUARANTINED
                self._done.put(job)
                continue
            self._drop(job)
            if message.deadline_ms:
                left_ms = message.deadline_ms - int((now - since) * 1000)
                message = msgspec.structs.replace(message, deadline_ms=max(1, left_ms))
            begin(job.client, message)
            for abort in job.aborts:
                self._inbox.put(job.client, abort)


def _digest(message: Submission) -> bytes:
    return request_digest(message.prompt_token_ids, message.params, message.features)
