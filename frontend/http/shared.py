"""Shared: what all models of one HTTP server have in common: keys, quotas, counts, bounds, stored responses."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from frontend.http.callers.access_log import AccessLog
from frontend.http.callers.keys import Key, KeyRing
from frontend.http.callers.meter import HttpMeter
from frontend.http.callers.quotas import Quotas
from frontend.http.holdings import Holdings
from frontend.http.media.domains import AllowedDomains
from frontend.http.process.options import HttpOptions
from frontend.http.replies.reply import Reply
from frontend.http.request import Request, Response
from frontend.http.stored.batch_runs import Batches
from frontend.http.stored.conversations import ConversationStore
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.stored.files import FileStore
from frontend.http.stored.runs import Runs
from frontend.http.stored.store import ResponseStore
from frontend.http.stored.upload import Uploads
from frontend.http.turns import Turns
from frontend.text.request_templates import RequestTemplates
from ipc.keys.signing import SigningKey

if TYPE_CHECKING:
    from frontend.http.media.fetcher import MediaFetcher

#: A key may use one of so many parts of the store, unless the options or its own line say another number.
_PARTS = 4


class Shared:
    """See the module's docstring. Created in the event loop that it is used in. database: None = nothing is kept."""

    def __init__(self, options: HttpOptions, database: Database | None = None) -> None:
        self.options = options
        self.conversations = None if database is None else ConversationStore(database)
        self.store = None if self.conversations is None else ResponseStore(self.conversations)
        self.runs, self.uploads = Runs(), Uploads()
        self.files = None if database is None else FileStore(database)
        self.turns = Turns(max(1, len(os.sched_getaffinity(0)) - 1))
        self.created = int(time.time())
        self.receipt_key = None if options.receipt_key is None else SigningKey(options.receipt_key)
        self.keys = KeyRing(options.key_digests, options.api_key_file)
        self.batches = None if self.files is None else Batches(self.files, self.turns, self.keys, self.most_stored)
        self.quotas = Quotas()
        self.holdings = Holdings()
        self.templates = RequestTemplates() if options.allow_request_templates else None
        self.media = _media_fetcher(options.allowed_media_domains)
        self.meter = HttpMeter()
        self.is_draining = False  # this server ends
        self._access_log = AccessLog(options.log_format) if options.access_log else None

    def most_stored(self, key: Key | None) -> int:
        """Return the bytes that a key may store; without keys, all of the store."""
        options = self.options
        if key is None:
            return options.store_bytes
        given = key.store_bytes or options.store_key_bytes
        return max(options.store_bytes // _PARTS, MIN_STORE_BYTES) if given is None else given

    def note(self, request: Request, answer: Response | Reply, now: float) -> None:
        """Count a request that has ended, and log it if enabled. now: monotonic seconds."""
        self.meter.count(request.route, request.method, answer.status, now - request.received_at)
        if self._access_log is not None:
            self._access_log.write(request, answer.status, answer if isinstance(answer, Reply) else None)

    def close(self) -> None:
        """Stop background work."""
        self.runs.close()
        if self.templates is not None:
            self.templates.close()


def _media_fetcher(domains: Sequence[str]) -> "MediaFetcher | None":
    if not domains:
        return None
    from frontend.http.media.fetcher import MediaFetcher  # needs the extra

    return MediaFetcher(AllowedDomains(domains))
