"""Resumption: how a client continues after its engine or connection was lost: it submits unfinished requests again."""

from collections.abc import Callable

from frontend.client.journal import Journal
from ipc.errors import RequestFailedError
from ipc.wire.messages import FinishReason, Limits, encode


class Resumption:
    """A journal's unfinished requests as frames. Under the client's lock."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def is_full(self, limits: Limits) -> bool:
        """Return whether the lost engine would accept no more requests; while there is no engine, only the client can
        tell.
        """
        bound = limits.max_num_queued_requests
        return bound > 0 and len(self._journal.unfinished()) >= bound + limits.max_num_seqs

    def submit_again(self, send: Callable[[bytes], None], limits: Limits, now: float) -> bool:
        """Send the unfinished requests in the new session; return whether there is news of requests that ended.

        Requests with tokens come first, the shortest first, so that most streams continue soon. The others follow in
        order of submission, as do requests that no engine has accepted yet.
        """
        journal, news = self._journal, False
        for number in journal.unfinished_in_order().tolist():
            if journal.is_aborted(number):
                news |= journal.finish(number, FinishReason.ABORT, now)
                continue
            frames = [encode(message) for message in journal.resubmission(number, now)]
            try:
                if max(map(len, frames)) > limits.max_message_bytes:
                    raise RequestFailedError("the connection was lost and the request has become too long to continue")
                for frame in frames:
                    send(frame)
            except RequestFailedError as error:
                news |= journal.fail(number, error, now)
        return news
