"""Quotas: what each key has used. Buckets refill evenly, on a monotonic clock; a request reserves what it may take."""

import time
from collections.abc import Callable

from frontend.http.callers.keys import Key
from frontend.http.errors import Headers, HttpError, retry_after
from ipc.keys.bucket import Bucket


class _Use:
    """One key's use. It begins anew when the key's limits change."""

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        self.num_running = 0
        self.requests = Bucket(key.rpm, now) if key.rpm else None
        self.tokens = Bucket(key.tpm, now) if key.tpm else None


class Quotas:
    """The use of all keys. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def take(self, key: Key | None, num_tokens: int) -> Callable[[int], None] | None:
        """Take one request of up to num_tokens; return what to call with the tokens that it took, at its end.

        None for a caller without quotas. Errors: HttpError 403 for more tokens than the key has in a minute, 429 while
        there are not enough left.
        """
        if key is None or (key.concurrent is None and key.rpm is None and key.tpm is None):
            return None
        now = self._clock()
        use = self._uses.get(key.name)
        if use is None or use.key != key:
            running = 0 if use is None else use.num_running
            use = self._uses[key.name] = _Use(key, now)
            use.num_running = running
        if key.concurrent is not None and use.num_running >= key.concurrent:
            raise HttpError(429, f"the key has {key.concurrent} requests running, its limit", headers=retry_after(1000))
        if use.tokens is not None and num_tokens > use.tokens.size:
            text = f"the request may take {num_tokens} tokens; the key has {use.tokens.size} in a minute"
            raise HttpError(403, f"{text}: ask for fewer max_tokens", param="max_tokens")
        self._check(use, num_tokens, now)
        if use.requests is not None:
            use.requests.take(1, now)
        if use.tokens is not None:
            use.tokens.take(num_tokens, now)
        use.num_running += 1
        return self._settler(use.key.name, num_tokens)

    def _settler(self, name: str, reserved: int) -> Callable[[int], None]:
        def settle(used: int) -> None:
            use = self._uses[name]
            use.num_running -= 1
            if use.tokens is not None:
                use.tokens.take(used - reserved, self._clock())

        return settle

    def _check(self, use: _Use, num_tokens: int, now: float) -> None:
        for what, bucket, count in (("requests", use.requests, 1), ("tokens", use.tokens, num_tokens)):
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
