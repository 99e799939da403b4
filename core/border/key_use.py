"""KeyUse: current and past use of one key's clients over all their connections, and what their quota leaves.

Tokens are counted as they are read and generated. A request is accepted if there is room for its prompt. Tokens
generated beyond the quota are a debt, and later requests wait until it is paid off.
"""

from collections.abc import Callable

import numpy as np

from core.border.accounts import Account
from ipc.keys.bucket import Bucket
from ipc.keys.quota import Quota
from ipc.log_lines import counted
from ipc.wire.messages import ErrorCode, Outputs, RequestFailed, Submission

_OWN = "/"  # separates the name of a key from the name of a tenant
_SOON_MS = 1000


class KeyUse:
    """One key's use. name: the key's name in the list of clients. now: monotonic seconds."""

    def __init__(self, name: str, quota: Quota, now: float) -> None:
        self.account = Account()  # of its unfinished requests
        self.name = name
        self.set_quota(quota, now)

    def set_quota(self, quota: Quota, now: float) -> None:
        """Use another quota from now on. What was used in this minute is forgiven."""
        self.quota = quota
        self._requests = Bucket(quota.rpm, now) if quota.rpm else None
        self._tokens = Bucket(quota.tpm, now) if quota.tpm else None

    def tenant(self, named: str) -> str:
        """Return the tenant for a request. named: the tenant given by its client, one of the key's own."""
        return f"{self.name}{_OWN}{named}" if named else self.name

    def refusal(self, message: Submission, now: float) -> RequestFailed | None:
        """Return why the quota refuses a request now, or None if it does not."""
        quota, number = self.quota, message.number
        size = len(message.prompt_token_ids) // 4
        if quota.tpm is not None and size > quota.tpm:
            has = f"the prompt has {counted(size, 'token')}"
            text = f"{has}, but the key {self.name} is limited to {quota.tpm} a minute (tpm)"
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
        """Count an accepted request."""
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(len(message.prompt_token_ids) // 4, now)

    def note(self, outputs: Outputs, now: float) -> None:
        """Count the tokens that are sent to one of its clients."""
        if self._tokens is not None:
            self._tokens.take(int(np.frombuffer(outputs.counts, "<u2").sum()), now)


class KeyUses:
    """The use of all keys. quota_of: returns the current quota for a key's name."""

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of
        self._uses: dict[str, KeyUse] = {}

    def of(self, name: str, now: float) -> KeyUse:
        """Return the use of a key, with the quota from the current list of clients."""
        use, quota = self._uses.get(name), self._quota_of(name)
        if use is None:
            use = self._uses[name] = KeyUse(name, quota, now)
        elif use.quota != quota:
            use.set_quota(quota, now)
        return use
