"""Quotas: each key's use. Buckets refill evenly, by a monotonic clock; a request reserves the most that it can take.

A request is checked from its headers, and counted before any work is done for it. Its tokens are reserved once they are
known.
"""

import time
from collections.abc import Callable

from frontend.http.callers.keys import Key
from frontend.http.errors import Headers, HttpError, retry_after
from ipc.keys.bucket import Bucket


class _Use:
    """One key's use. Its buckets start full when the key's limits change."""

    def __init__(self, key: Key, now: float) -> None:
        self.num_running = 0
        self.begin_anew(key, now)

    def begin_anew(self, key: Key, now: float) -> None:
        """Fill the buckets by these limits. Running requests stay counted."""
        self.key = key
        self.requests = Bucket(key.rpm, now) if key.rpm else None
        self.tokens = Bucket(key.tpm, now) if key.tpm else None


class Quotas:
    """The use of all keys. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def check(self, key: Key | None) -> None:
        """Check that the key may begin a request now, without counting one. Errors: HttpError 429."""
        if key is not None and _has_quotas(key):
            self._check_request(self._use_of(key), self._clock())

    def begin(self, key: Key | None) -> "Lease":
        """Count one request. Its lease must be ended. Errors: HttpError 429."""
        if key is None or not _has_quotas(key):
            return Lease(None, self._clock)
        use, now = self._use_of(key), self._clock()
        self._check_request(use, now)
        if use.requests is not None:
            use.requests.take(1, now)
        use.num_running += 1
        return Lease(use, self._clock)

    def _use_of(self, key: Key) -> _Use:
        use = self._uses.get(key.name)
        if use is None:
            use = self._uses[key.name] = _Use(key, self._clock())
        elif use.key != key:
            use.begin_anew(key, self._clock())
        return use

    def _check_request(self, use: _Use, now: float) -> None:
        most = use.key.concurrent
        if most is not None and use.num_running >= most:
            raise HttpError(429, f"the key has {most} requests running, its limit", headers=retry_after(1000))
        _check_bucket("requests", use.requests, 1, use, now)


class Lease:
    """One request's share of its key's quotas, from begin() to end(). use: None for a caller without quotas."""

    def __init__(self, use: _Use | None, clock: Callable[[], float]) -> None:
        self._use, self._clock = use, clock
        self._reserved = 0  # tokens
        self._is_ended = False

    def check_tokens(self, num_tokens: int) -> None:
        """Check that the key has this many tokens left, without taking them. Errors: as reserve()."""
        use, now = self._use, self._clock()
        if use is None or use.tokens is None:
            return
        if num_tokens > use.tokens.size:
            text = f"the request may take {num_tokens} tokens; the key has {use.tokens.size} a minute"
            raise HttpError(403, f"{text}: ask for fewer max_tokens", param="max_tokens")
        _check_bucket("tokens", use.tokens, num_tokens, use, now)

    def reserve(self, num_tokens: int) -> None:
        """Take the tokens that the request may need.

        Errors: HttpError 403 for more tokens than the key has in a minute, 429 while there are not enough left.
        """
        self.check_tokens(num_tokens)
        if self._use is not None and self._use.tokens is not None:
            self._use.tokens.take(num_tokens, self._clock())
            self._reserved = num_tokens

    def end(self, num_tokens: int = 0) -> None:
        """Return the unused part of the reserve. Only the first call counts."""
        if self._is_ended or self._use is None:
            return
        self._is_ended = True
        self._use.num_running -= 1
        if self._use.tokens is not None and self._reserved:
            self._use.tokens.take(num_tokens - self._reserved, self._clock())


def _has_quotas(key: Key) -> bool:
    return not (key.concurrent is None and key.rpm is None and key.tpm is None)


def _check_bucket(what: str, bucket: Bucket | None, count: int, use: _Use, now: float) -> None:
    if bucket is not None and (wait_s := bucket.wait_s(count, now)) > 0:
        headers = [*retry_after(int(wait_s * 1000) + 1), *_shown(use, now)]
        raise HttpError(429, f"the key's {bucket.size} {what} a minute are used up", headers=headers)


def _shown(use: _Use, now: float) -> Headers:
    """Return the x-ratelimit headers."""
    headers: Headers = []
    for what, bucket in ((b"requests", use.requests), (b"tokens", use.tokens)):
        if bucket is not None:
            headers.append((b"x-ratelimit-limit-" + what, b"%d" % bucket.size))
            headers.append((b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(bucket.level(now)))))
    return headers
