"""KeyUse: what the clients with one key take and have taken, over all their connections, and what their quota leaves.

Tokens are counted as they are read and made: a request is let in while there is room for its prompt, and what it
makes beyond the quota is a debt that later requests wait for.
"""

from collections.abc import Callable

import numpy as np

from core.border.accounts import Account
from ipc.keys.bucket import Bucket
from ipc.keys.quota import Quota
from ipc.wire.messages import ErrorCode, Outputs, RequestFailed, Submission

_OWN = "/"  # between the name of a key and that of one of its own tenants
_SOON_MS = 1000


class KeyUse:
    """One key's use. name: the key's, as the list of clients has it. now: monotonic seconds."""

    def __init__(self, name: str, quota: Quota, now: float) -> None:
        self.account = Account()  # of its unfinished requests
        self.name = name
        self.set_quota(quota, now)

    def set_quota(self, quota: Quota, now: float) -> None:
        """Count by another quota from now on; what has been taken in this minute is forgiven."""
        self.quota = quota
        self._requests = Bucket(quota.rpm, now) if quota.rpm else None
        self._tokens = Bucket(quota.tpm, now) if quota.tpm else None

    def tenant(self, named: str) -> str:
        """Return whose a request is. named: the tenant that its client says, one of the key's own."""
        return f"{self.name}{_OWN}{named}" if named else self.name

    def refusal(self, message: Submission, now: float) -> RequestFailed | None:
        """Return why the quota does not let a request in now; None if it does."""
        quota, number = self.quota, message.number
        size = len(message.prompt_token_ids) // 4
        if quota.tpm is not None and size > quota.tpm:
            text = f"the prompt has {size} tokens, and the key {self.name} has {quota.tpm} in a minute (tpm)"
            return RequestFailed(number, ErrorCode.INVALID_ARGUMENT, text)
        if quota.concurrent is not None and self.account.num_requests >= quota.concurrent:
            text = f"the key {self.name} has {quota.concurrent} unfinished requests, its limit (concurrent)"
            return RequestFailed(number, ErrorCode.RESOURCE_EXHAUSTED, f"{text}; send again later", _SOON_MS)
        for what, bucket, count in (("requests (rpm)", self._requests, 1), ("tokens (tpm)", self._tokens, size)):
            if bucket is not None and (wait_s := bucket.wait_s(count, now)) > 0:
                text = f"the key {self.name} has used up its {bucket.size} {what} a minute; send again later"
                return RequestFailed(number, ErrorCode.RESOURCE_EXHAUSTED, text, int(wait_s * 1000) + 1)
        return None

    def take(self, message: Submission, now: float) -> None:
        """Count a request that was let in."""
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(len(message.prompt_token_ids) // 4, now)

    def note(self, outputs: Outputs, now: float) -> None:
        """Count the tokens that are sent to one of its clients."""
        if self._tokens is not None:
            self._tokens.take(int(np.frombuffer(outputs.counts, "<u2").sum()), now)


class KeyUses:
    """The use of all keys. quota_of: returns the present quota of a key's name."""

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of
        self._uses: dict[str, KeyUse] = {}

    def of(self, name: str, now: float) -> KeyUse:
        """Return the use of a key; its quota is what the list of clients says now."""
        use, quota = self._uses.get(name), self._quota_of(name)
        if use is None:
            use = self._uses[name] = KeyUse(name, quota, now)
        elif use.quota != quota:
            use.set_quota(quota, now)
        return use
