"""Room: whether the engine has room for a new request: its bounds, and what each client and tenant may take of them."""

from core.border.accounts import Account, Load
from core.border.inbox import Inbox
from core.border.sessions import Sessions
from ipc.wire.messages import ErrorCode, Limits, RequestFailed, Submission

RETRY_AFTER_MS = 1000


class Room:
    """The bounds of one engine, for the thread that holds the socket's lock."""

    def __init__(self, limits: Limits, sessions: Sessions, inbox: Inbox) -> None:
        self._limits = limits
        self._sessions = sessions
        self._inbox = inbox

    def refusal(self, message: Submission, load: Load, account: Account, tenant: str) -> RequestFailed | None:
        """Return the refusal of a new request; None: there is room. account: its client's; tenant: "" = nobody's."""
        full = self._bound_beyond(load, account, tenant)
        if not full:
            return None
        text = f"{full}; send again later"
        return RequestFailed(message.number, ErrorCode.RESOURCE_EXHAUSTED, text, RETRY_AFTER_MS)

    def _bound_beyond(self, load: Load, account: Account, tenant: str) -> str:
        """Return the bound that the request would exceed, "" for none. A request alone in a queue always fits."""
        limits = self._limits
        if account.num_bytes > 0 and account.num_bytes + load.num_bytes > limits.max_client_bytes:
            return (
                f"this client's unfinished requests take {account.num_bytes} bytes of memory, this one takes "
                f"{load.num_bytes}, and max_client_bytes is {limits.max_client_bytes}"
            )
        queued, tokens = self._inbox.num_queued_requests, self._inbox.num_queued_tokens
        num_left, tokens_left = limits.max_num_queued_requests - queued, limits.max_num_queued_tokens - tokens
        if num_left <= 0:
            return f"{queued} requests wait to begin, which is max_num_queued_requests"
        if tokens > 0 and load.num_tokens > tokens_left:
            return f"{tokens} tokens wait to begin and max_num_queued_tokens is {limits.max_num_queued_tokens}"
        full = self._beyond_share("this client's", account, load, num_left, tokens_left)
        if tenant and not full:  # half of that, so that other tenants of the same client find room, too
            account = self._sessions.tenant(tenant)
            num_left += limits.max_num_seqs - account.num_queued
            tokens_left += limits.max_model_len - account.num_queued_tokens
            full = self._beyond_share("this tenant's", account, load, num_left, tokens_left)
        return full

    def _beyond_share(self, whose: str, account: Account, load: Load, num_left: int, tokens_left: int) -> str:
        """Return why the request is more than a share of what is left; "" where it is not."""
        if account.num_queued >= max(0, num_left) + self._limits.max_num_seqs:
            waiting, left = f"{account.num_queued} of the requests", f"{num_left} places"
        elif account.num_queued_tokens + load.num_tokens > max(0, tokens_left) + self._limits.max_model_len:
            waiting, left = f"{account.num_queued_tokens} of the tokens", f"{tokens_left}"
        else:
            return ""
        return f"{waiting} that wait to begin are {whose}, and the last {left} are for others"
